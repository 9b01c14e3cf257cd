"""CUDA graphs of decode steps at a ladder of batch sizes. B lines of a graph, R rows, V vocabulary.

A graph runs the same decoder code as the eager path over static buffers. Lines past the step's own are padding: row
R (scratch), length 1, slot 0, so that they write to page 0 of KV and pool and wake no expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from tracklayer.layers.batch import Batch
from tracklayer.models.decoder import Decoder
from tracklayer.runner.kv_cache import Caches
from tracklayer.runner.rows import Rows
from tracklayer.runner.runs import decode_run
from tracklayer.types import Share

S = TypeVar("S")
Captured = tuple[torch.cuda.CUDAGraph, Tensor]


@dataclass(frozen=True, slots=True)
class CaptureCost:
    """What all graphs of an engine took."""

    num_graphs: int
    seconds: float
    num_bytes: int


@cache
def side_stream() -> torch.cuda.Stream:
    """One for all captures: the BLAS library keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream()


def capture_each(sizes: Sequence[S], load: Callable[[S], None], forward: Callable[[S], Tensor]) -> dict[S, Captured]:
    """Graphs of `forward` by size, with their static outputs: last size first, in one memory pool.

    `load` fills the static inputs of a size. Each forward runs once before, so that its kernels are compiled and tuned.
    """
    pool, stream = torch.cuda.graph_pool_handle(), side_stream()
    captured: dict[S, Captured] = {}
    for size in reversed(sizes):
        load(size)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            forward(size)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            output = forward(size)
        captured[size] = (graph, output)
    torch.cuda.synchronize()
    return captured


def ladder(largest: int) -> list[int]:
    """Batch sizes to capture: dense where padding costs most, then coarser. The largest is always one of them."""
    sizes = [1, 2, 3, 4, 6, 8, 12, *range(16, 64, 8), *range(64, 256, 16), *range(256, largest + 1, 64)]
    return sorted({min(size, largest) for size in sizes} | {largest})


@dataclass(slots=True)
class GraphBuffers:
    """Static inputs of all graphs: fields_5B int32 holds rows, lens, slots, slots of windowed layers, and the count."""

    fields_5B: Tensor
    starts_B1: Tensor

    @classmethod
    def allocate(cls, largest: int, device: torch.device) -> GraphBuffers:
        return cls(
            torch.zeros(5, -(-largest // 32) * 32, dtype=torch.int32, device=device),
            torch.arange(largest + 1, dtype=torch.int32, device=device),
        )

    def load(self, shares: list[Share], size: int, scratch: int) -> None:
        """Copy a step's lines in, padded to `size`; one copy to the device, no waiting."""
        host = np.zeros((5, self.fields_5B.shape[1]), np.int32)
        count = len(shares)
        host[0, :count] = [s.row for s in shares]
        host[1, :count] = [s.start + 1 for s in shares]
        host[2, :count] = [s.slots[-1] for s in shares]
        host[3, :count] = [s.windowed[-1] for s in shares]
        host[0, count:size] = scratch
        host[1, count:size] = 1
        host[4, 0] = count
        packed = torch.from_numpy(host)
        self.fields_5B.copy_(packed.pin_memory() if self.fields_5B.is_cuda else packed, non_blocking=True)


class DecodeGraphs:
    """Captured graphs by batch size; `run` replays the smallest that holds the step."""

    def __init__(self, decoder: Decoder, rows: Rows, caches: Caches, sizes: list[int], device: torch.device) -> None:
        self.decoder, self.rows, self.caches = decoder, rows, caches
        self.sizes = sizes
        self.buffers = GraphBuffers.allocate(sizes[-1], device)
        self.graphs: dict[int, Captured] = {}

    def capture(self) -> None:
        """Capture every size."""
        scratch = self.rows.scratch
        self.graphs = capture_each(self.sizes, lambda size: self.buffers.load([], size, scratch), self.forward)

    def forward(self, size: int) -> Tensor:
        """One decode step over the buffers' first `size` lines -> logits [size, V]. This is what a graph holds."""
        rows_B, lens_B, *both = self.buffers.fields_5B[:4, :size]
        slots, positions_B = both[: self.rows.num_tables], lens_B - 1
        batch = Batch(
            token_ids_T=self.rows.enter_decode(rows_B, positions_B, slots),
            positions_T=positions_B,
            slots_T=slots[0],
            rows_B=rows_B,
            starts_B1=self.buffers.starts_B1[: size + 1],
            lens_B=lens_B,
            slot_table_RC=self.rows.slot_table_RC,
            max_query=1,
            max_len=self.rows.slot_table_RC.shape[1],
            num_tokens_1=self.buffers.fields_5B[4, :1],
            kv=self.caches.kv,
            pool_SLK=self.caches.pool.tensor_SLK if self.caches.pool else None,
            states=self.caches.states,
            runs=[decode_run(rows_B, lens_B)] if self.caches.states else [],
            windowed=self.rows.windowed(slots),
        )
        if self.caches.pool:
            self.caches.pool.fill(slots[0])
        return self.decoder.logits(self.decoder(batch))

    def size_for(self, count: int) -> int | None:
        """The smallest captured size of at least `count` lines, or None."""
        return next((size for size in self.sizes if size >= count and size in self.graphs), None)

    def run(self, shares: list[Share], size: int) -> tuple[Tensor, Tensor]:
        """Replay for these shares -> (logits [N, V], their rows int32 [N])."""
        self.buffers.load(shares, size, self.rows.scratch)
        graph, logits_BV = self.graphs[size]
        graph.replay()
        return logits_BV[: len(shares)], self.buffers.fields_5B[0, : len(shares)]
