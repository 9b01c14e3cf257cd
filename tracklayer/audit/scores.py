"""What the audit compares routes with: the reference model's choice scores, and how far noise may move them.

T tokens, L MoE layers, E experts (zero experts included), K chosen, N sets taken from anywhere in [T, L]. numpy only.

The *deficit* of a set of K experts is how much the lowest of them lies below the lowest score that the reference
chooses: 0 when the set is the reference's own, small for a near tie, large for a wrong route.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tracklayer.errors import UserError

Array = npt.NDArray[Any]

# Relative error of a router's logits when the forward runs in this type: its rounding step, times what some tens of
# layers add up to (measured: docs/audit.md). float32 leaves room for another order of summation only.
NOISE = {"bfloat16": 4 * 2.0**-8, "float16": 4 * 2.0**-11, "float32": 64 * 2.0**-24}
# A difference of two noisy scores up to this many standard deviations is a near tie.
TIE_SIGMAS = 8.0
BLOCK_SETS = 1 << 15  # sets scored at a time: their scores are copied


@dataclass(frozen=True)
class GroupRule:
    """Group-limited choice: experts in `num_groups` equal contiguous groups, of which the best `keep` stay."""

    num_groups: int
    keep: int
    score: Literal["max", "top2"] = "top2"

    def scores(self, choice_NE: Array) -> Array:
        """The score of each group, [N, G]."""
        grouped_NGM = choice_NE.reshape(len(choice_NE), self.num_groups, -1)
        if self.score == "max":
            return grouped_NGM.max(-1)
        return np.partition(grouped_NGM, -2, axis=-1)[..., -2:].sum(-1)


@dataclass(frozen=True, eq=False)
class ReferenceScores:
    """The reference's scores of one sequence, for positions 0 .. T-1 as input.

    choice_TLE  float32: the score that the choice is made by (bias included, groups not yet masked)
    noise_TL    float32: standard deviation that the run's number type gives to a choice score near the threshold
    layer_ids   decoder layer of each of the L columns
    top_k       K
    groups      the group limit, if the family has one
    name        what the reference is, for the report
    """

    choice_TLE: Array
    noise_TL: Array
    layer_ids: tuple[int, ...]
    top_k: int
    groups: GroupRule | None = None
    name: str = "reference"
    _cache: dict[str, Array] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        shape = self.choice_TLE.shape
        if len(shape) != 3 or self.noise_TL.shape != shape[:2] or len(self.layer_ids) != shape[1]:
            raise UserError(
                f"reference scores {list(shape)}, noise {list(self.noise_TL.shape)} and {len(self.layer_ids)} layers "
                "do not fit: expected [tokens, layers, experts], [tokens, layers] and one id per layer"
            )
        if not 1 <= self.top_k <= shape[2]:
            raise UserError(f"top_k {self.top_k} of {shape[2]} experts is impossible")
        if not np.isfinite(self.choice_TLE).all():
            t, c, e = (int(i) for i in np.argwhere(~np.isfinite(self.choice_TLE))[0])
            raise UserError(
                f"the reference's score of token {t} layer {self.layer_ids[c]} expert {e} is not finite: "
                "the reference pass itself is broken (wrong weights or number type?)"
            )

    @property
    def num_experts(self) -> int:
        return int(self.choice_TLE.shape[2])

    def __len__(self) -> int:
        return int(self.choice_TLE.shape[0])

    @property
    def ids_TLK(self) -> Array:
        """The reference's own choice, int32, best first; of scores equal at the threshold any may be taken."""
        if "ids" not in self._cache:
            t_N, l_N = (i.reshape(-1) for i in np.indices(self.choice_TLE.shape[:2]))
            blocks = [slice(i, i + BLOCK_SETS) for i in range(0, len(t_N), BLOCK_SETS)]
            parts = [top_ids(self.allowed(t_N[b], l_N[b]), self.top_k) for b in blocks]
            self._cache["ids"] = np.concatenate(parts).reshape(*self.choice_TLE.shape[:2], self.top_k)
        return self._cache["ids"]

    def allowed(self, t_N: Array, l_N: Array) -> Array:
        """Choice scores [N, E] at (t, l), -inf in the groups that the group limit drops."""
        choice_NE = self.choice_TLE[t_N, l_N]
        if self.groups is None:
            return choice_NE
        keep_NG = _best(self.groups.scores(choice_NE), self.groups.keep)
        width = self.num_experts // self.groups.num_groups
        return np.where(np.repeat(keep_NG, width, 1), choice_NE, -np.inf)

    @property
    def kth_TL(self) -> Array:
        """The lowest score that the reference chooses."""
        if "kth" not in self._cache:
            self._cache["kth"] = np.take_along_axis(self.choice_TLE, self.ids_TLK, -1).min(-1)
        return self._cache["kth"]

    def deficit(self, ids_NK: Array, t_N: Array, l_N: Array) -> Array:
        """How far each set lies below the reference's choice at (t, l), in standard deviations of the noise; [N].

        inf for an id that is out of range or given twice. Sets may be narrower than K: then each id is judged.
        """
        blocks = range(0, len(ids_NK), BLOCK_SETS)
        parts = [self._deficit(*(x[i : i + BLOCK_SETS] for x in (ids_NK, t_N, l_N))) for i in blocks]
        return np.concatenate(parts) if parts else np.empty(0)

    def _deficit(self, ids_NK: Array, t_N: Array, l_N: Array) -> Array:
        choice_NE = self.choice_TLE[t_N, l_N]
        valid_NK = (ids_NK >= 0) & (ids_NK < self.num_experts)
        safe_NK = np.where(valid_NK, ids_NK, 0)
        score_NK = np.where(valid_NK, np.take_along_axis(choice_NE, safe_NK, 1), -np.inf)
        low_N = score_NK.min(-1)
        short_N = np.maximum(self.kth_TL[t_N, l_N] - low_N, 0.0)
        if self.groups:
            short_N = np.where(valid_NK.all(-1), self._group_deficit(choice_NE, safe_NK, low_N), np.inf)
        sorted_NK = np.sort(ids_NK, -1)
        repeated_N = (sorted_NK[:, 1:] == sorted_NK[:, :-1]).any(-1)
        return np.where(repeated_N, np.inf, short_N / np.maximum(self.noise_TL[t_N, l_N], 1e-30))

    def _group_deficit(self, choice_NE: Array, ids_NK: Array, low_N: Array) -> Array:
        """The larger of two shortfalls: of the set's groups among groups, of its ids among the groups it implies."""
        rule = self.groups
        assert rule is not None
        group_NG = rule.scores(choice_NE)
        width = choice_NE.shape[1] // rule.num_groups
        used_NG = np.zeros(group_NG.shape, bool)
        np.put_along_axis(used_NG, ids_NK // width, True, 1)
        mth_N = np.sort(group_NG, -1)[:, -rule.keep]
        worst_used_N = np.where(used_NG, group_NG, np.inf).min(-1)
        too_many_N = used_NG.sum(-1) > rule.keep
        # The groups that the set implies: its own, filled up with the best of the others.
        kept_NG = _best(np.where(used_NG, np.inf, group_NG), rule.keep)
        inside_NE = np.where(np.repeat(kept_NG, width, 1), choice_NE, -np.inf)
        kth_N = np.partition(inside_NE, -self.top_k, axis=-1)[:, -self.top_k]
        short_N = np.maximum(np.maximum(mth_N - worst_used_N, kth_N - low_N), 0.0)
        return np.where(too_many_N, np.inf, short_N)


def _best(score_NG: Array, keep: int) -> Array:
    """bool [N, G]: the `keep` best of each row, ties to the lower index."""
    order = np.argsort(-score_NG, axis=-1, kind="stable")[:, :keep]
    mask = np.zeros(score_NG.shape, bool)
    np.put_along_axis(mask, order, True, 1)
    return mask


def top_ids(score_E: Array, k: int) -> Array:
    """int32 [..., k]: the k best along the last axis, best first; equal scores at the threshold in any order."""
    ids = np.argpartition(score_E, -k, axis=-1)[..., -k:]
    order = np.argsort(-np.take_along_axis(score_E, ids, -1), axis=-1, kind="stable")
    return np.take_along_axis(ids, order, -1).astype(np.int32)


def noise_of(logits_TLE: Array, slope_TL: Array | float, dtype: str, factor: float = 1.0) -> Array:
    """float32 [T, L]: the noise of choice scores when the forward runs in `dtype`.

    A forward's relative error spreads over the experts like the logits themselves, so a logit's error is that error
    times the standard deviation of the token's logits; `slope_TL` (d choice / d logit near the threshold) turns it
    into choice scores. Raises UserError for an unknown type.
    """
    if dtype not in NOISE:
        raise UserError(f"noise of {dtype!r} is not known; known: {', '.join(NOISE)}")
    if not factor > 0:
        raise UserError(f"the noise factor must be positive, got {factor!r}")
    return (factor * NOISE[dtype] * logits_TLE.std(-1) * slope_TL).astype(np.float32)
