"""Experts of one layer as the engine runs them: sort, gate-up with activation, down, weighted sum.

    python -m benchmarks.kernels.bench_experts [--shape 128,2048,768,8] [--tokens 1,16,256] [--json FILE]

Bytes are the weights of the experts that the routing hits, read once. `tracklayer tune` finds the tiles.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.common import report, row, time_us
from tracklayer.kernels import experts_small, grouped_gemm, route_sort
from tracklayer.kernels.combine import WeightedSum
from tracklayer.kernels.experts import ExpertSpec, fused_experts, fused_experts_ref
from tracklayer.kernels.norm import as_tensor
from tracklayer.kernels.topk import Routing
from tracklayer.kernels.tuning import pick

SPEC = ExpertSpec()
Shape = tuple[int, int, int, int]


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

    def whole(self, x_TD: torch.Tensor, routing: Routing) -> torch.Tensor:
        return as_tensor(fused_experts(x_TD, routing, self.w13_EFD, self.w2_EDF, SPEC))

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="128,2048,768,8", help="E,D,F,K")
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,128,256,512,1024,4096,16384")
    parser.add_argument("--torch", action="store_true", help="time the torch reference too")
    parser.add_argument("--json")
    args = parser.parse_args()
    experts, width, inner, top_k = shape = tuple(int(n) for n in args.shape.split(","))
    problem = Problem(shape, "cuda")
    rows = []
    for num_tokens in (int(n) for n in args.tokens.split(",")):
        problem.batch(num_tokens)
        routings, x_TD = problem.routings, problem.x_TD
        hit = sum(len(r.ids_TK.unique()) for r in routings) / len(routings)
        expert_bytes, flop = 2.0 * width * inner * hit, 2.0 * num_tokens * top_k * width * inner
        config = pick(x_TD.device, (experts, width, inner), top_k, num_tokens, x_TD.dtype)
        form, m = config["form"], config["up"].get("m", 0)
        form = form if form == "small" else config["up"]["tall"]
        for which, times in (("up", 2), ("down", 1)):
            us = time_us(problem.product(form, which, m, config[which]))
            rows.append(
                row(f"{num_tokens} tokens, {form}: {which}", us, num_bytes=times * expert_bytes, flop=times * flop)
            )
        if form != "small":
            ids = [r.ids_TK for r in routings] * 2
            rows.append(
                row(f"{num_tokens} tokens: sort", time_us([partial(route_sort.route_sort, i, experts, m) for i in ids]))
            )
            pairs_PD = problem.make(num_tokens * top_k, width)
            sums = [WeightedSum(pairs_PD, r, x_TD, experts) for r in routings] * 2
            calls = [s.tensor for s in sums]
            rows.append(
                row(f"{num_tokens} tokens: sum", time_us(calls), num_bytes=2.0 * num_tokens * width * (top_k + 1))
            )
        calls = [partial(problem.whole, x_TD, r) for r in routings]
        us = time_us(calls)
        rows.append(row(f"{num_tokens} tokens, {form}: whole", us, num_bytes=3 * expert_bytes, flop=3 * flop))
        if args.torch:
            calls = [partial(fused_experts_ref, x_TD, r, problem.w13_EFD, problem.w2_EDF, SPEC) for r in routings]
            rows.append(row(f"{num_tokens} tokens: torch", time_us(calls, graph=False), num_bytes=3 * expert_bytes))
    report("experts " + args.shape, rows, args.json)


if __name__ == "__main__":
    main()
