"""Matrix-vector products at Qwen3-30B-A3B's shapes, bf16, weights from memory, against the BLAS library.

    python -m benchmarks.kernels.bench_linear [--sweep] [--smoke] [--out FILE]

The chain is a layer's dense part at one token: norm, qkv, o.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.kernels.common import copies_for, report, row, time_us, try_us
from tracklayer.kernels.linear import launch_linear_small, linear
from tracklayer.kernels.norm import add_rms_norm

SHAPES = {"qkv": (5120, 2048), "o": (2048, 4096), "gate": (128, 2048), "head": (151_936, 2048)}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
bf16 = partial(torch.randn, dtype=torch.bfloat16, device=DEVICE)


def bench(tokens: int, sweep: bool) -> list[dict]:
    results = []
    for name, (outputs, width) in SHAPES.items():
        size = 2.0 * outputs * width
        weights = [bf16(outputs, width) for _ in range(copies_for(size))]
        x = bf16(tokens, width)
        ours = partial(partial, launch_linear_small, x)
        results.append(
            row(f"cuBLAS {name} T={tokens}", time_us([partial(F.linear, x, w) for w in weights]), num_bytes=size)
        )
        us = time_us([ours(w, pdl=False) for w in weights])
        results.append(row(f"linear_small {name} T={tokens}", us, num_bytes=size))
        us = time_us([ours(w) for w in weights])
        results.append(row(f"linear_small {name} T={tokens}, dependent launch", us, num_bytes=size))
        for rows, columns, warps in SWEEP if sweep else ():
            schedule = dict(rows=rows, columns=columns, warps=warps)
            us = try_us([ours(w, **schedule) for w in weights])
            if us is not None:
                results.append(row(f"  {schedule}", us, num_bytes=size, case=f"{name} T={tokens}"))
    return results


SWEEP = [
    (4, 2048, 4),
    (8, 2048, 8),
    (4, 2048, 2),
    (16, 2048, 8),
    (16, 1024, 4),
    (2, 4096, 4),
    (8, 4096, 8),
    (8, 1024, 4),
]


def chain(layers: int = 24) -> list[dict]:
    """Per layer: residual sum and norm, qkv, o."""
    gain, residual = bf16(2048), bf16(1, 2048)
    qkv, o = ([bf16(*SHAPES[name]) for _ in range(layers)] for name in ("qkv", "o"))
    x = bf16(1, 2048)
    size = layers * 2.0 * (5120 * 2048 + 2048 * 4096)

    def run(product) -> None:
        y = x
        for w, v in zip(qkv, o, strict=True):
            y = product(product(add_rms_norm(y, residual, gain, 1e-6), w)[:, :4096], v)

    forms = {"cuBLAS": F.linear, "linear": linear}
    return [row(f"chain of {layers} layers, {n}", time_us([partial(run, p)]), num_bytes=size) for n, p in forms.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.smoke:
        x, w = torch.ones(2, 8), torch.ones(3, 8)
        assert linear(x, w).tolist() == [[8.0] * 3] * 2
        rows = []
    else:
        rows = bench(1, arguments.sweep) + bench(2, False) + bench(4, False) + chain()
    report("linear", rows, arguments.out)


if __name__ == "__main__":
    main()
