"""Faults that only show as a pattern: which sets are wrong, and whether the wrong ones still follow the token.

Asked when no detector of faults.py accounts for the wrong sets. Each gives a `Finding` or None. numpy only.

T rows, L MoE layers, K chosen, N wrong sets.
"""

from __future__ import annotations

import numpy as np

from tracklayer.audit.case import MAX_SETS, MIN_ROWS, Case, Detector, Finding, pick_evenly, spans
from tracklayer.audit.scores import Array

SAME_WEIGHTS_LIKE = 0.25  # affinity from which wrong rows count as made for these tokens
BASELINES = 8


def affinity(case: Case) -> float:
    """How much the wrong sets follow their own tokens: 0 as for unrelated tokens, 1 the reference's own choice.

    Mean choice score of the recorded ids at their own token, between that at other tokens of the same layer (popular
    experts score well everywhere) and that of the reference's own choice.
    """
    scores, positions = case.scores, len(case.scores)
    pick = pick_evenly(len(case.t_N), MAX_SETS // 4)
    ids_NK, t_N, l_N = (
        np.clip(case.ids_NK[pick], 0, scores.num_experts - 1),
        case.t_N[pick] + case.start,
        case.l_N[pick],
    )

    def mean_score(ids_NK: Array, t_N: Array) -> float:
        choice_NE = scores.choice_TLE[t_N, l_N]
        chosen_NK = np.take_along_axis(choice_NE, ids_NK.astype(np.int64), 1)
        spread_N1 = np.maximum(choice_NE.std(-1, keepdims=True), 1e-30)
        return float(((chosen_NK - choice_NE.mean(-1, keepdims=True)) / spread_N1).mean())

    steps = np.unique(np.linspace(positions // 8 + 1, positions - 1, BASELINES).astype(int))
    chance = np.mean([mean_score(ids_NK, (t_N + s) % positions) for s in steps])
    best = mean_score(scores.ids_TLK[t_N, l_N], t_N)
    return float((mean_score(ids_NK, t_N) - chance) / max(best - chance, 1e-6))


def weight_version(case: Case) -> Finding | None:
    """Wrong by small margins and near the reference's choice: other weights, or another precision of these."""
    if len(case.wrong_rows) < MIN_ROWS:
        return None
    follows = affinity(case)
    if follows < SAME_WEIGHTS_LIKE:
        return None
    finite = case.comparison.sigmas_TL[case.wrong_TL]
    if not np.isfinite(finite).mean() > 0.9:
        return None
    return Finding(
        "wrong weight version",
        1.0,
        f"rows at {case.where()} follow the tokens but not these weights (affinity {follows:.2f}, median margin "
        f"{np.median(finite):.0f} sigma): another weight version, or weights in another precision, chose the experts",
        {"affinity": follows, "median_sigmas": float(np.median(finite))},
    )


def draft_model(case: Case) -> Finding | None:
    """Whole columns of few layers wrong, all others right: a draft model wrote under the target's layer numbers."""
    columns = np.flatnonzero(case.wrong_TL.any(0))
    if len(case.wrong_rows) < MIN_ROWS:
        return None
    share_L = case.wrong_TL[case.wrong_rows].mean(0)
    heavy = np.flatnonzero(share_L >= 0.6)
    if not len(heavy) or len(heavy) > case.layers // 2 or heavy[-1] - heavy[0] + 1 != len(heavy):
        return None
    mask_TL = np.zeros_like(case.wrong_TL)
    mask_TL[:, heavy] = case.wrong_TL[:, heavy]
    explained = case.mask_of(mask_TL)
    if explained < 0.9:
        return None
    layer_ids = [case.scores.layer_ids[c] for c in heavy]
    return Finding(
        "draft-model rows",
        explained,
        f"layer {spans(layer_ids)} is wrong at {case.where(mask_TL)} while the {case.layers - len(heavy)} other "
        "layers are right: a draft model's layers wrote under the same layer numbers",
        {"layers": layer_ids, "columns": len(columns)},
    )


def _wrong_span(case: Case) -> tuple[int, int] | None:
    """First and last of the rows that are wrong in most layers, when they lie together and hold the wrong sets."""
    rows = np.flatnonzero(case.row_share_T >= 0.5)
    if not len(rows):
        return None
    first, last = int(rows[0]), int(rows[-1])
    if len(rows) < 0.9 * (last - first + 1):
        return None
    held = case.wrong_TL[first : last + 1].sum() / case.num_wrong
    return (first, last) if held >= 0.9 else None


def stale_rows(case: Case) -> Finding | None:
    """The first rows, or the last few, hold what an earlier step left there; all between are right."""
    span = _wrong_span(case)
    if span is None:
        return None
    first, last = span
    count, final = last - first + 1, case.rows - 1
    if first == 0 and last < final:
        place = f"the first {count} rows (a reused prefix)"
    elif last == final and first > 0 and count <= max(1, case.rows // 4):
        place = "the last row" if count == 1 else f"the last {count} rows (padding or an unwritten tail)"
    else:
        return None
    return Finding(
        "stale rows",
        1.0,
        f"{place} hold{'s' if count == 1 else ''} routes of other tokens, at {case.where()}: "
        "the buffer's old content was returned",
        {"first": first + case.start, "last": last + case.start},
    )


def foreign_rows(case: Case) -> Finding | None:
    """Valid routes that have nothing to do with these tokens."""
    span = _wrong_span(case)
    if span is None or span[1] - span[0] + 1 < MIN_ROWS:
        return None
    return Finding(
        "another request's rows",
        1.0,
        f"rows at {case.where()} are valid routes but not of these tokens: another request's (audit the requests "
        "together to find which)",
        {"first": span[0] + case.start, "last": span[1] + case.start},
    )


def physical_range(case: Case) -> Finding | None:
    """Many different ids beyond the model's experts: physical ids, of which there are too few rows to find the map."""
    high = np.unique(case.ids_NK[case.ids_NK >= case.scores.num_experts])
    if len(high) < 3 or len(case.wrong_rows) < MIN_ROWS:
        return None
    return Finding(
        "physical ids",
        1.0,
        f"ids go up to {int(high.max())} at {case.where()} although the model has {case.scores.num_experts} experts: "
        "ids after a load balancer's map with replicas; audit more tokens of one run to find the map",
        {"largest": int(high.max()), "distinct_beyond": len(high)},
    )


# In the order in which they are asked; the first one that answers gives the name.
PATTERNS: tuple[Detector, ...] = (physical_range, weight_version, draft_model, stale_rows, foreign_rows)
