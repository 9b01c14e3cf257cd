"""What routes may be: their shape, their ids' range, and that a token's experts differ. Errors name token and layer.

T tokens, L MoE layers, K experts chosen, N = T * L rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from tracklayer.errors import UserError
from tracklayer.routes.ids import Array, fill_value, missing_rows

if TYPE_CHECKING:
    from tracklayer.routes.record import Routes

CHECK_ROWS = 1 << 15  # rows examined at a time, so that the scratch arrays stay in the cache


def differing(layer_top_k: Iterable[int] | None, layers: int, top_k: int) -> tuple[int, ...] | None:
    """How many experts each of the layers chooses, checked; None when all choose top_k. Raises UserError."""
    if layer_top_k is None:
        return None
    whole = isinstance(layer_top_k, Iterable) and all(isinstance(k, (int, np.integer)) for k in layer_top_k)
    counts = tuple(int(k) for k in layer_top_k) if whole else ()
    if len(counts) != layers or max(counts, default=0) != top_k or min(counts) < 1:
        raise UserError(
            f"layer_top_k must have one number for each of {layers} layers, 1 or more, the largest being the width "
            f"{top_k}; got {layer_top_k!r}"
        )
    return counts if min(counts) < top_k else None


def check_shape(ids_TLK: Array, routes: Routes) -> None:
    """Integers [T, L, K] that agree with the layers' ids, the number of experts and the start."""
    if ids_TLK.ndim != 3 or ids_TLK.dtype.kind not in "iu":
        raise UserError(
            f"routes must be an integer array [tokens, layers, top_k], got {ids_TLK.dtype} {list(ids_TLK.shape)}"
        )
    layers, top_k = ids_TLK.shape[1:]
    if layers != len(routes.layer_ids) or layers == 0:
        raise UserError(f"routes have {layers} layer columns but {len(routes.layer_ids)} layer ids were given")
    if any(b <= a for a, b in pairwise(routes.layer_ids)) or routes.layer_ids[0] < 0:
        raise UserError(f"layer_ids must ascend from 0 or more, got {list(routes.layer_ids)}")
    if not 1 <= top_k <= routes.num_experts:
        raise UserError(f"{top_k} distinct experts per token can not be chosen from {routes.num_experts}")
    if routes.start < 0:
        raise UserError(f"start must be 0 or more, got {routes.start}")
    fill = fill_value(ids_TLK.dtype)
    if (top_k == 1 or routes.layer_top_k) and 0 <= fill < routes.num_experts and (ids_TLK == fill).any():
        given, reading = routes.layer_top_k or 1, "an unused place" if routes.layer_top_k else "a missing row"
        raise UserError(f"with top_k {given}, {fill} in {ids_TLK.dtype} can be expert {fill} or {reading}: widen it")


def check_range(ids_TLK: Array, routes: Routes) -> None:
    """Every id in [0, num_experts), or its whole row is missing."""
    if ids_TLK.size == 0:
        return
    fill = fill_value(ids_TLK.dtype)
    top, low = int(ids_TLK.max()), (int(ids_TLK.min()) if ids_TLK.dtype.kind == "i" else 0)
    if low >= 0 and top < routes.num_experts and not routes.layer_top_k:
        return
    bad_TLK = ((ids_TLK < 0) | (ids_TLK >= routes.num_experts)) & ~missing_rows(ids_TLK)[..., None]
    if routes.layer_top_k:
        bad_TLK = np.where(routes.used_LK, bad_TLK, ids_TLK != fill)
    if not bad_TLK.any():
        return
    t, c, k = (int(i) for i in np.argwhere(bad_TLK)[0])
    row = ids_TLK[t, c].tolist()
    remedy = "check num_experts, and columns of shared experts"
    if k >= routes.top_k_L[c]:
        raise UserError(
            f"token {routes.start + t} layer {routes.layer_ids[c]} chooses {routes.top_k_L[c]} experts, the places "
            f"after them must hold {fill}: row {row} ({int(bad_TLK.sum())} such places)"
        )
    if row[k] == fill:
        remedy = "a row may be missing as a whole only"
    raise UserError(
        f"token {routes.start + t} layer {routes.layer_ids[c]}: expert id {row[k]} is not in "
        f"0..{routes.num_experts - 1} (row {row}, {int(bad_TLK.sum())} such ids): {remedy}"
    )


def check_distinct(routes: Routes) -> None:
    """The K ids of a row differ from each other, unless the row is missing or they are of unused places."""
    top_k, fill = routes.top_k, fill_value(routes.dtype)
    tokens = max(1, CHECK_ROWS // len(routes.layer_ids))
    for first in range(0, len(routes) if top_k > 1 else 0, tokens):
        block_TLK = routes.experts_TLK[first : first + tokens]
        # One line per choice makes each comparison a pass over contiguous memory: 10 times a sort of every row.
        columns_KN = np.ascontiguousarray(block_TLK.reshape(-1, top_k).T)
        same_N = np.zeros(columns_KN.shape[1], dtype=bool)
        for k in range(1, top_k):
            for j in range(k):
                equal_N = columns_KN[j] == columns_KN[k]
                same_N |= equal_N & (columns_KN[k] != fill) if routes.layer_top_k else equal_N
        if not same_N.any():
            continue
        bad_TL = same_N.reshape(block_TLK.shape[:2]) & ~missing_rows(block_TLK)
        if bad_TL.any():
            t, c = (int(i) for i in np.argwhere(bad_TL)[0])
            row = block_TLK[t, c].tolist()
            raise UserError(
                f"token {routes.start + first + t} layer {routes.layer_ids[c]}: "
                f"the {top_k} experts must differ, got {row}"
                + ("; an all-zero row was never recorded, or the layer is dense" if not any(row) else "")
            )
