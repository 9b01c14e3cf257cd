"""The caches: by slot, keys and values of every attention layer and the route pool; by row, recurrent states."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tracklayer.errors import UserError
from tracklayer.kernels.rows import copy_slots
from tracklayer.layers.recurrent_spec import Kept, RecurrentSpec
from tracklayer.layers.spec import KVLayout
from tracklayer.routes.forms import RouteShape
from tracklayer.routes.pool import RoutePool

CPU_CACHE_BYTES = 2 << 30


@dataclass(slots=True)
class Caches:
    """kv[a] = (k [S, H, D], v [S, H, E]) of attention sublayer a; pool None when recording is off.

    num_window_slots: S of sublayers that see a window only, which `windowed` names; 0: they have as many as the others.
    states[m] = what recurrent sublayer m keeps, each [R + 1, ...]: a line for each row, the last is scratch.
    """

    kv: list[tuple[Tensor, Tensor]]
    pool: RoutePool | None
    states: list[tuple[Tensor, ...]] = field(default_factory=list)
    num_slots: int = 0
    num_window_slots: int = 0
    windowed: list[bool] = field(default_factory=list)

    @classmethod
    def allocate(
        cls,
        num_slots: int,
        attentions: list[KVLayout],
        routes: RouteShape | None,
        dtype: torch.dtype,
        device: torch.device,
        recurrents: Sequence[RecurrentSpec] = (),
        num_rows: int = 0,
        num_window_slots: int = 0,
    ) -> Caches:
        windowed = [a.sight is not None for a in attentions]

        def cache(a: KVLayout) -> tuple[Tensor, Tensor]:
            slots = num_window_slots if a.sight and num_window_slots else num_slots
            k_SHD = torch.zeros(slots, a.num_kv_heads, a.head_dim, dtype=dtype, device=device)
            if a.shares_value:
                return k_SHD, k_SHD[..., : a.value_dim]
            return k_SHD, torch.zeros(slots, a.num_kv_heads, a.value_dim, dtype=dtype, device=device)

        states = [
            tuple(torch.zeros(num_rows + 1, *k.shape, dtype=kept_dtype(k, dtype), device=device) for k in r.kept)
            for r in recurrents
        ]
        pool = RoutePool(num_slots, routes, device) if routes else None
        return cls([cache(a) for a in attentions], pool, states, num_slots, num_window_slots, windowed)

    @property
    def tensors(self) -> list[Tensor]:
        """Everything that lies here; values inside keys are named too."""
        kept = [tensor for state in self.states for tensor in state]
        return [t for k, v in self.kv for t in (k, v)] + kept + ([self.pool.tensor_SLK] if self.pool else [])

    def clear(self) -> None:
        """As allocated: zeros, and routes that nobody wrote."""
        for tensor in self.tensors:
            tensor.zero_()
        if self.pool:
            self.pool.tensor_SLK.fill_(self.pool.sentinel)

    def copy(self, pairs_N2: Tensor, window_pairs_N2: Tensor | None = None) -> None:
        """Copy slots (source, target) in every cache and in the pool; in windowed layers the second pairs, if given."""

        def tensors(windowed: bool) -> list[Tensor]:
            mine = [kv for kv, w in zip(self.kv, self.windowed, strict=True) if w == windowed]
            return list({t.data_ptr(): t for k, v in mine for t in (v, k)}.values())  # values inside keys move too

        pool = [self.pool.tensor_SLK] if self.pool else []
        if window_pairs_N2 is None:
            copy_slots([*tensors(False), *tensors(True), *pool], pairs_N2)
            return
        copy_slots([*tensors(False), *pool], pairs_N2)
        copy_slots(tensors(True), window_pairs_N2)


def kv_bytes_per_slot(attentions: list[KVLayout], dtype: torch.dtype) -> int:
    widths = (a.head_dim + (0 if a.shares_value else a.value_dim) for a in attentions)
    return sum(a.num_kv_heads * w for a, w in zip(attentions, widths, strict=True)) * dtype.itemsize


def kept_dtype(kept: Kept, dtype: torch.dtype) -> torch.dtype:
    return dtype if kept.dtype == "model" else getattr(torch, kept.dtype)


def state_bytes_per_row(recurrents: Sequence[RecurrentSpec], dtype: torch.dtype) -> int:
    return sum(math.prod(k.shape) * kept_dtype(k, dtype).itemsize for r in recurrents for k in r.kept)


def available_bytes(device: torch.device, mem_fraction: float) -> int:
    """Bytes that the caches may take: of the GPU's `mem_fraction` what is not in use yet; a fixed share on a CPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return int(free - (1 - mem_fraction) * total)
    pages = os.sysconf("SC_AVPHYS_PAGES") if hasattr(os, "sysconf") else 0
    free = pages * os.sysconf("SC_PAGE_SIZE") if pages else 4 * CPU_CACHE_BYTES
    return min(CPU_CACHE_BYTES, free // 4)


@dataclass(frozen=True, slots=True)
class SlotCost:
    """Bytes of one slot: of what every token keeps (pool included), and of layers that see a window only.

    window_least: window slots that are never lacking, see scheduler/sight.py; None: these layers keep every token too.
    """

    kept: int
    windowed: int = 0
    window_least: int | None = None

    def window_slots(self, num_slots: int, page_size: int) -> int:
        """Slots of windowed layers beside num_slots of the others: an eighth more for prefixes; 0: as many."""
        if self.window_least is None:
            return 0
        wanted = self.window_least + num_slots // 8
        return 0 if wanted >= num_slots else wanted - wanted % page_size

    def total(self, num_slots: int, page_size: int) -> int:
        return num_slots * self.kept + (self.window_slots(num_slots, page_size) or num_slots) * self.windowed

    def fitting(self, budget_bytes: int) -> int:
        """The most slots within the budget."""
        alike = budget_bytes // (self.kept + self.windowed)
        if self.window_least is None:
            return alike
        # kept * S + windowed * (least + S / 8) <= budget
        apart = 8 * (budget_bytes - self.windowed * self.window_least) // (8 * self.kept + self.windowed)
        return max(alike, apart)


def choose_num_slots(budget_bytes: int, cost: SlotCost, page_size: int, wanted: int | None, most_useful: int) -> int:
    """Slots to allocate, a multiple of page_size with the never-used page 0 included.

    wanted: max_total_tokens. most_useful: more could never be in use at once. Raises UserError when not even a few
    pages fit.
    """
    fitting = cost.fitting(budget_bytes)
    if wanted is not None and wanted > fitting:
        raise UserError(
            f"max_total_tokens {wanted} needs {cost.total(wanted, page_size) / 2**30:.2f} GiB of cache, "
            f"{budget_bytes / 2**30:.2f} are left beside the weights"
        )
    usable = min(fitting, most_useful) if wanted is None else wanted
    if usable < page_size:
        raise UserError(
            f"no room for a KV cache: {budget_bytes / 2**20:.0f} MiB are left beside the weights, one page needs "
            f"{(cost.kept + cost.windowed) * page_size / 2**20:.1f}; raise --mem-fraction-static or use a larger GPU"
        )
    return (usable // page_size + 1) * page_size
