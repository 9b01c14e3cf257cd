"""Faults that predict the rows exactly: each detector says which of the wrong sets its hypothesis accounts for.

A detector takes a `Case` and gives a `Finding` or None; DETECTORS lists them, the more specific first. What only
shows as a pattern (old rows, a draft model, other weights) is in patterns.py. numpy; scipy for the assignment.

T rows, L MoE layers, E experts, K chosen, N wrong sets, P ids that occur in the routes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.optimize import linear_sum_assignment

from tracklayer.audit.case import Case, Finding, spans
from tracklayer.audit.scores import Array

SAMPLE = 256  # tokens or sets that a hypothesis is screened on
MIN_ROWS = 8  # fewer wrong rows do not tell a shift or a map from chance


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


def shifted_rows(case: Case) -> Finding | None:
    """Row t holds the routes of another position t - s, the same s everywhere."""
    if len(case.wrong_rows) < MIN_ROWS:
        return None
    pick = pick_evenly(len(case.t_N), 48)
    best, most = 0, 0.0
    half = len(case.scores) // 2
    for s in {*range(-half, half + 1), case.start} - {0}:  # by `start`: the server ignored the offset asked for
        share = float(case.fits(case.ids_NK[pick], case.t_N[pick] - s, case.l_N[pick]).mean())
        if share > most or (share == most and abs(s) < abs(best)):
            best, most = s, share
    if most < 0.5:
        return None
    source_N = case.t_N - best + case.start
    inside_N = (source_N >= 0) & (source_N < len(case.scores))  # rows from outside the sequence can not be judged
    if inside_N.mean() < 0.5:
        return None
    explained = float(case.fits(case.ids_NK[inside_N], case.t_N[inside_N] - best, case.l_N[inside_N]).mean())
    step = f"{abs(best)} token{'s' if abs(best) > 1 else ''}"
    told = f"row t holds the routes of position t {'-' if best > 0 else '+'} {abs(best)}"
    return Finding(
        "shifted rows",
        explained,
        f"rows are shifted by {step} ({told}) at {case.where()}",
        {"shift": best},
    )


def shifted_layers(case: Case) -> Finding | None:
    """Column c holds the routes of another layer; columns that no layer explains hold nothing (dense layers' zeros)."""
    if len(case.wrong_rows) < MIN_ROWS or case.layers < 2:
        return None
    source: dict[int, int] = {}
    blank: list[int] = []
    explained_N = np.zeros(len(case.t_N), bool)
    for c in range(case.layers):
        inside_N = case.l_N == c
        if not inside_N.any():
            continue
        ids_NK, t_N = case.ids_NK[inside_N], case.t_N[inside_N]
        if (ids_NK == ids_NK[:1, :1]).all():
            blank.append(c)
            explained_N[inside_N] = True
            continue
        pick = pick_evenly(len(t_N), SAMPLE)
        shares = [case.fits(ids_NK[pick], t_N[pick], np.full(len(pick), o)).mean() for o in range(case.layers)]
        best = int(np.argmax(shares))
        if shares[best] >= 0.5:
            source[c] = best
            explained_N[inside_N] = case.fits(ids_NK, t_N, np.full(len(t_N), best))
    if not source:
        return None
    layer_ids = case.scores.layer_ids
    pairs = {layer_ids[c]: layer_ids[o] for c, o in source.items()}
    steps = {o - c for c, o in source.items()}
    sentence = f"the layer axis is not the model's: layer {_mapping(pairs)}"
    if len(steps) == 1:
        sentence = f"columns are shifted by {abs(steps.pop())} layers: layer {_mapping(pairs)}"
    if blank:
        sentence += f"; layer {spans([layer_ids[c] for c in blank])} holds nothing"
    sentence += "; a layer axis of all layers was read as MoE layers only, or the other way round"
    return Finding("shifted layers", float(explained_N.mean()), sentence, {"source": pairs})


def physical_ids(case: Case) -> Finding | None:
    """Ids after a load balancer's map: one map per layer turns them into logical ids."""
    span = case.wrong_rows
    if len(span) < 2 * MIN_ROWS:
        return None
    first, last = int(span[0]), int(span[-1]) + 1
    if case.wrong_TL[first:last].any(1).mean() < 0.5:
        return None
    maps: dict[int, Array] = {}
    explained_N = np.zeros(len(case.t_N), bool)
    kept = []
    for c in np.unique(case.l_N):
        present = first + np.flatnonzero(~case.comparison.missing_TL[first:last, c])
        ids_TK = case.ids_TLK[present, c]
        if not len(present) or ids_TK.min() < 0 or ids_TK.max() >= 8 * case.scores.num_experts:
            return None
        to_logical_P = _assign(case, present[pick_evenly(len(present), 4 * SAMPLE)], int(c), int(ids_TK.max()) + 1)
        maps[int(c)] = to_logical_P
        inside_N = case.l_N == c
        explained_N[inside_N] = case.fits(to_logical_P[case.ids_NK[inside_N]], case.t_N[inside_N], case.l_N[inside_N])
        right = present[~case.wrong_TL[present, c]]
        if len(right):
            kept.append(case.fits(to_logical_P[case.ids_TLK[right, c]], right, np.full(len(right), c)).mean())
    if kept and np.mean(kept) < 0.8:
        return None
    # How often an id was seen on average: ids seen once or twice fit some expert by chance, most so in short rows.
    seen = len(present) * case.ids_TLK.shape[2] / max(len(m) for m in maps.values())
    if seen < 2 and case.ids_TLK.shape[2] <= 2:
        return None
    layer_ids = case.scores.layer_ids
    shown = {layer_ids[c]: m.tolist() for c, m in maps.items()}
    same = len({tuple(m) for m in maps.values()}) == 1
    example = next(iter(shown.values()))
    head = ", ".join(f"{p}->{e}" for p, e in enumerate(example[:12])) + (", ..." if len(example) > 12 else "")
    return Finding(
        "physical ids",
        float(explained_N.mean()),
        f"ids are physical, after the load balancer's map: one map {'for all layers' if same else 'per layer'}, "
        f"in layer {next(iter(shown))} {head} (physical->logical; all of it in the JSON)",
        {"physical_to_logical": shown},
        enough=0.5 if seen >= 2 else 0.9,  # the best maps of unrelated rows explain under 0.25
    )


def _assign(case: Case, rows: Array, column: int, num_physical: int) -> Array:
    """The map physical -> logical [P] that costs least: a pair costs what it leaves below the reference's threshold.

    Few observations leave several maps without cost; then scores well above the threshold count a little, a second
    place for one expert costs a little, and two ids of one row that map to one expert cost a miss.
    """
    scores, experts = case.scores, case.scores.num_experts
    at = (rows + case.start, np.full(len(rows), column))
    choice_TE = scores.allowed(*at)
    kth_T1 = scores.kth_TL[at][:, None]
    scale_T1 = np.maximum(scores.choice_TLE[at].std(-1, keepdims=True), 1e-30)
    short_TE = (kth_T1 - choice_TE) / scale_T1
    short_TE = np.where(short_TE > 0, np.minimum(short_TE + 0.1, 1.0), 0.02 * np.maximum(short_TE, -1.0))
    member_TP = np.zeros((len(rows), num_physical), np.float32)
    np.put_along_axis(member_TP, case.ids_TLK[rows, column], 1.0, 1)
    cost_PE = member_TP.T @ short_TE
    copies = 1 if num_physical <= experts else 3  # places of one expert
    to_logical_P = np.full(num_physical, -1)
    for _ in range(1 if copies == 1 else 8):
        wide_PE = np.concatenate([cost_PE + 0.25 * copy for copy in range(copies)], 1)
        physical, logical = linear_sum_assignment(wide_PE)
        to_logical_P[physical] = logical % experts
        together_PP = member_TP.T @ member_TP  # rows in which two ids occur together
        clash_PP = np.where(to_logical_P[:, None] == to_logical_P[None, :], together_PP, 0.0)
        np.fill_diagonal(clash_PP, 0.0)
        clashes_P = clash_PP.sum(1)
        if not clashes_P.any():
            break
        cost_PE[np.arange(num_physical), to_logical_P] += 0.5 * clashes_P
    return to_logical_P


def other_request(case: Case) -> Finding | None:
    """The rows of another request that was audited with this one."""
    best: Finding | None = None
    for other in case.others:
        explained = float(case.fits(case.ids_NK, case.t_N, case.l_N, other).mean()) if len(case.t_N) else 0.0
        if best is None or explained > best.explained:
            sentence = f"the rows at {case.where()} are those of another request ({other.name})"
            best = Finding("another request's rows", explained, sentence, {"request": other.name})
    return best


def other_version(case: Case) -> Finding | None:
    """The rows that other weights, given for comparison, choose for the same tokens."""
    best: Finding | None = None
    for version in case.versions:
        explained = float(case.fits(case.ids_NK, case.t_N, case.l_N, version).mean()) if len(case.t_N) else 0.0
        if best is None or explained > best.explained:
            sentence = f"the rows at {case.where()} are those of other weights ({version.name})"
            best = Finding("wrong weight version", explained, sentence, {"version": version.name})
    return best


def pick_evenly(n: int, most: int) -> Array:
    """At most `most` indices below n, evenly spread."""
    return np.unique(np.linspace(0, n - 1, min(n, most)).astype(int)) if n else np.empty(0, int)


def _mapping(pairs: dict[int, int], limit: int = 6) -> str:
    text = ", ".join(f"{c} holds {o}" for c, o in list(pairs.items())[:limit])
    return text + (f" and {len(pairs) - limit} more" if len(pairs) > limit else "")


Detector = Callable[[Case], Finding | None]
# The more specific first: of detectors that explain equally much, the first one's name is given.
DETECTORS: tuple[Detector, ...] = (
    zero_rows,
    duplicated_rows,
    constant_rows,
    shared_columns,
    truncated_ids,
    shifted_layers,
    shifted_rows,
    other_version,
    other_request,
    physical_ids,
)
