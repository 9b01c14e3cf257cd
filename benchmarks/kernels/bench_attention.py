"""Paged attention at the shapes of Qwen3-30B-A3B (32 query heads, 4 key heads, width 128), bf16.

    python -m benchmarks.kernels.bench_attention [--only decode|prefill] [--sweep] [--smoke] [--out FILE]

Decode against the bytes of the cache that it must read, prefill against the matrix rate and torch's own attention over
the same whole prompts. --sweep tries schedules; --smoke runs tiny shapes (on a CPU: the torch references).
"""

from __future__ import annotations

import argparse
from functools import partial
from inspect import signature

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.common import copies_for, report, row, time_us, try_us
from tracklayer.kernels.attention import paged_attention
from tracklayer.kernels.attention_decode import paged_decode
from tracklayer.kernels.attention_prefill import paged_prefill
from tracklayer.kernels.attention_rule import Rule

N, H, D = 32, 4, 128
RULE = Rule(D**-0.5)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def paged(lens: list[int], counts: list[int], shared: int = 0, siblings: int = 1, contiguous: bool = False) -> dict:
    """Inputs of paged_attention; each `siblings` neighbours share their first `shared` slots."""
    slots = 1 + sum(lens)
    free = 1 + (torch.arange(slots - 1) if contiguous else torch.randperm(slots - 1))
    table = torch.zeros(len(lens), max(lens), dtype=torch.int32)
    for b, n in enumerate(lens):
        table[b, :n], free = free[:n], free[n:]
        if b % siblings:
            table[b, :shared] = table[b - 1, :shared]
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    bf16 = partial(torch.randn, dtype=torch.bfloat16, device=DEVICE)
    return dict(
        q_TND=bf16(sum(counts), N, D), k_SHD=bf16(slots, H, D), v_SHE=bf16(slots, H, D), slot_table_RC=table.to(DEVICE),
        rows_B=torch.arange(len(lens), dtype=torch.int32, device=DEVICE), starts_B1=starts,
        lens_B=torch.tensor(lens, dtype=torch.int32, device=DEVICE), rule=RULE,
    )  # fmt: skip


DECODES = {
    "B=1 len 400": ([400], 0, 1),
    "B=1 len 4096": ([4096], 0, 1),
    "B=1 len 32768": ([32768], 0, 1),
    "B=16 len 400": ([400] * 16, 0, 1),
    "B=64 len 400": ([400] * 64, 0, 1),
    "B=256 len 400": ([400] * 256, 0, 1),
    "B=256 len 128..640": (torch.linspace(128, 640, 256).int().tolist(), 0, 1),
    "B=256 len 1280, 8 siblings share 1024": ([1280] * 256, 1024, 8),
    "B=256 len 1280, nothing shared": ([1280] * 256, 0, 1),
}


