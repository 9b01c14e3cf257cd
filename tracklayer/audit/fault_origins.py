"""Faults of rows that would be right elsewhere: at another token or layer, by other ids, of another request or weights.

T rows, L MoE layers, E experts, K chosen, N wrong sets, P ids that occur in the routes. scipy for the assignment.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment

from tracklayer.audit.case import MIN_ROWS, Case, Finding, pick_evenly, spans
from tracklayer.audit.scores import Array

SAMPLE = 256  # tokens or sets that a hypothesis is screened on


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


def _mapping(pairs: dict[int, int], limit: int = 6) -> str:
    text = ", ".join(f"{c} holds {o}" for c, o in list(pairs.items())[:limit])
    return text + (f" and {len(pairs) - limit} more" if len(pairs) > limit else "")
