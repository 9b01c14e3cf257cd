"""Expert kernels timed as a step meets them: layer after layer, weights from memory, each launch after the one before.

Timed alone, launches of one kernel overlap (programmatic dependent launch) and hide their latency; in this chain they
can not. T tokens, E experts, K chosen, D model width, F expert width.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from tracklayer.kernels.experts import ExpertSpec
from tracklayer.kernels.experts_cuda import fused_experts_triton
from tracklayer.kernels.norm import as_tensor
from tracklayer.kernels.topk import RouterSpec, select_experts

MAX_SETS = 8
MEMORY_SHARE = 0.7  # of the free memory that the weights may take


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The routed experts of one layer."""

    name: str
    experts: int
    top_k: int
    width: int
    inner: int
    spec: ExpertSpec = field(default_factory=ExpertSpec)
    bias: bool = False

    @property
    def key(self) -> str:
        """The shape's name in a tuned table."""
        return f"{self.experts},{self.width},{self.inner}"

    @property
    def router(self) -> RouterSpec:
        """A plain one: which experts are chosen is drawn at random."""
        return RouterSpec(num_experts=self.experts, top_k=self.top_k, renormalize=True)

    @property
    def expert_params(self) -> int:
        return (3 if self.spec.gated else 2) * self.width * self.inner

    @property
    def expert_bytes(self) -> int:
        """Of one expert, in 16 bits."""
        return 2 * self.expert_params


class Chain:
    """Weights of a few layers, used in turn, and per batch the routings of `links` layers and their common input.

    On a CPU the same calls stand in, for compiling and for Triton's interpreter; their times mean nothing.
    """

    def __init__(self, shape: ExpertShape, device: str, sets: int | None = None) -> None:
        self.shape, self.device = shape, torch.device(device)
        # Triton's interpreter truncates to bfloat16 where a GPU rounds.
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        sets = sets or self._sets_wanted()
        rows = shape.inner * (2 if shape.spec.gated else 1)
        self.sets = [
            (
                self._random(shape.experts, rows, shape.width),
                self._random(shape.experts, shape.width, shape.inner),
                self._random(shape.experts, rows) if shape.bias else None,
                self._random(shape.experts, shape.width) if shape.bias else None,
            )
            for _ in range(sets)
        ]

    def _sets_wanted(self) -> int:
        """So many that four times the L2 cache is read before one token may meet an expert again; at most what fits."""
        if self.device.type != "cuda":
            return 1
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        wanted = 1 + -(-4 * cache // (self.shape.top_k * self.shape.expert_bytes))
        room = MEMORY_SHARE * torch.cuda.mem_get_info(self.device)[0] / (self.shape.experts * self.shape.expert_bytes)
        return max(1, min(wanted, int(room), MAX_SETS))

    def _random(self, *size: int) -> Tensor:
        return torch.empty(size, dtype=self.dtype, device=self.device).normal_(0, size[-1] ** -0.5)

    def batch(self, num_tokens: int) -> None:
        """Draw the input and a routing for each link: random distinct experts for every token."""
        shape = self.shape
        links = 24 if num_tokens <= 16 else 8 if num_tokens <= 1024 else 3
        links = links if self.device.type == "cuda" else 2
        self.x_TD = self._random(num_tokens, shape.width).mul_(shape.width**0.5)
        logits = (torch.randn(num_tokens, shape.experts, device=self.device) for _ in range(links))
        self.routings = [select_experts(logits_TE, shape.router) for logits_TE in logits]

    @property
    def bytes_per_layer(self) -> float:
        """Weight bytes of the experts that a link's tokens choose, on average."""
        hit = sum(len(r.ids_TK.unique()) for r in self.routings) / len(self.routings)
        return hit * self.shape.expert_bytes

    @property
    def flop_per_layer(self) -> float:
        return 2.0 * self.routings[0].ids_TK.numel() * self.shape.expert_params

    def run(self, config: dict[str, Any]) -> Tensor:
        """All links, the input added to each result so that values keep their size: [T, D]."""
        y_TD = self.x_TD
        for routing, (w13, w2, b13, b2) in zip(self.routings, cycle(self.sets), strict=False):
            done = fused_experts_triton(
                y_TD, routing, w13, w2, self.shape.spec, bias13=b13, bias2=b2, add_TD=self.x_TD, config=config
            )
            y_TD = as_tensor(done)
        return y_TD

    def us_per_layer(self, config: dict[str, Any], replays: int = 7) -> float:
        """Median microseconds of a link over replays of a CUDA graph of the whole chain."""
        if self.device.type != "cuda":
            began = time.perf_counter()
            self.run(config)
            return (time.perf_counter() - began) * 1e6 / len(self.routings)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(config)
        times = []
        for _ in range(replays + 1):  # the first is not counted
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / len(self.routings))
        return sorted(times[1:])[replays // 2]


def compile_job(shape: ExpertShape, num_tokens: int, config: dict[str, Any]) -> partial[Tensor]:
    """A launch of all kernels of `config` over CPU stand-ins that hold nothing (memory is asked for, not touched)."""
    return partial(_compile, shape, num_tokens, config)


def _compile(shape: ExpertShape, num_tokens: int, config: dict[str, Any]) -> Tensor:
    def nothing(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.bfloat16)

    rows = shape.inner * (2 if shape.spec.gated else 1)
    x_TD = nothing(num_tokens, shape.width)
    routing = select_experts(torch.zeros(num_tokens, shape.experts), shape.router)
    done = fused_experts_triton(
        x_TD,
        routing,
        nothing(shape.experts, rows, shape.width),
        nothing(shape.experts, shape.width, shape.inner),
        shape.spec,
        bias13=nothing(shape.experts, rows) if shape.bias else None,
        bias2=nothing(shape.experts, shape.width) if shape.bias else None,
        add_TD=x_TD,
        config=config,
    )
    return as_tensor(done)
