"""Latent attention at decode, bf16: its attention over the cache, its products per head, and the whole block.

    python -m benchmarks.kernels.bench_mla [--only attention|products|block] [--sweep] [--heads N ...] [--seconds S]
                                           [--smoke] [--out FILE]

128 heads are DeepSeek-V3's and Kimi K2's (hidden 7168, query latent 1536), 16 Moonlight's (hidden 2048, none). Floors
count the latents, the weights and the products once. --sweep tries schedules of the attention beside its rule, and the
kernel beside the BLAS library for the products. --seconds stops between cases and reports what there is.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.common import copies_for, report, row, time_us, try_us
from tracklayer.kernels import mla
from tracklayer.kernels.attention import paged_attention
from tracklayer.kernels.attention_rule import Rule
from tracklayer.kernels.jit import num_sms
from tracklayer.kernels.mla_attention import Schedule, latent_attention, lone_splits
from tracklayer.kernels.norm import AddNorm
from tracklayer.kernels.rope import rope_table
from tracklayer.layers.batch import Batch
from tracklayer.layers.mla import MLA
from tracklayer.layers.spec import MLASpec, RopeSpec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
C, R, P, E = 512, 64, 128, 128
SCALE = (P + R) ** -0.5
MODELS = {128: (7168, 1536), 16: (2048, None)}  # heads: hidden, query latent
BOUND = 40960  # of lengths, as a CUDA graph knows it
BATCHES, CONTEXTS = (1, 16, 64, 256), (512, 4096, 32768)
SWEPT = {(1, 4096), (1, 32768), (16, 32768), (64, 4096), (256, 4096)}
SLOTS = 256 * 32768  # 9.7 GB of latents, from which each case draws at random


def new(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE)


class Cache:
    """One pool of latents, and batches that decode over slots drawn from it."""

    def __init__(self, slots: int) -> None:
        self.k_SHD = new(slots, 1, C + R)
        self.slots = torch.randperm(slots, device=DEVICE).int()

    def batches(self, sequences: int, context: int) -> list[Batch]:
        """As many as do not fit the L2 cache together, over slots of their own while there are any."""
        wanted = copies_for(sequences * context * (C + R) * 2.0, at_most=8)
        size = sequences * context
        rows_B = torch.arange(sequences, dtype=torch.int32, device=DEVICE)
        lens_B = torch.full_like(rows_B, context)
        starts_B1 = torch.arange(sequences + 1, dtype=torch.int32, device=DEVICE)
        common = dict(positions_T=lens_B - 1, rows_B=rows_B, starts_B1=starts_B1, lens_B=lens_B, token_ids_T=rows_B)
        bounds = dict(max_query=1, max_len=BOUND, num_decodes=sequences, kv=[(self.k_SHD, self.k_SHD[..., :C])])
        made = []
        for i in range(wanted):
            first = i * size % max(len(self.slots) - size + 1, 1)
            table_RC = self.slots[first : first + size].view(sequences, context)
            slots_T = table_RC[:, -1].contiguous()
            made.append(Batch(slot_table_RC=table_RC, slots_T=slots_T, **common, **bounds))
        return made


def cost(heads: int, sequences: int, context: int) -> dict[str, float]:
    """What attention must read and multiply."""
    pairs = float(sequences * context)
    return dict(num_bytes=pairs * (C + R) * 2, flop=pairs * heads * 2 * (2 * C + R))


def schedules(heads: int, sequences: int, context: int) -> dict[str, Schedule]:
    """By name: the tiles, and half, double and four times the rule's splits."""
    block = 64
    splits = lone_splits(sequences, -(-heads // 64), BOUND, block, num_sms(torch.device(DEVICE)))
    tries = {
        "tiles": Schedule(hopper=False),
        "tiles, slots not ahead": Schedule(hopper=False, block=64, stages=2),
    }
    if heads < 64:
        tries["tiles, 2 in flight"] = Schedule(hopper=False, block=64, stages=5)
    for name, count in (("half", splits // 2), ("double", 2 * splits), ("four times", 4 * splits)):
        if 1 <= count <= 128 and count * block <= context:
            tries[f"{name} the splits"] = Schedule(splits=count)
    if splits > 1:
        tries["bf16 parts"] = Schedule(part_dtype=torch.bfloat16)
    return tries


def places(batch: Batch) -> dict[str, Any]:
    names = ("slot_table_RC", "rows_B", "starts_B1", "lens_B", "max_query", "max_len")
    return {name: getattr(batch, name) for name in names}


def attention(cache: Cache, heads: int, sweep: bool) -> Iterator[dict]:
    for sequences in BATCHES:
        for context in CONTEXTS:
            floor = cost(heads, sequences, context)
            batches, q_TND = cache.batches(sequences, context), new(sequences, heads, C + R)
            attend = partial(latent_attention, q_TND, cache.k_SHD, value_dim=C, scale=SCALE)
            calls = [partial(attend, **places(b)) for b in batches]
            name = f"attention {heads} heads, batch {sequences}, context {context}"
            yield row(name, time_us(calls), **floor)
            if not sweep or (sequences, context) not in SWEPT:
                continue
            for tried, schedule in schedules(heads, sequences, context).items():
                us = try_us([partial(call, schedule=schedule) for call in calls])
                if us is not None:
                    yield row(f"  {tried}", us, case=name, **floor)
            us = try_us([partial(paged_attention, q_TND, *b.kv[0], Rule(SCALE), **places(b)) for b in batches])
            if us is not None:
                yield row("  the kernel for heads of their own", us, case=name, **floor)


def products(heads: int) -> Iterator[dict]:
    """Queries into latent space and results out of it, by the kernel and by the BLAS library."""
    table_PR = rope_table(R, 1e4, None, 64, DEVICE)
    weights = [new(heads, P + E, C) for _ in range(copies_for(heads * (P + E) * C * 2.0))]
    for tokens in (*BATCHES, 4, 32, 128):
        q_TNX, x_TNC, out_TNE = new(tokens, heads, P + R), new(tokens, heads, C), new(tokens, heads, E)
        positions_T = torch.arange(tokens, device=DEVICE).int() % 64
        for name, width in (("in", P), ("out", E)):
            calls: list[Callable[[], object]] = [
                partial(mla.absorb_queries, q_TNX, w[:, :P], table_PR, positions_T)
                if name == "in"
                else partial(mla.head_products, x_TNC, w[:, P:], out_TNE)
                for w in weights
            ]
            floor = dict(num_bytes=heads * C * width * 2.0, flop=2.0 * tokens * heads * C * width)
            for kind, few in (("kernel", 1 << 30), ("BLAS", 0)):
                kept, mla.FEW = mla.FEW, few
                us = time_us(calls)
                mla.FEW = kept
                yield row(f"heads' products {name} ({kind}), {heads} heads, {tokens} tokens", us, **floor)


def block_of(heads: int) -> MLA:
    hidden, q_latent = MODELS[heads]
    rope = RopeSpec(dim=R, interleaved=True)
    spec = MLASpec(
        num_heads=heads, kv_lora_rank=C, nope_dim=P, rope_dim=R, v_head_dim=E, q_lora_rank=q_latent, rope=rope,
        scale=SCALE,
    )  # fmt: skip
    with torch.device(DEVICE):
        module = MLA(spec, hidden, rope_table(R, 1e4, None, max(CONTEXTS), DEVICE), cache=0).to(torch.bfloat16)
    for _, view, _ in module.parts():
        view.copy_(new(*view.shape) * (view.shape[-1] ** -0.5 if view.dim() > 1 else 1.0))
    return module


def block(cache: Cache, heads: int) -> Iterator[dict]:
    """From the residual sum and norm in front to the output projection."""
    modules, hidden = [block_of(heads) for _ in range(3)], MODELS[heads][0]
    weights = sum(p.numel() for p in modules[0].parameters())
    gain = new(hidden)

    def run(module: MLA, delta_TD: Tensor, residual_TD: Tensor, batch: Batch) -> Tensor:
        return module(AddNorm(delta_TD, residual_TD, gain, 1e-6), batch)

    for sequences in BATCHES:
        delta_TD, residual_TD = new(sequences, hidden), new(sequences, hidden)
        for context in CONTEXTS:
            floor = cost(heads, sequences, context)
            floor = dict(num_bytes=floor["num_bytes"] + 2.0 * weights, flop=floor["flop"] + 2.0 * sequences * weights)
            batches = cache.batches(sequences, context)
            calls = [
                partial(run, modules[i % 3], delta_TD, residual_TD, batches[i % len(batches)])
                for i in range(max(3, len(batches)))
            ]
            name = f"block {heads} heads, batch {sequences}, context {context}"
            yield row(name, time_us(calls), **floor)


def smoke() -> list[dict]:
    cache = Cache(2048)
    batch = cache.batches(3, 128)[0]
    out_TD = block_of(16)(new(3, MODELS[16][0]), batch)
    assert out_TD.shape == (3, 2048) and bool(out_TD.isfinite().all()), out_TD.shape
    assert schedules(16, 1, 32768) and cost(16, 2, 3)["num_bytes"] == 6 * 576 * 2
    return []


def results(arguments: argparse.Namespace) -> Iterator[dict]:
    cache = Cache(SLOTS)
    for heads in arguments.heads:
        if arguments.only in (None, "block"):
            yield from block(cache, heads)
        if arguments.only in (None, "attention"):
            yield from attention(cache, heads, arguments.sweep)
        if arguments.only == "products" or (arguments.only is None and arguments.sweep):
            yield from products(heads)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--only", choices=("attention", "products", "block"))
    parser.add_argument("--heads", type=int, nargs="+", default=[128], choices=sorted(MODELS))
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows = smoke() if arguments.smoke else []
    end = time.monotonic() + arguments.seconds
    for result in () if arguments.smoke else results(arguments):
        rows.append(result)
        print(result, flush=True)
        if time.monotonic() > end:
            break
    report("mla", rows, arguments.out)


if __name__ == "__main__":
    main()
