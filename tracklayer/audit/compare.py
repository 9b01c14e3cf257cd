"""Set by set: recorded routes against the reference. Equal, near tie, wrong, or missing. numpy only.

T rows (tokens), L MoE layers, K chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tracklayer.audit.scores import TIE_SIGMAS, Array, ReferenceScores
from tracklayer.errors import UserError


@dataclass(frozen=True, eq=False)
class Observed:
    """Routes as an engine gave them, not trusted: ids may be anything.

    ids_TLK   int32; wider than the model's K when the engine added columns; a row of -1 is marked as missing
    start     position of the first row
    name      what the rows are, for the report
    """

    ids_TLK: Array
    start: int = 0
    name: str = "routes"


@dataclass(frozen=True, eq=False)
class Comparison:
    """bool [T, L] masks that cover every set exactly once, and margins.

    sigmas_TL float64: the deficit in standard deviations of the noise (0 where equal, inf for an impossible set,
    nan where missing).
    """

    equal_TL: Array
    tie_TL: Array
    wrong_TL: Array
    missing_TL: Array
    sigmas_TL: Array

    @property
    def sums(self) -> dict[str, Any]:
        """Counts and shares over the sets that are not missing."""
        present = int((~self.missing_TL).sum())
        counts = {name: int(getattr(self, f"{name}_TL").sum()) for name in ("equal", "tie", "wrong", "missing")}
        shares = {f"{name}_share": counts[name] / max(present, 1) for name in ("equal", "tie", "wrong")}
        return {"sets": int(self.equal_TL.size), **counts, **shares}


def compare(observed: Observed, scores: ReferenceScores, tie_sigmas: float = TIE_SIGMAS) -> Comparison:
    """Judge each (token, layer) set; sets, not orders, are compared.

    Raises UserError when layers, width or positions do not fit the reference.
    """
    ids_TLK = observed.ids_TLK
    if ids_TLK.ndim != 3 or ids_TLK.dtype.kind not in "iu":
        raise UserError(f"routes must be integers [tokens, layers, top_k], got {ids_TLK.dtype} {list(ids_TLK.shape)}")
    rows, layers, width = ids_TLK.shape
    if layers != len(scores.layer_ids):
        raise UserError(f"routes have {layers} layers, the model routes in {len(scores.layer_ids)}")
    if width < scores.top_k:
        raise UserError(
            f"routes have {width} experts per row, the model chooses {scores.top_k}: another model's routes?"
        )
    if not rows or observed.start < 0 or observed.start + rows > len(scores):
        raise UserError(
            f"rows of positions {observed.start}..{observed.start + rows} do not lie in the {len(scores)} tokens given"
        )
    missing_TL = (ids_TLK == -1).all(-1)
    t_N, l_N = (i.reshape(-1) for i in np.indices((rows, layers)))
    sigmas_TL = scores.deficit(ids_TLK.reshape(-1, width), t_N + observed.start, l_N).reshape(rows, layers)
    if width > scores.top_k:
        sigmas_TL = np.full((rows, layers), np.inf)  # more experts than the model chooses: no set can be right
    own_TLK = np.sort(scores.ids_TLK[observed.start : observed.start + rows], -1)
    equal_TL = ~missing_TL & np.isfinite(sigmas_TL)
    if width == scores.top_k:
        equal_TL &= (np.sort(ids_TLK, -1) == own_TLK).all(-1)
    sigmas_TL = np.where(missing_TL, np.nan, np.where(equal_TL, 0.0, sigmas_TL))
    tie_TL = ~missing_TL & ~equal_TL & (sigmas_TL <= tie_sigmas)
    return Comparison(equal_TL, tie_TL, ~(missing_TL | equal_TL | tie_TL), missing_TL, sigmas_TL)
