"""Rows of the route pool and of the caches: filling, gathering with a count of what is missing, copying.

S slots, T tokens, L MoE layers, K experts chosen. A (token, layer) row of the pool is unwritten when all its K ids
equal the fill value; K >= 2 distinct ids never do, and K = 1 needs a fill that is no expert id.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def fill_rows(pool_SLK: Tensor, slots_T: Tensor, value: int) -> None:
    """pool_SLK[slots_T] = value: the rows of these slots become unwritten. slots_T int32, repeats allowed."""
    fill_rows_ref(pool_SLK, slots_T, value)


def fill_rows_ref(pool_SLK: Tensor, slots_T: Tensor, value: int) -> None:
    """The torch reference of `fill_rows`."""
    pool_SLK.index_fill_(0, slots_T.long(), value)


def gather_rows(pool_SLK: Tensor, slots_T: Tensor, fill: int, out_TLK: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rows of these slots, and how many of them are unwritten: (rows_TLK in the pool's dtype, missing_L int32).

    slots_T int32. `out_TLK` takes the rows when given (same shape and dtype).
    """
    return gather_rows_ref(pool_SLK, slots_T, fill, out_TLK)


def gather_rows_ref(
    pool_SLK: Tensor, slots_T: Tensor, fill: int, out_TLK: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The torch reference of `gather_rows`."""
    rows_TLK = torch.index_select(pool_SLK, 0, slots_T.long())
    if out_TLK is not None:
        rows_TLK = out_TLK.copy_(rows_TLK)
    missing_L = (rows_TLK == fill).all(-1).sum(0, dtype=torch.int32)
    return rows_TLK, missing_L


def copy_slots(tensors: Sequence[Tensor], pairs_N2: Tensor) -> None:
    """tensor[target] = tensor[source] for each (source, target) of pairs_N2 (int), in each tensor [S, ...].

    All sources are read before any target is written; no target may occur twice.
    """
    source, target = pairs_N2[:, 0].long(), pairs_N2[:, 1].long()
    for tensor in tensors:
        tensor.index_copy_(0, target, tensor.index_select(0, source))
