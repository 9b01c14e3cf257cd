"""Latent attention: against the expanded form in float64, its cache, and LongCat's zero experts in the record."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import tiny
import torch
from engine_tools import make_core, prompts, request, run
from parity import Reference, check_variant, generate, tiny_engine
from safetensors import safe_open
from safetensors.torch import save_file

from tracklayer.errors import CheckpointError
from tracklayer.kernels.rope import rope_table
from tracklayer.layers import indexer
from tracklayer.layers.batch import Batch
from tracklayer.layers.mla import MLA
from tracklayer.layers.spec import AttentionSpec, IndexerSpec, MLASpec, NormSpec, RopeSpec
from tracklayer.models.latent import mla, stretch
from tracklayer.models.registry import resolve
from tracklayer.runner import batch as runner_batch
from tracklayer.runner.kv_cache import Caches, kv_bytes_per_slot

CPU = torch.device("cpu")
CONFIG = {
    "model_type": "deepseek_v3",
    "num_attention_heads": 3,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 7,
    "q_lora_rank": 9,
    "rope_theta": 10000.0,
}


def build(**differences) -> tuple[MLA, dict[str, torch.Tensor]]:
    spec = mla(CONFIG, **differences)
    table = rope_table(spec.rope.dim, spec.rope.theta, spec.rope.scaling, 64) if spec.rope else None
    module = MLA(spec, 16, table, cache=0)
    generator = torch.Generator().manual_seed(3)
    parts = {}
    for name, view, _ in module.parts():
        view.copy_(torch.randn(view.shape, generator=generator) * (0.3 if view.dim() > 1 else 1.0))
        parts[name] = view.double()
    return module, parts


def turn(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Complex rotation of [T, H, R] by position."""
    half = x.shape[-1] // 2
    pairs = x.unflatten(-1, (half, 2)) if interleaved else torch.stack(x.chunk(2, -1), -1)
    angle = torch.arange(len(x)).double()[:, None] * 10000.0 ** (-torch.arange(half).double() / half)
    z = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)[:, None]
    pairs = torch.view_as_real(z)
    return pairs.flatten(-2) if interleaved else torch.cat(pairs.unbind(-1), -1)