def decode(sweep: bool) -> list[dict]:
    results = []
    for name, (lens, shared, siblings) in DECODES.items():
        cached = sum(lens) - (len(lens) - len(lens) // siblings) * shared
        num_bytes = cached * H * D * 4.0
        inputs = [paged(lens, [1] * len(lens), shared, siblings) for _ in range(copies_for(num_bytes, at_most=8))]
        bound = max(lens) if len(lens) > 1 else 40960
        run = [partial(paged_attention, **kw, max_query=1, max_len=bound) for kw in inputs]
        results.append(row(f"decode {name}", time_us(run), num_bytes=num_bytes))
        for kw in inputs:
            kw.pop("starts_B1")
        for block_l, warps, stages, splits in SWEEP.get(name, ()) if sweep else ():
            schedule = dict(block_l=block_l, warps=warps, stages=stages, splits=splits)
            us = try_us([partial(paged_decode, **kw, max_len=bound, **schedule) for kw in inputs])
            if us is not None:
                results.append(row(f"  {schedule}", us, num_bytes=num_bytes, case=name))
    return results


TILES = [(64, 4, 3), (64, 4, 5), (64, 4, 7), (32, 4, 5), (32, 4, 7), (32, 2, 7), (128, 4, 3), (128, 8, 5), (64, 8, 5)]
SWEEP = {
    "B=1 len 400": [(*tile, splits) for tile in TILES[:5] for splits in (8, 16, 64)],
    "B=256 len 128..640": [(*tile, splits) for tile in TILES for splits in (1, 2)],
    "B=256 len 1280, 8 siblings share 1024": [(*tile, 1) for tile in TILES],
}
PREFILLS = {
    "4 whole prompts of 4096": ([4096] * 4, [4096] * 4),
    "16 whole prompts of 1024": ([1024] * 16, [1024] * 16),
    "64 whole prompts of 128": ([128] * 64, [128] * 64),
    "1 chunk of 2048 after 30720": ([32768], [2048]),
    "250 decodes at 1280 and one prompt of 2048": ([1280] * 250 + [2048], [1] * 250 + [2048]),
}
SCHEDULES = [(128, 64, 8, 3), (128, 64, 8, 5), (128, 128, 8, 3), (64, 64, 4, 3), (128, 64, 4, 3), (64, 128, 4, 3)]
SWEPT_PREFILLS = ("4 whole prompts of 4096", "250 decodes at 1280 and one prompt of 2048")


def prefill(sweep: bool) -> list[dict]:
    results = []
    for name, (lens, counts) in PREFILLS.items():
        flop = sum(4.0 * N * D * (c * n - c * (c - 1) / 2) for n, c in zip(lens, counts, strict=True))
        kw = paged(lens, counts)
        decodes = sum(c == 1 for c in counts)
        bounds = dict(max_query=max(counts), max_len=max(lens), num_decodes=decodes)
        results.append(row(f"prefill {name}", time_us([partial(paged_attention, **kw, **bounds)] * 3), flop=flop))
        for block_m, block_l, warps, stages in SCHEDULES if sweep and name in SWEPT_PREFILLS else ():
            schedule = dict(block_m=block_m, block_l=block_l, warps=warps, stages=stages)
            us = try_us([partial(paged_prefill, **kw, **schedule)] * 3)
            if us is not None:
                results.append(row(f"  {schedule}", us, flop=flop, case=name))
        if lens == counts:
            results += whole_prompts(name, lens, flop, sweep and name in SWEPT_PREFILLS)
    return results


def whole_prompts(name: str, lens: list[int], flop: float, sweep: bool) -> list[dict]:
    """Nothing cached: contiguous keys in our kernel, and torch's attention."""
    tokens, results = sum(lens), []
    qkv = torch.randn(tokens, (N + 2 * H) * D, dtype=torch.bfloat16, device=DEVICE)
    q, k, v = (x.unflatten(-1, (-1, D)) for x in qkv.split([N * D, H * D, H * D], -1))
    starts = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    lens_B = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    ours = partial(paged_prefill, q, k, v, RULE, slot_table_RC=None, rows_B=None, starts_B1=starts, lens_B=lens_B)
    for block_m, block_l, warps, stages in SCHEDULES if sweep else SCHEDULES[:1]:
        schedule = dict(block_m=block_m, block_l=block_l, warps=warps, stages=stages)
        us = try_us([partial(ours, **schedule)] * 3)
        if us is not None:
            results.append(row(f"  contiguous {schedule}", us, flop=flop, case=name))
    for backend in (torch.nn.attention.SDPBackend.CUDNN_ATTENTION, torch.nn.attention.SDPBackend.FLASH_ATTENTION):

        def sdpa(backend=backend) -> Tensor:
            split = (x.unflatten(0, (len(lens), -1)).transpose(1, 2) for x in (q, k, v))
            with torch.nn.attention.sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*split, is_causal=True, enable_gqa=True)

        results.append(row(f"  torch {backend.name}", time_us([sdpa] * 3, graph=False), flop=flop, case=name))
    from torch.nn.attention.varlen import varlen_attn

    repeated = [x.repeat_interleave(N // H, 1) for x in (k, v)]
    causal = {"window_size": (-1, 0)} if "window_size" in signature(varlen_attn).parameters else {"is_causal": True}
    varlen = partial(varlen_attn, q.contiguous(), *repeated, starts, starts, max(lens), max(lens), **causal)
    results.append(row("  torch varlen", time_us([varlen] * 3, graph=False), flop=flop, case=name))
    return results


def smoke() -> list[dict]:
    kw = paged([9, 17, 5], [1, 17, 2])
    out = paged_attention(**kw, max_query=17, max_len=17)
    assert out.shape == (20, N, D) and bool(out.isfinite().all()), out.shape
    return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--only", choices=("decode", "prefill"))
    parser.add_argument("--out")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows = smoke() if arguments.smoke else []
    if not arguments.smoke and arguments.only != "prefill":
        rows += decode(arguments.sweep)
    if not arguments.smoke and arguments.only != "decode":
        rows += prefill(arguments.sweep)
    report("attention", rows, arguments.out)


if __name__ == "__main__":
    main()
