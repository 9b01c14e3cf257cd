"""The route pool: one row of expert ids per KV slot, on the model's device. S slots, L MoE layers, K chosen.

It has the slots of the KV cache and their life: what reuses, moves or frees KV slots does the same to routes. The
router's kernel writes it; nothing else does, but for the sentinel fill at the start of a forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tracklayer.errors import IncompleteRoutes
from tracklayer.kernels.rows import fill_rows, gather_rows
from tracklayer.routes.forms import RouteShape
from tracklayer.routes.ids import Array, fill_value


class RoutePool:
    """Device tensor [S, L, K] in `shape.dtype`; `fill` marks rows before a forward, `gather` brings them home."""

    def __init__(self, num_slots: int, shape: RouteShape, device: torch.device) -> None:
        self.shape = shape
        self.sentinel = fill_value(shape.dtype)
        size = (num_slots, len(shape.layer_ids), shape.top_k)
        self.tensor_SLK = torch.full(size, self.sentinel, dtype=getattr(torch, shape.dtype.name), device=device)
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def fill(self, slots_T: Tensor) -> None:
        """Mark the rows of these slots as unwritten; the forward that follows writes them again."""
        fill_rows(self.tensor_SLK, slots_T, self.sentinel)

    def gather(self, slots: Sequence[Array], starts: Sequence[int]) -> PendingRoutes:
        """Start bringing the rows of several requests to the host: one kernel, one copy, no waiting.

        slots[r]: int32 slots of request r, the first of position starts[r]. Launched on the current stream, so that
        steps launched later may reuse the slots at once.
        """
        flat = torch.from_numpy(np.concatenate(slots).astype(np.int32, copy=False))
        lengths = [len(s) for s in slots]
        if self._copies is None:
            rows_TLK, missing_L = gather_rows(self.tensor_SLK, flat, self.sentinel)
            return PendingRoutes(rows_TLK, missing_L, None, self.shape, lengths, list(starts))
        device_slots = flat.pin_memory().to(self.tensor_SLK.device, non_blocking=True)
        gathered = gather_rows(self.tensor_SLK, device_slots, self.sentinel)
        self._copies.wait_stream(torch.cuda.current_stream())
        host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in gathered]
        done = torch.cuda.Event()
        with torch.cuda.stream(self._copies):
            for target, source in zip(host, gathered, strict=True):
                target.copy_(source, non_blocking=True)
                source.record_stream(self._copies)
            done.record()
        return PendingRoutes(host[0], host[1], done, self.shape, lengths, list(starts))


@dataclass(slots=True)
class PendingRoutes:
    """Rows on their way to the host."""

    rows_TLK: Tensor
    missing_L: Tensor
    done: torch.cuda.Event | None
    shape: RouteShape
    lengths: list[int]
    starts: list[int]

    def ready(self) -> bool:
        return self.done is None or self.done.query()

    def land(self) -> list[Array | IncompleteRoutes]:
        """Rows of each request, [rows, L, K] in the pool's type; views of a buffer, to be copied and let go.

        For a request with a (token, layer) row that was never written: the error that names positions and layers.
        """
        if self.done is not None:
            self.done.synchronize()
        parts = np.split(self.rows_TLK.numpy(), np.cumsum(self.lengths)[:-1])
        if not self.missing_L.any():
            return list(parts)
        return [self._checked(part_TLK, start) for part_TLK, start in zip(parts, self.starts, strict=True)]

    def _checked(self, part_TLK: Array, start: int) -> Array | IncompleteRoutes:
        tokens, columns = np.nonzero((part_TLK == fill_value(part_TLK.dtype)).all(-1))
        if not len(tokens):
            return part_TLK
        return IncompleteRoutes((tokens + start).tolist(), [self.shape.layer_ids[c] for c in columns])