def expanded(spec: MLASpec, p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Keys and values of every head made from the latents, then plain causal attention."""

    def rms(y, weight):
        return y / (y.pow(2).mean(-1, keepdim=True) + spec.norm.eps).sqrt() * weight

    x, heads = x.double(), spec.num_heads
    q = rms(x @ p["q_a.weight"].T, p["q_norm.weight"]) @ p["q_b.weight"].T if spec.q_lora_rank else x @ p["q.weight"].T
    q = (q * spec.q_scale).unflatten(-1, (heads, -1))
    latent, shared = (x @ p["kv_a.weight"].T).split([spec.kv_lora_rank, spec.rope_dim], -1)
    kv = (rms(latent, p["kv_norm.weight"]) * spec.kv_scale @ p["kv_b.weight"].T).unflatten(-1, (heads, -1))
    k, v = kv.split([spec.nope_dim, spec.v_head_dim], -1)
    q_nope, q_rope = q.split([spec.nope_dim, spec.rope_dim], -1)
    shared = shared[:, None]
    if spec.rope is not None:
        q_rope, shared = turn(q_rope, spec.rope.interleaved), turn(shared, spec.rope.interleaved)
    q, k = torch.cat([q_nope, q_rope], -1), torch.cat([k, shared.expand(-1, heads, -1)], -1)
    scores = torch.einsum("tnd,snd->nts", q, k) * spec.scale
    scores = scores.masked_fill(~torch.ones(len(x), len(x), dtype=torch.bool).tril(), -math.inf)
    out = torch.einsum("nts,sne->tne", scores.softmax(-1), v)
    if spec.out_gate:
        out = out * torch.sigmoid(x @ p["gate.weight"].T).view(len(x), heads, -1)
    return out.flatten(1) @ p["o.weight"].T


def step(module: MLA, caches: Caches, x: torch.Tensor, first: int) -> torch.Tensor:
    """One sequence in row 0, position p in slot 2p + 1."""
    length = torch.arange(first, first + len(x), dtype=torch.int32)
    batch = Batch(
        token_ids_T=length,
        positions_T=length,
        slots_T=2 * length + 1,
        rows_B=torch.zeros(1, dtype=torch.int32),
        starts_B1=torch.tensor([0, len(x)], dtype=torch.int32),
        lens_B=torch.tensor([first + len(x)], dtype=torch.int32),
        slot_table_RC=2 * torch.arange(40, dtype=torch.int32)[None] + 1,
        max_query=len(x),
        max_len=first + len(x),
        kv=caches.kv,
    )
    return module(x, batch)


TURNED = RopeSpec(dim=6, theta=10000.0)


@pytest.mark.parametrize(
    "differences",
    [
        {},
        {"q_lora_rank": None},
        {"rope": None},
        {"rope": TURNED},
        {"q_scale": 1.7, "kv_scale": 0.6},
        {"out_gate": "head"},
        {"out_gate": "channel"},
        {"norm": NormSpec(eps=0.3), "scale": 0.9},
    ],
    ids=lambda d: "-".join(d) or "plain",
)
def test_absorbed_equals_expanded(differences):
    module, parts = build(**differences)
    x = torch.randn(11, 16, generator=torch.Generator().manual_seed(1))
    caches = Caches.allocate(90, [module.spec], None, torch.float32, CPU)
    caches.kv[0][0].fill_(float("nan"))  # what no token of the sequence wrote must not be read
    pieces = [step(module, caches, x[a:b], a) for a, b in ((0, 5), (5, 6), (6, 11))]
    torch.testing.assert_close(torch.cat(pieces).double(), expanded(module.spec, parts, x), atol=2e-5, rtol=2e-5)


def test_the_cache_is_one_latent_a_token():
    module, _ = build()
    plain = AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=4)
    caches = Caches.allocate(8, [module.spec, plain], None, torch.float32, CPU)
    k, v = caches.kv[0]
    assert k.shape == (8, 1, 18) and v.shape == (8, 1, 12) and v.data_ptr() == k.data_ptr()
    assert kv_bytes_per_slot([module.spec], torch.bfloat16) == 18 * 2
    assert kv_bytes_per_slot([module.spec, plain], torch.float32) == (18 + 2 * 2 * 4) * 4
    for tensor in (k, *caches.kv[1]):
        tensor.copy_(torch.randn(tensor.shape))
    before = [t.clone() for t in (k, *caches.kv[1])]
    caches.copy(torch.tensor([[2, 5], [3, 6]]))
    for tensor, old in zip((k, *caches.kv[1]), before, strict=True):
        assert torch.equal(tensor[[5, 6]], old[[2, 3]]) and torch.equal(tensor[:5], old[:5])


def test_yarn_stretches_queries_and_keys():
    scaling = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale_all_dim": 1.0}
    spec = mla({**CONFIG, "rope_scaling": {**scaling, "type": "yarn"}})
    assert spec.scale == pytest.approx(16**-0.5 * (0.1 * math.log(40.0) + 1) ** 2)
    assert stretch(None) == stretch(TURNED) == 1.0
    assert mla({**CONFIG, "rope_scaling": {**scaling, "mscale_all_dim": 0}}).scale == 16**-0.5


@pytest.mark.parametrize("page_size", [4, 16])
def test_prefix_hits_copy_parts_of_pages(page_size, tmp_path):
    tiny.save("deepseek_v2", tmp_path)
    prompt = prompts(1, (40,))[0]
    cold = run(make_core(tmp_path, page_size=page_size), [request("a", prompt)])["a"]
    core = make_core(tmp_path, page_size=page_size)
    run(core, [request("warm", prompt[:30])])
    warm = run(core, [request("a", prompt)])["a"]
    assert warm.cached_tokens == 30 and warm.tokens == cold.tokens
    np.testing.assert_array_equal(warm.routes, cold.routes)


def tensors_of(folder):
    with safe_open(folder / "model.safetensors", framework="pt") as handle:
        return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (not a dict)


def test_zero_experts_keep_their_own_ids(tmp_path):
    """LongCat: 6 experts and 4 that return their input; the record has ids to 9, and one column per double layer."""
    model = tiny.save("longcat_flash", tmp_path)
    core = tiny_engine(tmp_path)
    assert core.info.layer_ids == (0, 1) and core.info.num_layers == 2
    assert core.info.num_experts == 10 and len(core.model.decoder.attentions) == 4
    answer = generate(core, {"a": list(range(3, 43))}, 4)["a"]
    _, expected = Reference(model)((answer.prompt + answer.tokens)[:-1])
    for column in range(2):
        np.testing.assert_array_equal(np.sort(answer.routes[:, column].astype(np.int64)), expected[column])
    assert (answer.routes >= 6).any() and (answer.routes < 6).any() and answer.routes.max() < 10


def test_only_what_zero_experts_would_weigh_is_skipped(tmp_path):
    """transformers saves gate and up for zero experts too; a real expert's absence is still an error."""
    tiny.save("longcat_flash", tmp_path)
    whole = tensors_of(tmp_path)
    real, zero = (f"model.layers.1.mlp.experts.{j}.up_proj.weight" for j in (5, 6))
    assert real in whole
    save_file({**whole, zero: whole[real].clone(), "model.mtp.x": torch.ones(2)}, tmp_path / "model.safetensors")
    tiny_engine(tmp_path)
    save_file({name: t for name, t in whole.items() if name != real}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing tensors: model\.layers\.1\.mlp\.experts\.5\.up_proj"):
        tiny_engine(tmp_path)


def test_deepseek_v2_masked_experts_are_real_ids(tmp_path):
    """Groups kept with fewer experts than top-k: the masked ones fill up with weight 0, and are recorded."""
    overrides = {"n_group": 8, "topk_group": 2, "num_experts_per_tok": 3}
    model = tiny.save("deepseek_v2", tmp_path, **overrides)
    core = tiny_engine(tmp_path)
    answer = generate(core, {"a": list(range(5, 25))}, 2)["a"]
    assert answer.routes.max() < 8
    _, expected = Reference(model)((answer.prompt + answer.tokens)[:-1])
    for column, layer in enumerate(core.info.layer_ids):
        shared = [len(set(a) & set(b)) for a, b in zip(answer.routes[:, column], expected[layer], strict=True)]
        assert min(shared) >= 2, "the two experts with a weight differ"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"architectures": ["DeepseekV2ForCausalLM"], "topk_method": "noaux_tc"}, "topk_method"),
        ({"architectures": ["LongcatFlashForCausalLM"], "zero_expert_type": "copy", "num_layers": 2}, "zero_expert"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": None}, "kv_lora_rank"),
    ],
)
def test_what_is_not_served_is_refused_by_name(change, word):
    c = {**CONFIG, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "hidden_size": 16}
    with pytest.raises(CheckpointError, match=word):
        resolve({**c, "vocab_size": 9, "num_hidden_layers": 1, "intermediate_size": 8, **change})


