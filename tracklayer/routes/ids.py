"""How expert ids are kept: in the narrowest type that holds every id and a *fill*, which missing rows are full of.

T tokens, L MoE layers, K experts chosen.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def narrow_dtype(num_experts: int, top_k: int = 2) -> np.dtype[Any]:
    """The type in which ids in [0, num_experts) are kept: uint8 (fill 255), int16 or int32 (fill -1).

    With 256 experts id 255 is also the fill: a row of at least two distinct ids can not be all 255, so uint8 still
    does; with top_k = 1 (which also stands for layers that differ in it) the fill must be no id, and int16 is taken.
    """
    if num_experts <= 255 or (num_experts == 256 and top_k >= 2):
        return np.dtype(np.uint8)
    return np.dtype(np.int16 if num_experts <= 1 << 15 else np.int32)


def fill_value(dtype: npt.DTypeLike) -> int:
    """What all K ids of a missing row are: the largest value of an unsigned type, -1 in a signed one."""
    dtype = np.dtype(dtype)
    return int(np.iinfo(dtype).max) if dtype.kind == "u" else -1


def missing_rows(ids_TLK: Array) -> Array:
    """bool [T, L]: all K ids are the fill. The first column rules out most rows cheaply."""
    fill = fill_value(ids_TLK.dtype)
    missing_TL: Array = ids_TLK[..., 0] == fill
    if missing_TL.any():
        missing_TL &= (ids_TLK == fill).all(-1)
    return missing_TL


def narrowed(ids_TLK: Array, narrow: np.dtype[Any], layer_top_k: tuple[int, ...] | None) -> Array:
    """Cast ids that are known to be in range; the fill becomes the narrow type's fill."""
    out_TLK = ids_TLK.astype(narrow)
    source, target = fill_value(ids_TLK.dtype), fill_value(narrow)
    # Two's complement turns -1 into 255 and 65535 into -1 by itself; only a widening cast needs the explicit step.
    if ids_TLK.dtype.itemsize < narrow.itemsize and ids_TLK.dtype.kind == "u" and (ids_TLK == source).any():
        out_TLK[ids_TLK == source if layer_top_k else missing_rows(ids_TLK)] = target
    return out_TLK
