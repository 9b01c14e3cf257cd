"""Faults that the ids themselves show: nothing was written, a value was repeated, or a type was too narrow.

T rows, L MoE layers, K chosen, N wrong sets.
"""

from __future__ import annotations

import numpy as np

from tracklayer.audit.case import Case, Finding
from tracklayer.audit.scores import Array


def zero_rows(case: Case) -> Finding | None:
    """Ids all zero: a buffer that nothing wrote to."""
    zero_TL = case.wrong_TL & (case.ids_TLK == 0).all(-1)
    if not zero_TL.any():
        return None
    return Finding(
        "zero rows",
        case.mask_of(zero_TL),
        f"rows are all zero at {case.where(zero_TL)}: nothing was recorded there and the cleared buffer was returned",
        {"sets": int(zero_TL.sum())},
    )


def duplicated_rows(case: Case) -> Finding | None:
    """A right row, given again for the tokens after it."""
    same_T = np.zeros(case.rows, bool)
    wrong_T = case.wrong_TL.any(1)
    sorted_TLK = np.sort(case.ids_TLK, -1)
    same_T[1:] = (sorted_TLK[1:] == sorted_TLK[:-1]).all((1, 2))
    repeat_T = same_T & wrong_T
    if not repeat_T.any():
        return None
    first_T = np.arange(case.rows)
    first_T[same_T] = 0
    first_T = np.maximum.accumulate(first_T)  # the first row of each run of equal rows
    good_T = case.row_share_T[first_T] < 0.5
    repeat_T &= good_T
    mask_TL = case.wrong_TL & repeat_T[:, None]
    if not mask_TL.any():
        return None
    return Finding(
        "duplicated rows",
        case.mask_of(mask_TL),
        f"{int(repeat_T.sum())} rows repeat the row before them, at {case.where(mask_TL)}: "
        "a step's rows were stored twice or read before they were replaced",
        {"rows": int(repeat_T.sum())},
    )


def constant_rows(case: Case) -> Finding | None:
    """One value wherever something else was due: a fill, a pad row, a buffer laid once."""
    ids_TLK, wrong_TL = case.ids_TLK, case.wrong_TL
    mask_TL = (ids_TLK[..., 1:] == ids_TLK[..., :1]).all(-1) & (ids_TLK.shape[2] > 1)
    if case.layers > 2:
        mask_TL |= (ids_TLK == ids_TLK[:, :1]).all((1, 2))[:, None]  # the same set in every layer of a row
    for layer in range(case.layers):
        rows = np.flatnonzero(wrong_TL[:, layer])
        if len(rows) >= 3:
            values, counts = np.unique(ids_TLK[rows, layer], axis=0, return_counts=True)
            common = values[counts.argmax()]
            if counts.max() >= max(3, 0.9 * len(rows)):
                mask_TL[:, layer] |= (ids_TLK[:, layer] == common).all(-1)
    mask_TL &= wrong_TL
    if not mask_TL.any():
        return None
    t, c = np.argwhere(mask_TL)[0]
    return Finding(
        "constant rows",
        case.mask_of(mask_TL),
        f"rows hold a constant, such as {ids_TLK[t, c].tolist()}, at {case.where(mask_TL)}: "
        "a fill or pad value was returned as routes",
        {"sets": int(mask_TL.sum()), "example": ids_TLK[t, c].tolist()},
    )


def shared_columns(case: Case) -> Finding | None:
    """Columns of fused shared experts among the routed ones: dropped, the rest is right."""
    ids_TLK, top_k = case.ids_TLK, case.scores.top_k
    width = ids_TLK.shape[2]
    drop_TLK = (ids_TLK < 0) | (ids_TLK >= case.scores.num_experts)
    present_TL = ~case.comparison.missing_TL
    if not drop_TLK.any() and present_TL.sum() >= 3:
        median_LK = np.median(ids_TLK, axis=0).astype(np.int64)  # a constant column equals its median
        constant_LK = (ids_TLK == median_LK).mean(0) >= 0.95
        drop_TLK |= constant_LK[None]
    dropped_N = drop_TLK[case.t_N, case.l_N].sum(-1)
    count = int(np.median(dropped_N)) if len(dropped_N) else 0
    if not count and width > top_k:
        count = width - top_k
        drop_TLK[..., top_k:] = True
        dropped_N = drop_TLK[case.t_N, case.l_N].sum(-1)
    rest = width - count
    if not count or rest < 1 or rest > top_k or (width > top_k and rest != top_k):
        return None
    if (drop_TLK.sum(-1) == count)[present_TL].mean() < 0.95:
        return None
    order_NK = np.argsort(drop_TLK[case.t_N, case.l_N], axis=-1, kind="stable")
    kept_NK = np.take_along_axis(case.ids_NK, order_NK, 1)[:, :rest]
    explained = float((case.fits(kept_NK, case.t_N, case.l_N) & (dropped_N == count)).mean())
    values = np.unique(ids_TLK[drop_TLK])[:4].tolist()
    return Finding(
        "shared-expert columns",
        explained,
        f"{count} of the {width} columns are not routed experts (ids {', '.join(map(str, values))}): fused shared "
        f"experts were recorded; the rest is {'the' if rest == top_k else f'only {rest} of the'} {top_k} routed ids",
        {"columns": count, "ids": values},
    )


