"""Experts at one token as a decode step meets them: layer after layer, each kernel waiting for the one before.

    python -m benchmarks.kernels.chain_experts [--shape E,D,F,K] [--layers 24] [--tune FILE]

Timed alone, launches of one kernel overlap (programmatic dependent launch) and hide their latency; in this chain they
can not. --tune writes the best configuration for one token into the tuned table FILE.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import torch

from benchmarks.kernels.sweep_experts import SMALL_DOWN, SMALL_UP, tile
from tracklayer.kernels.experts import ExpertSpec
from tracklayer.kernels.experts_cuda import fused_experts_triton
from tracklayer.kernels.topk import Routing

SPEC = ExpertSpec()


class Chain:
    """Weights and routings of several layers, and the time of one token through all of them in a CUDA graph."""

    def __init__(self, shape: tuple[int, int, int, int], layers: int) -> None:
        experts, width, inner, top_k = shape
        self.x_TD = torch.randn(1, width, device="cuda", dtype=torch.bfloat16)
        self.layers = []
        for _ in range(layers):
            w13 = torch.empty(experts, 2 * inner, width, device="cuda", dtype=torch.bfloat16).normal_(0, width**-0.5)
            w2 = torch.empty(experts, width, inner, device="cuda", dtype=torch.bfloat16).normal_(0, inner**-0.5)
            ids_TK = torch.randperm(experts, device="cuda")[:top_k].int()[None]
            self.layers.append((Routing(ids_TK, torch.rand(1, top_k, device="cuda")), w13, w2))

    def run(self, config: dict) -> None:
        x_TD = self.x_TD
        for routing, w13, w2 in self.layers:
            x_TD = fused_experts_triton(x_TD, routing, w13, w2, SPEC, config=config)

    def us_per_layer(self, up: tuple, down: tuple, replays: int = 20) -> float:
        """Median over replays; every replay reads all layers' weights from memory."""
        config = {"form": "small", "up": tile(*up), "down": tile(*down)}
        self.run(config)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(config)
        times = []
        for _ in range(replays):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / len(self.layers))
        return sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="128,2048,768,8")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tune")
    args = parser.parse_args()
    shape = tuple(int(n) for n in args.shape.split(","))
    chain = Chain(shape, args.layers)
    up = SMALL_UP[0]
    downs = {down: chain.us_per_layer(up, down) for down in SMALL_DOWN}
    down = min(downs, key=downs.__getitem__)
    ups = {u: chain.us_per_layer(u, down) for u in SMALL_UP}
    up = min(ups, key=ups.__getitem__)
    for name, timed in (("down", downs), ("up", ups)):
        for config, us in itertools.islice(sorted(timed.items(), key=lambda pair: pair[1]), 6):
            print(f"{name:<5} n, b, stages, warps {config}: {us:.2f} us a layer")
    if args.tune:
        file = Path(args.tune)
        table = json.loads(file.read_text())
        table[",".join(map(str, shape[:3]))]["1"] = {"form": "small", "up": tile(*up), "down": tile(*down)}
        file.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
