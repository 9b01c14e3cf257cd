"""Sampling and log-probabilities over a vocabulary of 151,936 in bf16, against torch's own operations.

python -m benchmarks.kernels.bench_sample [--smoke] [--out FILE]
"""

from __future__ import annotations

import argparse
from functools import partial

import torch

from benchmarks.kernels.common import report, row, time_us
from tracklayer.kernels.sample import apply_penalties, logprobs_of, sample, sample_ref

VOCABULARY = 151_936
ALL = 1 << 30
CASES = [
    ("greedy", ALL, 1.0, 0.0),
    ("temperature 1", ALL, 1.0, 1.0),
    ("top-p 0.95", ALL, 0.95, 1.0),
    ("top-k 20, top-p 0.95", 20, 0.95, 0.6),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def settings(rows: int, top_k: int, top_p: float, temperature: float) -> dict:
    full = partial(torch.full, (rows,), device=DEVICE)
    return dict(
        temperature_N=full(temperature), top_k_N=full(top_k, dtype=torch.int32), top_p_N=full(top_p),
        min_p_N=full(0.0), seeds_N=torch.arange(rows, device=DEVICE), positions_N=full(7, dtype=torch.int32),
    )  # fmt: skip


def bench(rows: int) -> list[dict]:
    inputs = [3 * torch.randn(rows, VOCABULARY, device=DEVICE).bfloat16() for _ in range(2 if rows > 64 else 8)]
    size = rows * VOCABULARY * 2.0
    results = []
    for name, top_k, top_p, temperature in CASES:
        kw = settings(rows, top_k, top_p, temperature)
        flags = dict(all_greedy=temperature == 0, any_filter=top_p < 1 or top_k < VOCABULARY)
        run = [partial(sample, logits, **kw, **flags) for logits in inputs]
        results.append(row(f"sample {name} N={rows}", time_us(run), num_bytes=size))
        if flags["any_filter"] and top_k < VOCABULARY:
            us = time_us([partial(sample_ref, inputs[0], **kw, **flags)] * 2, graph=False)
            results.append(row("  torch, sorting", us, num_bytes=size))
    ids = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    temperature = torch.ones(rows, device=DEVICE)
    run = [partial(logprobs_of, logits, temperature, ids, 0) for logits in inputs]
    results.append(row(f"logprobs_of N={rows}", time_us(run), num_bytes=size))
    counts = torch.zeros(rows, VOCABULARY, dtype=torch.int32, device=DEVICE)
    seen = torch.zeros(rows, VOCABULARY, dtype=torch.bool, device=DEVICE)
    run = [partial(apply_penalties, logits, counts, seen, temperature, temperature, temperature) for logits in inputs]
    results.append(row(f"apply_penalties N={rows}", time_us(run), num_bytes=size * 5.5))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.smoke:
        logits = torch.eye(5, 40, device=DEVICE)
        ids = sample(logits, **settings(5, 1 << 30, 1.0, 0.0), all_greedy=True, any_filter=False)
        assert ids.tolist() == list(range(5)), ids
        rows = []
    else:
        rows = [r for n in (1, 16, 256) for r in bench(n)]
    report("sample", rows, arguments.out)


if __name__ == "__main__":
    main()
