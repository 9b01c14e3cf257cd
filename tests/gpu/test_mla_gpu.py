"""Latent attention on a GPU at the widths of DeepSeek-V3, Moonlight and GLM-4.7-Flash, against float64."""

from __future__ import annotations

from dataclasses import replace

import mla_checks as checks
import pytest
import torch
from kernel_checks import close
from mla_checks import Widths

from tracklayer.kernels import mla
from tracklayer.kernels.dispatch import reference_kernels
from tracklayer.kernels.mla_attention import Schedule
from tracklayer.kernels.norm import AddNorm
from tracklayer.kernels.rope import rope_table
from tracklayer.layers.batch import Batch
from tracklayer.layers.mla import MLA
from tracklayer.layers.spec import MLASpec, RopeSpec

pytestmark = pytest.mark.gpu
BF16, F32 = torch.bfloat16, torch.float32
V3 = Widths(128, 128, 64, 128, 512, 1536)
MOONLIGHT = Widths(16, 128, 64, 128, 512, None)
FLASH = Widths(20, 192, 64, 256, 512, 768)
MODELS = [V3, MOONLIGHT, FLASH]
TOKENS = [1, 7, 64, 300]


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("w", MODELS, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_around_the_products(tokens, w, dtype):
    for rule in ({}, {"rope": "yarn", "interleaved": True}, {"rope": None}):
        checks.check_latent_store(w, tokens, "cuda", dtype, **rule)
        checks.check_absorb(w, tokens, "cuda", dtype, **rule)
    checks.check_latent_store(w, tokens, "cuda", dtype, eps=0.3, offset=1.0, kv_scale=1.7)


@pytest.mark.parametrize("w", MODELS, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_decode(tokens, w):
    lens = [5000, 1, 63, 64, 65, 0, 4097, *torch.randint(1, 2000, (tokens,)).tolist()][:tokens]
    checks.check_attention([1] * tokens, lens, w, "cuda", BF16)


SCHEDULES = [
    Schedule(hopper=False),
    Schedule(hopper=False, splits=1),
    Schedule(hopper=False, splits=66),
    Schedule(hopper=False, splits=128, part_dtype=BF16),
    Schedule(hopper=False, block=32, stages=3),
    Schedule(hopper=False, block=32, stages=5),
    Schedule(hopper=False, block=64, stages=2),
    Schedule(hopper=False, block=64, rows=32),
    Schedule(),
    Schedule(splits=1),
    Schedule(splits=128, part_dtype=BF16),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.block}-{s.stages}-{s.splits}-{s.hopper}")
@pytest.mark.parametrize("w", [V3, MOONLIGHT], ids=str)
def test_every_schedule(w, schedule):
    checks.check_attention([1] * 3, [5000, 77, 1], w, "cuda", BF16, schedule=schedule)


@pytest.mark.parametrize("w", [V3, MOONLIGHT, FLASH, Widths(70, 128, 64, 128, 512, None)], ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_by_hand_on_hopper(tokens, w):
    """The schedule by hand, over lengths around a block's and a pair's, beside slots that are NaN."""
    lens = [5000, 1, 63, 64, 65, 0, 127, 128, 129, *torch.randint(1, 2000, (tokens,)).tolist()][:tokens]
    for splits in (None, 1, 5):
        checks.check_attention([1] * tokens, lens, w, "cuda", BF16, schedule=Schedule(splits=splits))


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("w", MODELS, ids=str)
def test_chunks_beside_decodes(w, dtype):
    counts = [1, 1, 1, 200, 33, 1, 0]
    checks.check_attention(counts, [900, 5, 64, 1000, 33, 70, 9], w, "cuda", dtype, num_decodes=3)


def layer(w: Widths, hidden: int) -> MLA:
    spec = MLASpec(
        num_heads=w.heads, kv_lora_rank=w.latent, nope_dim=w.nope, rope_dim=w.rope, v_head_dim=w.value,
        q_lora_rank=w.q_latent, rope=RopeSpec(dim=w.rope, interleaved=True), scale=(w.nope + w.rope) ** -0.5,
    )  # fmt: skip
    with torch.device("cuda"):
        module = MLA(spec, hidden, rope_table(w.rope, 1e4, None, 8192, "cuda"), cache=0).to(BF16)
    for _, view, _ in module.parts():
        view.copy_(torch.randn(view.shape, device="cuda") * (view.shape[-1] ** -0.5 if view.dim() > 1 else 1.0))
    return module


def batch_of(lens: list[int], w: Widths) -> Batch:
    """One new token for each sequence, over a cache of random latents."""
    sequences, slots = len(lens), sum(lens) + 1
    table, first = torch.zeros(sequences, max(lens), dtype=torch.int32), 1
    for b, n in enumerate(lens):
        table[b, :n], first = torch.arange(first, first + n), first + n
    lens_B = torch.tensor(lens, dtype=torch.int32)
    cache = torch.randn(slots, 1, w.latent + w.rope, device="cuda").to(BF16)
    return Batch(
        token_ids_T=lens_B.cuda(), positions_T=(lens_B - 1).cuda(), rows_B=torch.arange(sequences).int().cuda(),
        slots_T=table[torch.arange(sequences), lens_B - 1].cuda(), starts_B1=torch.arange(sequences + 1).int().cuda(),
        lens_B=lens_B.cuda(), slot_table_RC=table.cuda(), max_query=1, max_len=8192, num_decodes=sequences,
        kv=[(cache, cache[..., : w.latent])],
    )  # fmt: skip


def exact_layer(module: MLA, x_TD: torch.Tensor, batch: Batch, w: Widths) -> torch.Tensor:
    """The references in float64 over a cache of their own."""
    cache = batch.kv[0][0].double()
    wide = replace(batch, kv=[(cache, cache[..., : w.latent])])
    twin = MLA(module.spec, x_TD.shape[1], module.cos_sin_PR, cache=0).to("cuda", torch.float64)
    twin.load_state_dict(module.state_dict())
    with reference_kernels():
        return twin(x_TD.double(), wide)


@pytest.mark.parametrize(("w", "hidden"), [(V3, 7168), (MOONLIGHT, 2048)], ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 80])
@torch.no_grad()
def test_a_layer_in_a_graph(tokens, w, hidden):
    """Captured once, replayed over other tokens, lengths and slots: nothing of them is in the launches."""
    module = layer(w, hidden)
    longest = 3000 if tokens < 80 else 300  # the reference pads every sequence to it, in float64
    batch = batch_of([longest, 1, 64, *[100 + i for i in range(tokens)]][:tokens], w)
    x = torch.randn(tokens, hidden, device="cuda").to(BF16)
    module(x, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(x, batch)
    for shorter in (0, 90):
        x.normal_()
        batch.lens_B.sub_(shorter).clamp_(min=1)
        batch.positions_T.copy_(batch.lens_B - 1)
        batch.slots_T.copy_(batch.slot_table_RC.gather(1, batch.positions_T[:, None].long())[:, 0])
        want = exact_layer(module, x, batch, w)
        out.fill_(torch.nan)
        graph.replay()
        error = (out.double() - want).norm() / want.norm()
        assert float(error) < 2e-2, float(error)


@torch.no_grad()
def test_the_norm_in_front_is_made_by_the_first_product():
    module, batch = layer(V3, 7168), batch_of([500], V3)
    delta, residual = torch.randn(2, 1, 7168, device="cuda").to(BF16)
    weight = torch.randn(7168, device="cuda").to(BF16)
    apart = AddNorm(delta.clone(), residual.clone(), weight, 1e-6)
    want = module(apart.tensor(), batch)
    inside = AddNorm(delta, residual, weight, 1e-6)
    assert inside.fusable
    close(module(inside, batch), want, BF16)
    close(inside.residual_TD, apart.residual_TD, BF16)


def test_many_tokens_and_few_agree(monkeypatch):
    """The BLAS library's strided results and the kernel's."""
    q, w = torch.randn(40, 128, 192, device="cuda").to(BF16), torch.randn(128, 128, 512, device="cuda").to(BF16)
    table, positions = rope_table(64, 1e4, None, 64, "cuda"), torch.arange(40, device="cuda").int()
    few = mla.absorb_queries(q, w, table, positions)
    monkeypatch.setattr(mla, "FEW", 0)
    close(mla.absorb_queries(q, w, table, positions), few, BF16)
