"""Norms, the fused norm + rotation + store of q, k and v, and activations at Qwen3-30B-A3B's shapes, bf16.

python -m benchmarks.kernels.bench_norm_rope [--smoke] [--out FILE]
"""

from __future__ import annotations

import argparse
from functools import partial

import torch

from benchmarks.kernels.common import copies_for, report, row, time_us
from tracklayer.kernels.activation import act_mul
from tracklayer.kernels.norm import add_rms_norm
from tracklayer.kernels.qk_rope import Heads, qk_rope_store
from tracklayer.kernels.rope import rope_table
from tracklayer.kernels.rows import fill_rows, gather_rows

N, H, D, WIDTH, SLOTS, LAYERS, CHOSEN = 32, 4, 128, 2048, 200_000, 48, 8
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def bench(tokens: int) -> list[dict]:
    bf16 = partial(torch.randn, dtype=torch.bfloat16, device=DEVICE)
    results = []
    weight, gain = bf16(WIDTH), bf16(D)
    size = tokens * WIDTH * 2 * 4
    inputs = [(bf16(tokens, WIDTH), bf16(tokens, WIDTH)) for _ in range(copies_for(size))]
    run = [partial(add_rms_norm, delta, residual, weight, 1e-6) for delta, residual in inputs]
    results.append(row(f"add_rms_norm T={tokens}", time_us(run), num_bytes=size))

    table = rope_table(D, 1e6, None, 4096, DEVICE)
    cache = [torch.zeros(SLOTS, H, D, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    slots = torch.randperm(SLOTS, device=DEVICE)[:tokens].int()
    positions = torch.randint(0, 4096, (tokens,), device=DEVICE).int()
    size = tokens * D * 2 * (2 * (N + 2 * H) + H)
    heads = Heads(num_heads=N, num_kv_heads=H, head_dim=D, value_dim=D, rope_dim=D, q_norm_D=gain, k_norm_D=gain)
    run = [
        partial(qk_rope_store, bf16(tokens, (N + 2 * H) * D), table, positions, slots, *cache, heads)
        for _ in range(copies_for(size))
    ]
    results.append(row(f"qk_rope_store T={tokens}", time_us(run), num_bytes=size))

    size = tokens * 768 * 3 * 2
    run = [partial(act_mul, bf16(tokens, 2 * 768), "silu") for _ in range(copies_for(size))]
    results.append(row(f"act_mul F=768 T={tokens}", time_us(run), num_bytes=size))

    pool = torch.randint(0, 128, (SLOTS, LAYERS, CHOSEN), dtype=torch.uint8, device=DEVICE)
    size = tokens * LAYERS * CHOSEN
    results.append(row(f"fill_rows T={tokens}", time_us([partial(fill_rows, pool, slots, 255)] * 4), num_bytes=size))
    run = [partial(gather_rows, pool, slots, 255)] * 4
    results.append(row(f"gather_rows T={tokens}", time_us(run), num_bytes=2 * size))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.smoke:
        out = add_rms_norm(torch.ones(3, WIDTH), torch.ones(3, WIDTH), torch.ones(WIDTH), 0.0)
        assert torch.allclose(out, torch.ones_like(out)), out
        rows = []
    else:
        rows = [r for tokens in (1, 16, 256, 16384) for r in bench(tokens)]
    report("norm_rope", rows, arguments.out)


if __name__ == "__main__":
    main()
