"""Sweep the expert kernels' tiles by shape and batch, and write the tuned table of this device.

    python -m benchmarks.kernels.sweep_experts --shapes 128,2048,768,8 --tokens 1,256 --out DIR

Writes DIR/<device>.json (the table, for tracklayer/kernels/tuned/) and DIR/sweep.json (every figure).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.common import try_us
from benchmarks.kernels.precompile import compile_ahead
from tracklayer.kernels import combine, experts_small, grouped_gemm, route_sort
from tracklayer.kernels.experts import ExpertSpec
from tracklayer.kernels.experts_cuda import fused_experts_triton
from tracklayer.kernels.topk import Routing
from tracklayer.kernels.tuning import device_key, sorted_config

SPEC = ExpertSpec()
Shape = tuple[int, int, int, int]
SMALL_UP = [
    (2, 1024, 1, 4), (2, 1024, 2, 4), (4, 512, 1, 4), (4, 512, 3, 4), (4, 512, 4, 4), (8, 256, 4, 4), (8, 256, 6, 4),
    (4, 1024, 1, 8), (4, 1024, 2, 8), (8, 512, 1, 8), (8, 512, 3, 4), (2, 2048, 1, 4), (4, 2048, 1, 8), (16, 256, 3, 8),
    (1, 2048, 1, 4), (1, 1024, 2, 2), (2, 512, 4, 2), (4, 256, 4, 2), (16, 128, 5, 4),
]  # fmt: skip
SMALL_DOWN = [
    (4, 256, 0, 4), (8, 256, 0, 8), (8, 256, 0, 4), (4, 128, 0, 2), (2, 256, 0, 2), (2, 512, 0, 4),
    (16, 256, 1, 4), (16, 256, 4, 4), (16, 256, 6, 4), (8, 256, 4, 4), (8, 256, 6, 4), (8, 256, 8, 4), (16, 128, 8, 4),
    (8, 256, 8, 2), (4, 256, 8, 2), (16, 256, 6, 8), (8, 256, 10, 4), (8, 512, 4, 4), (8, 1024, 3, 4), (4, 1024, 3, 4),
    (4, 256, 12, 2), (8, 128, 12, 2),
]  # fmt: skip
WEIGHTS_UP = [
    (64, 64, 4, 4), (64, 64, 6, 4), (64, 128, 2, 4), (64, 128, 3, 4), (64, 128, 4, 4), (128, 64, 3, 4),
    (128, 64, 4, 4), (128, 64, 4, 8), (128, 128, 3, 8), (128, 128, 2, 4), (64, 256, 2, 4),
]  # fmt: skip
WEIGHTS_DOWN = [
    (64, 64, 6, 4), (64, 128, 3, 4), (64, 128, 5, 4), (128, 64, 4, 4), (128, 64, 6, 4), (128, 128, 2, 4),
    (128, 128, 3, 4), (128, 128, 4, 8), (128, 128, 3, 8), (64, 256, 3, 4), (256, 64, 4, 8), (64, 256, 2, 4),
]  # fmt: skip
ROWS_UP = {
    64: [(128, 64, 3, 4), (128, 64, 4, 8), (64, 64, 4, 4), (64, 64, 3, 4)],
    128: [(128, 64, 3, 8), (128, 64, 4, 8), (64, 64, 3, 4), (64, 64, 3, 8), (64, 64, 4, 8), (64, 128, 2, 8)],
    256: [(64, 64, 3, 8), (64, 64, 4, 8)],
}
ROWS_DOWN = {
    64: [(128, 64, 4, 4), (256, 64, 3, 4), (256, 64, 3, 8), (128, 64, 3, 4)],
    128: [(128, 64, 3, 8), (128, 64, 4, 8), (256, 64, 3, 8), (256, 64, 4, 8), (128, 64, 3, 4), (128, 128, 2, 8)],
    256: [(128, 64, 3, 8), (128, 64, 4, 8), (64, 64, 3, 8)],
}


def tile(n: int, b: int, stages: int, warps: int, **rest: Any) -> dict[str, Any]:
    return {"n": n, "b": b, "stages": stages, "warps": warps, **rest}


def forms(num_tokens: int, shape: Shape) -> Iterator[tuple[str, int, list[dict], list[dict]]]:
    """(form, m, configurations of the first product, of the second) worth trying for a batch."""
    experts, _, _, top_k = shape
    if num_tokens <= 16:
        yield "small", 0, [tile(*c) for c in SMALL_UP], [tile(*c) for c in SMALL_DOWN]
    average = num_tokens * top_k / experts
    for m in (16, 32, 64, 128):
        if num_tokens >= 2 and (m == 16 or average / 4 <= m <= average * 4) and average <= 80:
            up, down = (
                [tile(*c, tall="weights", m=m, tma=True, group=1) for c in t] for t in (WEIGHTS_UP, WEIGHTS_DOWN)
            )
            yield "weights", m, up, down
    for m in (64, 128, 256):
        if average >= 24 and m <= average * 4:
            groups = (1, 8) if average >= 200 else (8,)
            halves = (False, True) if m > 64 else (False,)
            up, down = (
                [tile(*c, tall="rows", m=m, tma=True, group=g, halves=h) for c in t[m] for g in groups for h in halves]
                for t in (ROWS_UP, ROWS_DOWN)
            )
            yield "rows", m, up, down


class Problem:
    """Weights of one shape and, per batch, inputs with routings; on the CPU they only stand in while compiling."""

    def __init__(self, shape: Shape, device: str) -> None:
        experts, width, inner, self.top_k = shape
        self.shape, self.device = shape, device
        self.w13_EFD = self.make(experts, 2 * inner, width)
        self.w2_EDF = self.make(experts, width, inner)

    def make(self, *size: int) -> torch.Tensor:
        out = torch.empty(size, dtype=torch.bfloat16, device=self.device)
        return out.normal_(0, size[-1] ** -0.5) if self.device == "cuda" else out

    def batch(self, num_tokens: int) -> None:
        """Small batches rotate among routings, so that weights come from memory."""
        copies = max(1, min(8, 64 // num_tokens))
        self.x_TD = self.make(num_tokens, self.shape[1])
        self.routings = []
        for _ in range(copies):
            scores = torch.rand(num_tokens, self.shape[0], device=self.device)
            ids_TK = scores.topk(self.top_k).indices.int()
            weights_TK = torch.rand(num_tokens, self.top_k, device=self.device)
            self.routings.append(Routing(ids_TK, weights_TK))
        self.h_PF = self.make(num_tokens * self.top_k, self.shape[2])

    def product(self, form: str, which: str, m: int, config: dict) -> list[Callable[[], Any]]:
        """The calls that time one product under one configuration."""
        if form == "small":
            launch = experts_small.gate_up if which == "up" else experts_small.down_sum
            a, w = (self.x_TD, self.w13_EFD) if which == "up" else (self.h_PF, self.w2_EDF)
            if which == "up":
                return [partial(launch, a, r, w, SPEC, config) for r in self.routings]
            return [partial(launch, a, self.x_TD, r, w, SPEC, config) for r in self.routings]
        a, w = (self.x_TD, self.w13_EFD) if which == "up" else (self.h_PF, self.w2_EDF)
        calls = []
        for r in self.routings:
            pairs = route_sort.route_sort(r.ids_TK, self.shape[0], m)
            gemm = partial(grouped_gemm.grouped_gemm, a, w, pairs, r.weights_TK, SPEC, config, first=which == "up")
            calls += [gemm, gemm] if len(self.routings) == 1 else [gemm]
        return calls

    def whole(self, config: dict) -> list[Callable[[], Any]]:
        return [
            partial(fused_experts_triton, self.x_TD, r, self.w13_EFD, self.w2_EDF, SPEC, config=config)
            for r in self.routings
        ]


def sweep_batch(problem: Problem, num_tokens: int, log: list[dict]) -> dict[str, Any]:
    """Time every form's products, then the whole of each form's best; returns the best whole configuration."""
    problem.batch(num_tokens)
    candidates = []
    for form, m, ups, downs in forms(num_tokens, problem.shape):
        best = {}
        for which, configs in (("up", ups), ("down", downs)):
            timed = [(try_us(problem.product(form, which, m, c)), c) for c in configs]
            timed = sorted(((us, c) for us, c in timed if us is not None), key=lambda pair: pair[0])
            log += [
                {"shape": problem.shape, "tokens": num_tokens, "form": form, "m": m, "which": which, "us": us, **c}
                for us, c in timed
            ]
            if timed:
                best[which] = timed[0]
        if len(best) == 2:
            up, down = best["up"], best["down"]
            config = {"form": "small", "up": up[1], "down": down[1]}
            if form != "small":
                config = sorted_config(form, m, up[1], down[1])
            us = try_us(problem.whole(config))
            candidates.append((us, up[0], down[0], config))
            label = f"{num_tokens:>6} {form:<8}{m:>4}  whole {us:8.1f}  up {up[0]:8.1f}  down {down[0]:8.1f}"
            keys = ("n", "b", "stages", "warps", "group", "halves")
            print(label, *([c[k] for k in keys if k in c] for c in (up[1], down[1])), flush=True)
    return min(candidates, key=lambda c: c[0])[3]


def compile_jobs(shapes: list[Shape], tokens: list[int]) -> list[Callable[[], Any]]:
    """Every configuration's launch over CPU stand-ins, each once."""
    jobs: dict[str, Callable[[], Any]] = {}
    for shape in shapes:
        problem = Problem(shape, "cpu")
        for num_tokens in tokens:
            problem.batch(num_tokens)
            del problem.routings[1:]
            for form, m, ups, downs in forms(num_tokens, shape):
                for which, configs in (("up", ups), ("down", downs)):
                    for c in configs:
                        calls = partial(lambda p, *a: p.product(*a)[0](), problem_of(problem), form, which, m, c)
                        jobs.setdefault(f"{shape}{which}{m}{sorted(c.items())}{num_tokens >= 1024}", calls)
    return list(jobs.values())