def selecting(top_k: int) -> MLA:
    return build(indexer=IndexerSpec(num_heads=5, head_dim=8, top_k=top_k), rope=TURNED)[0]


def test_attention_sees_only_what_the_indexer_chooses(monkeypatch):
    """Against a loop over tokens in float64, in pieces and whole, with a cache that is NaN elsewhere."""
    module = selecting(4)
    p = {name: view.double() for name, view, _ in module.parts()}
    spec, x = module.spec, torch.randn(11, 16, generator=torch.Generator().manual_seed(1))

    def turned(z):  # the first rope dims, by halves
        return torch.cat([turn(z[..., :6], False), z[..., 6:]], -1)

    xd = x.double()
    latent = xd @ p["q_a.weight"].T
    latent = latent / (latent.pow(2).mean(-1, keepdim=True) + spec.norm.eps).sqrt() * p["q_norm.weight"]
    q = turned((latent @ p["indexer.wq_b.weight"].T).unflatten(-1, (5, 8)))
    k = xd @ p["indexer.wk.weight"].T
    k = (k - k.mean(-1, keepdim=True)) / (k.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
    k = turned((k * p["indexer.k_norm.weight"] + p["indexer.k_norm.bias"])[:, None])[:, 0]
    weights = xd @ p["indexer.weights_proj.weight"].T
    chosen = torch.zeros(11, 11, dtype=torch.bool)
    for t in range(11):
        score = [(weights[t] * (q[t] @ k[s]).relu()).sum() for s in range(t + 1)]
        for s in sorted(range(t + 1), key=lambda s: -float(score[s]))[:4]:
            chosen[t, s] = True
    assert (chosen.sum(-1) == torch.arange(1, 12).clamp(max=4)).all()
    tril = torch.Tensor.tril
    monkeypatch.setattr(torch.Tensor, "tril", lambda self: chosen if self.shape == (11, 11) else tril(self))
    expected = expanded(spec, p, x)
    monkeypatch.undo()
    for cuts in ((0, 11), (0, 5, 6, 11), (0, 1, 2, 3, 4, 11)):
        caches = Caches.allocate(90, [spec], None, torch.float32, CPU)
        caches.kv[0][0].fill_(float("nan"))
        pieces = [step(module, caches, x[a:b], a) for a, b in pairwise(cuts)]
        torch.testing.assert_close(torch.cat(pieces).double(), expected, atol=2e-5, rtol=2e-5)
    monkeypatch.setattr(indexer, "PIECE", 200)  # a token or two at a time
    caches = Caches.allocate(90, [spec], None, torch.float32, CPU)
    torch.testing.assert_close(step(module, caches, x, 0).double(), expected, atol=2e-5, rtol=2e-5)


def test_an_indexer_that_may_choose_all_changes_nothing():
    few, all_of_them = selecting(10), selecting(11)
    x = torch.randn(11, 16, generator=torch.Generator().manual_seed(1))
    outs = []
    for module in (few, all_of_them, build(rope=TURNED)[0]):
        if module is not few:
            shared = dict((name, view) for name, view, _ in few.parts())
            for name, view, _ in module.parts():
                view.copy_(shared[name])
        caches = Caches.allocate(90, [module.spec], None, torch.float32, CPU)
        outs.append(step(module, caches, x, 0))
    torch.testing.assert_close(outs[1], outs[2])
    assert not torch.allclose(outs[0][-1], outs[2][-1], atol=1e-3)
    torch.testing.assert_close(outs[0][:10], outs[2][:10], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", ["deepseek_v2", "deepseek_v3", "kimi_linear", "longcat_flash"])
def test_prompts_attended_in_full_equal_the_reference(variant, tmp_path, monkeypatch):
    """Prompts whose keys and values are made in full: alone, in chunks, beside others and beside one of a token."""
    monkeypatch.setattr(runner_batch, "FRESH_LEAST", 1)
    seen = []
    whole = MLA._prompts
    monkeypatch.setattr(MLA, "_prompts", lambda self, *args: (seen.append(args[3].tolist()), whole(self, *args))[1])
    modes, _ = check_variant(variant, tmp_path)
    assert not [text for mode in modes.values() for text in mode.wrong]
    assert any(min(lens) == -1 for lens in seen) and any(min(lens) > 0 for lens in seen), "one of both ways did not run"
