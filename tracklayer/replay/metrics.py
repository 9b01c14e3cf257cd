"""How far training is from the rollout: in log-probabilities and in routes. numpy; torch tensors are taken too.

T tokens, L MoE layers, K chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tracklayer.errors import UserError
from tracklayer.routes.ids import Array
from tracklayer.routes.record import Routes


@dataclass(frozen=True, slots=True)
class LogprobMismatch:
    """Over the tokens counted, sampled by the rollout; r = probability in training / probability in the rollout.

    k1              mean of -log r: the plain estimate of KL(rollout || training), may be negative
    k3              mean of r - 1 - log r: the same expectation, never negative, less noisy
    extreme_share   share of tokens with r above 2 or below 1/2
    largest_ratio   largest of r and 1/r
    """

    tokens: int
    k1: float
    k3: float
    extreme_share: float
    largest_ratio: float


@dataclass(frozen=True, slots=True)
class RouteMismatch:
    """Over the (token, layer) rows that both sides recorded; a row differs when its set of experts does.

    router_share     share of rows that differ
    token_share      share of tokens with at least one differing row
    layers_per_token mean number of differing layers of a token
    experts_share    share of the single experts that the other side did not choose
    missing_rows     rows that one side lacks, not counted above
    """

    tokens: int
    rows: int
    router_share: float
    token_share: float
    layers_per_token: float
    experts_share: float
    missing_rows: int


def _array(values: Any) -> Array:
    """A float64 numpy array of any array-like; a torch tensor is brought to the host."""
    if hasattr(values, "detach"):
        values = values.detach().float().cpu().numpy()
    return np.asarray(values, np.float64).reshape(-1)


def logprob_mismatch(rollout: Any, training: Any, mask: Any = None, *, threshold: float = 2.0) -> LogprobMismatch:
    """Compare log-probabilities of the same sampled tokens, arrays of one shape; NaN in either is not counted.

    mask: bool of that shape, the tokens to count (the response). Raises UserError for unequal shapes, no token to
    count, or a log-probability above 0 (by more than rounding).
    """
    q, p = _array(rollout), _array(training)
    if q.shape != p.shape:
        raise UserError(f"{q.size} rollout and {p.size} training log-probabilities can not be compared")
    counted = ~(np.isnan(q) | np.isnan(p))
    if mask is not None:
        chosen = _array(mask)
        if chosen.shape != q.shape:
            raise UserError(f"a mask of {chosen.size} for {q.size} tokens")
        counted &= chosen != 0
    if not counted.any():
        raise UserError("there is no token to compare")
    q, p = q[counted], p[counted]
    if max(q.max(), p.max()) > 1e-3:
        raise UserError(f"a log-probability can not be {max(q.max(), p.max()):.6g}: probabilities were given")
    with np.errstate(over="ignore", invalid="ignore"):
        log_r = np.where(p == q, 0.0, p - q)  # both -inf: equal
        k3 = np.expm1(log_r) - log_r
        size = np.exp(np.abs(log_r))
    return LogprobMismatch(
        tokens=int(counted.sum()),
        k1=float(-log_r.mean()),
        k3=float(k3.mean()),
        extreme_share=float((size > threshold).mean()),
        largest_ratio=float(size.max()),
    )


def route_mismatch(rollout: Routes, training: Routes) -> RouteMismatch:
    """Compare two routes of one sequence where their positions overlap.

    Raises UserError for routes of different models or without a position in common.
    """
    for name in ("layer_ids", "num_experts", "top_k", "layer_top_k"):
        mine, theirs = getattr(rollout, name), getattr(training, name)
        if mine != theirs:
            raise UserError(f"routes of different models can not be compared: {name} {mine} and {theirs}")
    start, stop = max(rollout.start, training.start), min(rollout.stop, training.stop)
    if stop <= start:
        raise UserError(f"{rollout!r} and {training!r} have no position in common")
    a, b = rollout.tokens(start, stop), training.tokens(start, stop)
    both_TL = ~(a.missing_TL | b.missing_TL)
    if not both_TL.any():
        raise UserError("no row was recorded on both sides")
    shared_TL, chosen_TL = np.zeros(both_TL.shape, np.int64), np.broadcast_to(a.top_k_L, both_TL.shape)
    for k in range(a.top_k):
        shared_TL += (a.experts_TLK[..., k : k + 1] == b.experts_TLK).any(-1) & a.used_LK[:, k]
    differ_TL = (shared_TL < chosen_TL) & both_TL
    counted_T = both_TL.any(1)
    return RouteMismatch(
        tokens=int(counted_T.sum()),
        rows=int(both_TL.sum()),
        router_share=float(differ_TL.sum() / both_TL.sum()),
        token_share=float(differ_TL.any(1).sum() / counted_T.sum()),
        layers_per_token=float(differ_TL.sum() / counted_T.sum()),
        experts_share=float(1 - shared_TL[both_TL].sum() / chosen_TL[both_TL].sum()),
        missing_rows=int((~both_TL).sum()),
    )