def problem_of(problem: Problem) -> Problem:
    """A snapshot: batch() replaces the attributes of the original."""
    snapshot = object.__new__(Problem)
    snapshot.__dict__.update(problem.__dict__)
    return snapshot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="128,2048,768,8", help="E,D,F,K; several separated by spaces")
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,128,256,512,1024,4096,16384")
    parser.add_argument("--out", default="build/tuned")
    args = parser.parse_args()
    shapes = [tuple(int(n) for n in s.split(",")) for s in args.shapes.split()]
    tokens = [int(n) for n in args.tokens.split(",")]
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    jobs = compile_jobs(shapes, tokens)
    compile_ahead(jobs, [combine, experts_small, grouped_gemm, route_sort])
    print(f"compiled {len(jobs)} configurations in {time.monotonic() - begin:.0f} s", flush=True)
    table: dict[str, dict[str, Any]] = {}
    log: list[dict] = []
    for shape in shapes:
        print("E, D, F, K =", shape)
        problem = Problem(shape, "cuda")
        table[",".join(map(str, shape[:3]))] = rows = {}
        for num_tokens in tokens:
            rows[str(num_tokens)] = sweep_batch(problem, num_tokens, log)
            (out / f"{device_key(torch.cuda.get_device_name())}.json").write_text(json.dumps(table, indent=1) + "\n")
            (out / "sweep.json").write_text(json.dumps(log))
        del problem
        torch.cuda.empty_cache()
    print(f"swept in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
