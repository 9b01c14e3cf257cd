"""Rows of the route pool and of the caches: filling, gathering with a count of what is missing, copying.

S slots, T tokens, L MoE layers, K experts chosen. A (token, layer) row of the pool is unwritten when all its K ids
equal the fill value; K >= 2 distinct ids never do, and K = 1 needs a fill that is no expert id.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tracklayer.kernels.dispatch import use_triton
from tracklayer.kernels.jit import jit, next_power_of_2, tl


def fill_rows(pool_SLK: Tensor, slots_T: Tensor, value: int) -> None:
    """pool_SLK[slots_T] = value: the rows of these slots become unwritten. slots_T int32, repeats allowed."""
    if use_triton(pool_SLK):
        launch_fill_rows(pool_SLK, slots_T, value)
    else:
        fill_rows_ref(pool_SLK, slots_T, value)


def fill_rows_ref(pool_SLK: Tensor, slots_T: Tensor, value: int) -> None:
    """The torch reference of `fill_rows`."""
    pool_SLK.index_fill_(0, slots_T.long(), value)


def gather_rows(pool_SLK: Tensor, slots_T: Tensor, fill: int, out_TLK: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rows of these slots, and how many of them are unwritten: (rows_TLK in the pool's dtype, missing_L int32).

    slots_T int32. `out_TLK` takes the rows when given (same shape and dtype).
    """
    if use_triton(pool_SLK):
        return launch_gather_rows(pool_SLK, slots_T, fill, out_TLK)
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


@jit
def _fill_kernel(pool_ptr, slots_ptr, value, ROW: tl.constexpr, BLOCK: tl.constexpr):
    slot = tl.load(slots_ptr + tl.program_id(0)).to(tl.int64)
    i = tl.arange(0, BLOCK)
    tl.store(pool_ptr + slot * ROW + i, value.to(pool_ptr.dtype.element_ty), mask=i < ROW)


def launch_fill_rows(pool_SLK: Tensor, slots_T: Tensor, value: int) -> None:
    """Triton launch of `fill_rows`: one program a slot."""
    assert pool_SLK.is_contiguous(), f"the pool must be contiguous, strides {pool_SLK.stride()}"
    row = pool_SLK[0].numel()
    if len(slots_T):
        _fill_kernel[(len(slots_T),)](pool_SLK, slots_T, value, ROW=row, BLOCK=next_power_of_2(row), num_warps=1)


@jit(do_not_specialize=["tokens"])
def _gather_kernel(
    pool_ptr, slots_ptr, out_ptr, missing_ptr, tokens, fill, L: tl.constexpr, K: tl.constexpr, TP: tl.constexpr,
    LP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * TP + tl.arange(0, TP)
    layer = tl.program_id(1) * LP + tl.arange(0, LP)
    k = tl.arange(0, KP)
    slot = tl.load(slots_ptr + t, mask=t < tokens, other=0).to(tl.int64)
    row = layer[None, :, None] * K + k[None, None, :]
    ok = (t < tokens)[:, None, None] & (layer < L)[None, :, None] & (k < K)[None, None, :]
    ids = tl.load(pool_ptr + slot[:, None, None] * (L * K) + row, mask=ok, other=0)
    tl.store(out_ptr + t.to(tl.int64)[:, None, None] * (L * K) + row, ids, mask=ok)
    written = tl.max((ok & (ids.to(tl.int32) != fill)).to(tl.int32), 2)
    real = (t < tokens)[:, None] & (layer < L)[None, :]
    missing = tl.sum((real & (written == 0)).to(tl.int32), 0)
    # Whole numbers: the order of these additions changes nothing. Almost always there is nothing to add.
    tl.atomic_add(missing_ptr + layer, missing, mask=(layer < L) & (missing > 0), sem="relaxed")


def launch_gather_rows(
    pool_SLK: Tensor, slots_T: Tensor, fill: int, out_TLK: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Triton launch of `gather_rows`: a program gathers a few tokens' rows of up to 64 layers."""
    assert pool_SLK.is_contiguous(), f"the pool must be contiguous, strides {pool_SLK.stride()}"
    _, layers, chosen = pool_SLK.shape
    tokens = len(slots_T)
    if out_TLK is None:
        out_TLK = torch.empty(tokens, layers, chosen, dtype=pool_SLK.dtype, device=pool_SLK.device)
    missing_L = torch.zeros(layers, dtype=torch.int32, device=pool_SLK.device)
    layer_block = min(next_power_of_2(layers), 64)
    if tokens:
        _gather_kernel[(-(-tokens // 4), -(-layers // layer_block))](
            pool_SLK, slots_T, out_TLK, missing_L, tokens, fill, L=layers, K=chosen, TP=4, LP=layer_block,
            KP=next_power_of_2(chosen), num_warps=4,
        )  # fmt: skip
    return out_TLK, missing_L
