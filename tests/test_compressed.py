"""DeepSeek-V4's attention and streams: against loops in float64, however steps are cut and prefixes end."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest
import tiny
import torch
from parity import Mode, Reference, compare, generate, tiny_engine
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from tracklayer.config import load_model_config
from tracklayer.errors import CheckpointError
from tracklayer.kernels.rope import rope_table
from tracklayer.layers import compressed
from tracklayer.layers.batch import Batch
from tracklayer.layers.compressed import Compressed, completing
from tracklayer.layers.spec import CompressedSpec, CompressorSpec, IndexerSpec, NormSpec, RopeSpec, StreamsSpec
from tracklayer.layers.streams import Streams
from tracklayer.models.registry import resolve
from tracklayer.runner.kv_cache import Caches, kv_bytes_per_slot

CPU = torch.device("cpu")
LENGTH, HIDDEN, EPS = 23, 18, 1e-5
KINDS = {
    "window": None,
    "heavy": CompressorSpec(rate=5),
    "sparse": CompressorSpec(rate=3, overlap=True, indexer=IndexerSpec(num_heads=7, head_dim=8, top_k=2)),
    "all entries": CompressorSpec(rate=3, overlap=True, indexer=IndexerSpec(num_heads=7, head_dim=8, top_k=50)),
}


def build(kind: str) -> tuple[Compressed, dict[str, torch.Tensor]]:
    spec = CompressedSpec(
        num_heads=4,
        width=10,
        q_lora_rank=9,
        rope=RopeSpec(dim=6, theta=50.0, interleaved=True),
        norm=NormSpec(eps=EPS),
        window=4,
        groups=2,
        group_rank=5,
        compressor=KINDS[kind],
    )
    module = Compressed(spec, HIDDEN, rope_table(6, 50.0, None, 64), cache=0)
    generator = torch.Generator().manual_seed(3)
    parts = {}
    for name, view, _ in module.parts():
        view.copy_(torch.randn(view.shape, generator=generator) * (0.5 if view.dim() > 1 else 1.0))
        parts[name] = view.double()
    return module, parts


def normed(x, weight=1.0):
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def turned(x, position):
    """The last six numbers as three complex ones, turned by the position."""
    angles = [position * 50.0 ** (-pair / 3) for pair in range(3)]
    out = x.clone()
    for pair, angle in enumerate(angles):
        a, b = x[..., 4 + 2 * pair - 10], x[..., 5 + 2 * pair - 10]
        out[..., 4 + 2 * pair - 10] = a * math.cos(angle) - b * math.sin(angle)
        out[..., 5 + 2 * pair - 10] = a * math.sin(angle) + b * math.cos(angle)
    return out


def entries(parts, name, spec, x, width):
    """Entries of whole windows, one by one."""
    value, gate = x @ parts[f"{name}.kv.weight"].T, x @ parts[f"{name}.gate.weight"].T
    rate, found = spec.rate, []
    turn = (
        turned if width == 10 else lambda y, position: torch.cat([y[:2], turned(torch.cat([y, y])[6:], position)[4:]])
    )
    for w in range(len(x) // rate):
        values, gates = [], []
        for j in range(rate):
            bias = parts[f"{name}.bias"][j]
            if spec.overlap and w > 0:
                t = (w - 1) * rate + j
                values.append(value[t, :width])
                gates.append((gate[t] + bias)[:width])
            t = w * rate + j
            values.append(value[t, -width:])
            gates.append((gate[t] + bias)[-width:])
        entry = (torch.stack(values) * torch.stack(gates).softmax(0)).sum(0)
        found.append(turn(normed(entry, parts[f"{name}.norm.weight"]), w * rate))
    return found


def by_loops(spec, parts, x):
    """The whole layer for one sequence [T, HIDDEN], a token and a head at a time."""
    made = spec.compressor
    latent = normed(x @ parts["q_a.weight"].T, parts["q_norm.weight"])
    keys = [turned(normed(row, parts["kv_norm.weight"]), t) for t, row in enumerate(x @ parts["kv.weight"].T)]
    big = entries(parts, "compressor", made, x, spec.width) if made else []
    small = entries(parts, "indexer.compressor", made, x, 8) if made and made.indexer else None
    out = []
    for t in range(len(x)):
        seen = list(range((t + 1) // made.rate)) if made else []
        if small:
            weights = x[t] @ parts["indexer.weights.weight"].T
            queries = (latent[t] @ parts["indexer.q_b.weight"].T).view(7, 8)
            queries = [torch.cat([q[:2], turned(torch.cat([q, q])[6:], t)[4:]]) for q in queries]
            score = {e: sum(w * (q @ small[e]).relu() for w, q in zip(weights, queries, strict=True)) for e in seen}
            seen = sorted(seen, key=lambda e: -score[e])[: made.indexer.top_k]
        visible = torch.stack(keys[max(0, t - spec.window + 1) : t + 1] + [big[e] for e in seen])
        heads = []
        for n, q in enumerate((latent[t] @ parts["q_b.weight"].T).view(spec.num_heads, spec.width)):
            logits = visible @ turned(normed(q), t) / math.sqrt(spec.width)
            weights = torch.cat([logits, parts["sinks"][n : n + 1]]).softmax(0)[:-1]
            heads.append(turned(weights @ visible, -t))
        halves = torch.cat(heads).view(2, -1)
        low = [half @ o_a.T for half, o_a in zip(halves, parts["o_a.weight"].view(2, 5, -1), strict=True)]
        out.append(torch.cat(low) @ parts["o_b.weight"].T)
    return torch.stack(out)


def batch_of(caches: Caches, first: int, count: int, **fields) -> Batch:
    """`count` tokens of row 1 from position `first` on; slots lie apart and backwards."""
    positions = torch.arange(first, first + count, dtype=torch.int32)
    table = torch.full((3, 64), 999, dtype=torch.int32)  # other rows and later positions may hold anything
    table[1, : first + count] = 70 - 2 * torch.arange(first + count, dtype=torch.int32)
    settings = {
        "token_ids_T": positions,
        "positions_T": positions,
        "slots_T": 70 - 2 * positions,
        "rows_B": torch.tensor([1], dtype=torch.int32),
        "starts_B1": torch.tensor([0, count], dtype=torch.int32),
        "lens_B": torch.tensor([first + count], dtype=torch.int32),
        "slot_table_RC": table,
        "max_query": count,
        "max_len": first + count,
        "kv": caches.kv,
    }
    return Batch(**{**settings, **fields})


@pytest.mark.parametrize("cuts", [(), (1, 2, 3), (7,), (4, 5, 14, 15), tuple(range(1, LENGTH))], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_loops_however_it_is_cut(kind, cuts, monkeypatch):
    module, parts = build(kind)
    x = torch.randn(LENGTH, HIDDEN, generator=torch.Generator().manual_seed(1))
    caches = Caches.allocate(90, [module.spec], None, torch.float32, CPU)
    caches.kv[0][0].fill_(float("nan"))  # what no token of the sequence wrote must not be read
    monkeypatch.setattr(compressed, "PIECE", 300)  # a few tokens at a time
    edges = (0, *cuts, LENGTH)
    pieces = [module(x[a:b], batch_of(caches, a, b - a)) for a, b in pairwise(edges)]
    expected = by_loops(module.spec, parts, x.double())
    torch.testing.assert_close(torch.cat(pieces).double(), expected, atol=2e-5, rtol=2e-5)


def test_every_column_of_the_cache_is_used_once():
    module, _ = build("sparse")
    spec, columns = module.spec, [range(module.spec.width)]
    for made in (module.compressor, module.indexer.compressor):
        columns.append(range(made.inputs.start, made.inputs.stop))
        own_values = range(made.inputs.start + made.width, made.inputs.start + 2 * made.width)
        assert range(made.entry.start, made.entry.stop) == own_values
    assert sorted(c for part in columns for c in part) == list(range(spec.head_dim))
    assert kv_bytes_per_slot([spec], torch.bfloat16) == 2 * spec.head_dim == 2 * (10 + 10 * 4 + 8 * 4)
    assert build("window")[0].spec.head_dim == 10
    assert build("heavy")[0].spec.head_dim == 10 + 10 * 2


@pytest.mark.parametrize("rate", [2, 3, 7])
def test_windows_that_a_step_completes(rate):
    """Random batches, padded ends too: every completing token once, none missed by the bound."""
    random = np.random.default_rng(rate)
    for _ in range(60):
        firsts = random.integers(0, 20, random.integers(1, 6))
        counts = random.integers(1, 9, len(firsts))
        positions = np.concatenate([np.arange(f, f + n) for f, n in zip(firsts, counts, strict=True)])
        padded = np.concatenate([positions, np.zeros(random.integers(0, 5), int)]).astype(np.int32)
        batch = Batch(
            *[torch.from_numpy(padded)] * 3, torch.from_numpy(firsts), *[torch.zeros(1)] * 3, max_query=1, max_len=40
        )
        tokens, real = completing(batch, rate)
        assert tokens[real].tolist() == [t for t, p in enumerate(padded) if (p + 1) % rate == 0]
        assert not real[int(real.sum()) :].any() and (tokens < len(padded)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_step_of_many_gives_what_each_gives_alone(kind):
    """As a graph of a mixed step lays it: two decodes, a padded one, two prompts, padded tokens; lengths not known."""
    module, _ = build(kind)
    generator = torch.Generator().manual_seed(7)
    past, counts = (13, 5, 0, 4, 0), (1, 1, 1, 9, 6)  # the third line is scratch: row 5, slot 0
    sequences = [torch.randn(p + n, HIDDEN, generator=generator) for p, n in zip(past, counts, strict=True)]
    caches = Caches.allocate(200, [module.spec], None, torch.float32, CPU)
    table = torch.zeros(6, 64, dtype=torch.int32)
    expected, rows = [], (3, 0, 5, 1, 4)
    for b, (x, p) in enumerate(zip(sequences, past, strict=True)):
        alone = Caches.allocate(200, [module.spec], None, torch.float32, CPU)
        expected.append(module(x, batch_of(alone, 0, len(x)))[p:])
        if b != 2:
            table[rows[b], : len(x)] = 10 + 30 * b + torch.arange(len(x), dtype=torch.int32)
        if p:
            positions = torch.arange(p, dtype=torch.int32)
            fields = {"slots_T": table[rows[b], :p], "rows_B": torch.tensor([rows[b]]), "slot_table_RC": table}
            module(x[:p], batch_of(caches, 0, p, positions_T=positions, **fields))
    positions = [torch.arange(p, p + n, dtype=torch.int32) for p, n in zip(past, counts, strict=True)]
    slots = [table[row][at.long()] for row, at in zip(rows, positions, strict=True)]
    padding = torch.zeros(3, dtype=torch.int32)
    starts = torch.tensor([0, *np.cumsum(counts), *[sum(counts)] * 2], dtype=torch.int32)  # two lines hold no sequence
    batch = Batch(
        token_ids_T=torch.cat([*positions, padding]),
        positions_T=torch.cat([*positions, padding]),
        slots_T=torch.cat([*slots, padding]),
        rows_B=torch.tensor([*rows, 5, 5], dtype=torch.int32),
        starts_B1=starts,
        lens_B=torch.tensor([p + n for p, n in zip(past, counts, strict=True)] + [0, 0], dtype=torch.int32),
        slot_table_RC=table,
        max_query=12,
        max_len=64,
        num_decodes=3,
        kv=caches.kv,
    )
    x = torch.cat([*(x[p:] for x, p in zip(sequences, past, strict=True)), torch.zeros(3, HIDDEN)])
    found = module(x, batch)[: sum(counts)].split(counts)
    for b in (0, 1, 3, 4):
        torch.testing.assert_close(found[b], expected[b], atol=1e-5, rtol=1e-5)
    assert found[2].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_no_step_asks_the_device(kind):
    """Tensors without values: whatever would wait for one (and so break a CUDA graph) raises."""
    with FakeTensorMode():
        module, _ = build(kind)
        caches = Caches.allocate(90, [module.spec], None, torch.float32, CPU)
        integers = {
            name: torch.zeros(n, dtype=torch.int32) for name, n in (("starts_B1", 6), ("lens_B", 5), ("rows_B", 5))
        }
        tokens = {name: torch.zeros(5, dtype=torch.int32) for name in ("token_ids_T", "positions_T", "slots_T")}
        table = torch.zeros(3, 64, dtype=torch.int32)
        batch = Batch(**integers, **tokens, slot_table_RC=table, max_query=1, max_len=64, kv=caches.kv)
        assert module(torch.zeros(5, HIDDEN), batch).shape == (5, HIDDEN)
        streams = Streams(StreamsSpec(count=3, iterations=4, eps=1e-6, norm_eps=1e-6), HIDDEN)
        assert streams(torch.zeros(5, 3, HIDDEN), lambda x: x).shape == (5, 3, HIDDEN)
        with pytest.raises(DataDependentOutputException):
            torch.zeros(5).sum().item()


def test_streams_keep_a_doubly_stochastic_mix():
    """Against the definition in float64; a body of nothing leaves the sum over streams as it was."""
    spec = StreamsSpec(count=3, iterations=30, eps=1e-7, norm_eps=1e-5)
    streams, last = Streams(spec, HIDDEN), Streams(spec, HIDDEN, last=True)
    generator = torch.Generator().manual_seed(5)
    for _, view, _ in [*streams.parts(), *last.parts()]:
        view.copy_(0.4 * torch.randn(view.shape, generator=generator))
    x = torch.randn(4, 3, HIDDEN, generator=generator)
    silent = streams(x, torch.zeros_like)
    torch.testing.assert_close(silent.sum(1), x.sum(1), atol=1e-4, rtol=1e-4)
    read = []
    streams(x, lambda y: read.append(y) or y)
    for t in range(4):
        flat = x[t].double().flatten()
        logits = streams.fn_XF.double() @ (flat / (flat.square().mean() + 1e-5).sqrt())
        weights = torch.sigmoid(logits[:3] * streams.scale[0] + streams.base_X[:3]) + spec.eps
        torch.testing.assert_close(read[0][t].double(), weights @ x[t].double(), atol=1e-5, rtol=1e-5)
        mix = torch.softmax((logits[6:] * streams.scale[2] + streams.base_X[6:]).view(3, 3), -1)
        for _ in range(200):
            mix = mix / mix.sum(0)
            mix = mix / mix.sum(1, keepdim=True)
        torch.testing.assert_close(silent[t].double(), mix.T @ x[t].double(), atol=1e-4, rtol=1e-4)
    assert last.collapse(x).shape == (4, HIDDEN)


@pytest.mark.parametrize("options", [{"chunked_prefill_size": 5}, {"page_size": 16}, {"page_size": 4}], ids=str)
def test_prefixes_and_chunks_end_anywhere(options, tmp_path):
    """Hits that end within windows of all kinds, some within a page, against the reference on whole sequences."""
    reference = Reference(tiny.save("deepseek_v4", tmp_path))
    core, mode = tiny_engine(tmp_path, **options), Mode()
    prompt = np.random.default_rng(2).integers(0, 97, 60).tolist()
    compare(core, reference, generate(core, {"first": prompt}, 3), mode, 0, None)
    for kept in (1, 4, 7, 13, 29, 31, 42, 58):
        branch = [*prompt[:kept], 96 - prompt[kept], *prompt[3:9]]
        answer = generate(core, {str(kept): branch}, 3, logprob_start=-1)
        assert answer[str(kept)].cached == kept
        compare(core, reference, answer, mode, 0, None)
    assert mode.ok, (mode, mode.wrong[:3])


def test_hashed_layers_record_the_table_of_what_was_read(tmp_path):
    """Prompt and sampled tokens alike: the row of a token's own id, in the table's order."""
    tiny.save("deepseek_v4", tmp_path)
    table = tiny.tensors_of(tmp_path)["model.layers.2.ffn.gate.tid2eid"]
    answer = generate(tiny_engine(tmp_path), {"a": [5, 9, 5, 0, 96]}, 6)["a"]
    read = (answer.prompt + answer.tokens)[:-1]
    np.testing.assert_array_equal(answer.routes[:, 2], table[read].numpy())
    assert len({tuple(row) for row in answer.routes[:, 2].tolist()}) > 2


@pytest.mark.parametrize("wrong", [8, -1, 0.5])
def test_a_table_of_experts_that_are_not_there_is_refused(wrong, tmp_path):
    tiny.save("deepseek_v4", tmp_path)
    tensors, name = tiny.tensors_of(tmp_path), "model.layers.2.ffn.gate.tid2eid"
    tensors[name] = tensors[name].to(torch.float32 if wrong == 0.5 else torch.int64)
    tensors[name][40, 1] = wrong
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.2\.ffn\.gate\.tid2eid.*from 0 to 7"):
        tiny_engine(tmp_path)


def test_published_quantised_files_load(tmp_path):
    """Projections in FP8 with power-of-two scales, experts in four bits, as the published files have them."""
    tiny.save("deepseek_v4_published", tmp_path, hidden_size=32, moe_intermediate_size=32)
    random, plain, quantised = torch.Generator().manual_seed(3), {}, {}
    fours = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        plain[name] = quantised[name] = tensor
        scale = name.removesuffix("weight") + "scale"
        if ".experts." in name:
            codes = torch.randint(0, 16, tensor.shape, generator=random)
            powers = torch.randint(-5, -2, (len(tensor), tensor.shape[1] // 32), generator=random)
            plain[name] = fours[codes] * powers.float().exp2().repeat_interleave(32, 1)
            quantised[name] = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
            quantised[scale] = powers.float().exp2().to(torch.float8_e8m0fnu)
        elif ".attn.w" in name:
            scales = torch.full((-(-tensor.shape[0] // 8), -(-tensor.shape[1] // 16)), 2.0**-7)
            quantised[name] = (tensor * 128).to(torch.float8_e4m3fn)
            quantised[scale], plain[name] = scales.to(torch.float8_e8m0fnu), quantised[name].float() / 128
    assert any(tensor.dtype == torch.int8 for tensor in quantised.values())
    config = json.loads((tmp_path / "config.json").read_text())
    answers = []
    for tensors, settings in (
        (plain, None),
        (quantised, {"quant_method": "fp8", "weight_block_size": [8, 16], "scale_fmt": "ue8m0"}),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
        answers.append(generate(tiny_engine(tmp_path), {"a": [3, 1, 4, 1, 5, 9, 2, 6]}, 6)["a"])
    assert answers[0].tokens == answers[1].tokens
    np.testing.assert_array_equal(answers[0].routes, answers[1].routes)
    broken = next(name for name in quantised if ".experts." in name and name.endswith("scale"))
    quantised[broken] = quantised[broken].float()
    save_file({name: tensor.contiguous() for name, tensor in quantised.items()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="four-bit floats need one-byte scales"):
        tiny_engine(tmp_path)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"layer_types": ["sliding_attention"]}, "each of 4 layers"),
        ({"layer_types": None, "compress_ratios": [0, 0, 4, 64]}, "64"),
        ({"o_groups": 3}, "4 heads can not be put into 3"),
        ({"compress_rates": {"heavily_compressed_attention": 1}}, "rate 1"),
        ({"scoring_func": "tanh"}, "tanh"),
        ({"mlp_layer_types": ["moe", "moe", "moe", "dense"]}, "dense"),
        ({"index_topk": None}, "index_topk"),
    ],
    ids=str,
)
def test_impossible_configs_are_refused_by_name(change, word, tmp_path):
    tiny.save("deepseek_v4", tmp_path)
    with pytest.raises(CheckpointError, match=word):
        resolve({**load_model_config(str(tmp_path)), **change})
