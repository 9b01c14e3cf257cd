"""One audit in progress: the wrong sets, and the question that every fault detector asks of them.

T rows, L MoE layers, E experts, K chosen, N wrong sets (a sample of them when there are very many). numpy only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tracklayer.audit.compare import Comparison, Observed, compare
from tracklayer.audit.scores import TIE_SIGMAS, Array, ReferenceScores

MAX_SETS = 20_000  # wrong sets that hypotheses are tried on
SEED = 0
MIN_ROWS = 8  # fewer wrong rows do not tell a shift or a map from chance


@dataclass(frozen=True)
class Finding:
    """A fault by name, and the sentence that is printed.

    `explained` is the share of the wrong sets that it accounts for; from `enough` on it is named.
    """

    fault: str
    explained: float
    sentence: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    enough: float = 0.8


class Case:
    """Observed routes, the reference, and what may explain a difference.

    others    reference scores of other requests that the engine served
    versions  reference scores of the same tokens under other weights, by name
    """

    def __init__(
        self,
        observed: Observed,
        scores: ReferenceScores,
        *,
        others: Sequence[ReferenceScores] = (),
        versions: Sequence[ReferenceScores] = (),
        tie_sigmas: float = TIE_SIGMAS,
    ) -> None:
        self.observed, self.scores, self.others, self.versions = observed, scores, others, versions
        self.tie_sigmas = tie_sigmas
        self.comparison: Comparison = compare(observed, scores, tie_sigmas)
        self.ids_TLK = observed.ids_TLK.astype(np.int64)
        self.start = observed.start
        self.wrong_TL = self.comparison.wrong_TL
        t_N, l_N = np.nonzero(self.wrong_TL)
        self.num_wrong = len(t_N)
        if self.num_wrong > MAX_SETS:
            pick = np.sort(np.random.default_rng(SEED).choice(self.num_wrong, MAX_SETS, replace=False))
            t_N, l_N = t_N[pick], l_N[pick]
        self.t_N, self.l_N = t_N, l_N
        self.ids_NK = self.ids_TLK[t_N, l_N]
        self.row_share_T = self.wrong_TL.mean(1)
        self.wrong_rows = np.flatnonzero(self.wrong_TL.any(1))

    @property
    def rows(self) -> int:
        return int(self.ids_TLK.shape[0])

    @property
    def layers(self) -> int:
        return int(self.ids_TLK.shape[1])

    def fits(self, ids_NK: Array, t_N: Array, l_N: Array, scores: ReferenceScores | None = None) -> Array:
        """bool [N]: the sets are the reference's for row t and column l, up to near ties; False outside."""
        scores = scores or self.scores
        position_N = t_N + self.start
        inside_N = (position_N >= 0) & (position_N < len(scores)) & (l_N >= 0) & (l_N < len(scores.layer_ids))
        result = np.zeros(len(ids_NK), bool)
        if inside_N.any():
            deficit = scores.deficit(ids_NK[inside_N], position_N[inside_N], l_N[inside_N])
            result[inside_N] = deficit <= self.tie_sigmas
        return result

    def mask_of(self, mask_TL: Array) -> float:
        """Share of the wrong sets inside a mask."""
        return float(mask_TL[self.t_N, self.l_N].mean()) if len(self.t_N) else 0.0

    def where(self, mask_TL: Array | None = None) -> str:
        """Where the wrong sets (or those of a mask) lie, in words: positions and layers."""
        mask_TL = self.wrong_TL if mask_TL is None else mask_TL
        rows, columns = np.flatnonzero(mask_TL.any(1)), np.flatnonzero(mask_TL.any(0))
        layer_ids = [self.scores.layer_ids[c] for c in columns]
        every = len(columns) == self.layers
        layers = "all layers" if every else f"layer{'s' if len(layer_ids) > 1 else ''} {spans(layer_ids)}"
        if len(rows) == self.rows:
            return f"all positions, {layers}"
        name = "position" if len(rows) == 1 else "positions"
        return f"{name} {spans((rows + self.start).tolist())}, {layers}"


# Gives what it accounts for of the wrong sets, None when nothing.
Detector = Callable[[Case], Finding | None]


def pick_evenly(n: int, most: int) -> Array:
    """At most `most` indices below n, evenly spread."""
    return np.unique(np.linspace(0, n - 1, min(n, most)).astype(int)) if n else np.empty(0, int)


def spans(ids: Sequence[int], limit: int = 6) -> str:
    """0-3, 5, 7-9 for 0 1 2 3 5 7 8 9; the first `limit` spans and how many more numbers."""
    found: list[list[int]] = []
    for i in ids:
        if found and i == found[-1][1] + 1:
            found[-1][1] = i
        else:
            found.append([i, i])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found[:limit])
    rest = sum(b - a + 1 for a, b in found[limit:])
    return text + (f" and {rest} more" if rest else "")