def truncated_ids(case: Case) -> Finding | None:
    """Ids that went through a type too narrow for them."""
    experts = case.scores.num_experts
    present = case.ids_TLK[~case.comparison.missing_TL]
    if not present.size:
        return None
    low, high = int(present.min()), int(present.max())
    readings = [  # (words, the ids lie in the type's range, modulus)
        ("modulo 256 (uint8)", experts > 256 and low >= 0 and high < 256, 256),
        ("modulo 256 into -128..127 (int8)", experts > 128 and low in range(-128, 0) and high < 128, 256),
        ("modulo 128", experts > 128 and low >= 0 and high < 128, 128),
    ]
    for words, holds, modulus in readings:
        if not holds:
            continue
        explained = float(_fits_preimages(case, case.ids_NK, modulus).mean())
        if explained >= 0.5:
            return Finding(
                "truncated ids",
                explained,
                f"ids are taken {words} although the model has {experts} experts: their type was too narrow",
                {"modulus": modulus},
            )
    clip = next((c for c in (127, 255) if high == c < experts - 1 and low >= 0), None)
    if clip is not None:
        below_NK = np.where(case.ids_NK == clip, -1, case.ids_NK)
        explained = float(_fits_clipped(case, below_NK, clip).mean())
        return Finding(
            "truncated ids",
            explained,
            f"ids stop at {clip} although the model has {experts} experts: they were clipped to a narrow type",
            {"clip": clip},
        )
    return None


def _fits_preimages(case: Case, ids_NK: Array, modulus: int) -> Array:
    """Does the best-scoring choice of preimages (id + n * modulus) fit?"""
    base_NK = ids_NK % modulus
    choice_NE = case.scores.choice_TLE[case.t_N + case.start, case.l_N]
    taken = np.zeros(choice_NE.shape, bool)
    result_NK = np.empty_like(base_NK)
    for k in range(base_NK.shape[1]):  # one at a time: equal remainders must come from different ids
        score_N, id_N = np.full(len(base_NK), -np.inf, np.float32), np.full(len(base_NK), -1)
        for step in range(0, case.scores.num_experts, modulus):
            candidate_N = base_NK[:, k] + step
            inside_N = candidate_N < case.scores.num_experts
            safe_N = np.where(inside_N, candidate_N, 0)
            free_N = inside_N & ~taken[np.arange(len(safe_N)), safe_N]
            value_N = np.where(free_N, choice_NE[np.arange(len(safe_N)), safe_N], -np.inf)
            better_N = value_N > score_N
            score_N, id_N = np.where(better_N, value_N, score_N), np.where(better_N, candidate_N, id_N)
        result_NK[:, k] = id_N
        taken[np.arange(len(id_N))[id_N >= 0], id_N[id_N >= 0]] = True
    return case.fits(result_NK, case.t_N, case.l_N)


def _fits_clipped(case: Case, below_NK: Array, clip: int) -> Array:
    """Ids below the clip must be chosen ones, and as many chosen ids must lie at or above it as were clipped."""
    own_NK = case.scores.ids_TLK[case.t_N + case.start, case.l_N]
    result_NK = below_NK.copy()
    for n in np.flatnonzero((below_NK < 0).any(1)):
        gone = np.flatnonzero(below_NK[n] < 0)
        high = own_NK[n][own_NK[n] >= clip]
        if len(high) >= len(gone):
            result_NK[n, gone] = high[: len(gone)]
    return case.fits(result_NK, case.t_N, case.l_N)
