"""The recurrences of linear attention, in torch: chunk by chunk over whole sequences, and the same from a given state.

B sequences, M tokens each, H heads, D key width, E value width, C tokens of a chunk. All in float32; `state_BHDE` is
what was before the first token, and each function returns it as it is after the last. A token that must change nothing
(padding) has decay 0 in log_decay and a key of 0 (beta 0 in the delta rule).
"""

from __future__ import annotations

import torch
from torch import Tensor

DELTA_CHUNK, DECAY_CHUNK, SCAN_CHUNK = 64, 16, 64


def delta_rule(
    q_BMHD: Tensor, k_BMHD: Tensor, v_BMHE: Tensor, log_decay_BMHG: Tensor, beta_BMH: Tensor, state_BHDE: Tensor
) -> tuple[Tensor, Tensor]:
    """S = exp(log_decay) S;  S += k (beta (v - S^T k))^T;  o = S^T q. G is 1 (one decay a head) or D (one a channel).

    Returns (o [B, M, H, E], the last state). Within a chunk the corrections u_t = beta_t (v_t - S_t^T k_t) solve a unit
    lower triangular system, because each depends on the ones before it alone.
    """
    chunk = DELTA_CHUNK if log_decay_BMHG.shape[-1] == 1 else DECAY_CHUNK
    pieces = []
    for start in range(0, q_BMHD.shape[1], chunk):
        part = slice(start, start + chunk)
        q, k, v, decay = (x[:, part].transpose(1, 2) for x in (q_BMHD, k_BMHD, v_BMHE, log_decay_BMHG))
        beta = beta_BMH[:, part].transpose(1, 2)[..., None]
        since = _since(decay)
        before, last = since.float().exp(), since[:, :, -1:]
        right = beta * (v - (k * before) @ state_BHDE)
        if q.shape[2] > 1:
            lower = beta * _products(k, k, since).tril(-1)
            right = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
        pieces.append((q * before) @ state_BHDE + _products(q, k, since).tril() @ right)
        kept = last.float().exp().transpose(2, 3) * state_BHDE
        state_BHDE = kept + (k * (last - since).float().exp()).transpose(2, 3) @ right
    return torch.cat(pieces, 2).transpose(1, 2), state_BHDE


def linear_attention(
    q_BMHD: Tensor, k_BMHD: Tensor, v_BMHE: Tensor, log_decay_BMH: Tensor, state_BHDE: Tensor
) -> tuple[Tensor, Tensor]:
    """S = exp(log_decay) S + k v^T;  o = S^T q. Returns (o [B, M, H, E], the last state)."""
    pieces = []
    for start in range(0, q_BMHD.shape[1], DELTA_CHUNK):
        part = slice(start, start + DELTA_CHUNK)
        q, k, v = (x[:, part].transpose(1, 2) for x in (q_BMHD, k_BMHD, v_BMHE))
        since = _since(log_decay_BMH[:, part].transpose(1, 2)[..., None])
        last = since[:, :, -1:]
        pieces.append((q * since.float().exp()) @ state_BHDE + _products(q, k, since).tril() @ v)
        state_BHDE = last.float().exp() * state_BHDE + (k * (last - since).float().exp()).transpose(2, 3) @ v
    return torch.cat(pieces, 2).transpose(1, 2), state_BHDE


def _since(log_decay_BHCG: Tensor) -> Tensor:
    """Log of the decay from the chunk's beginning to each token; float64, because differences of sums are taken."""
    return log_decay_BHCG.double().cumsum(2)


def _products(a_BHCD: Tensor, b_BHCD: Tensor, since_BHCG: Tensor) -> Tensor:
    """a_t . b_s, decayed from s to t: [B, H, C, C]. Meaningful for s <= t; finite everywhere."""
    if since_BHCG.shape[-1] == 1:
        decay = (since_BHCG - since_BHCG.transpose(2, 3)).float().clamp(max=0.0).exp()
        return (a_BHCD @ b_BHCD.transpose(2, 3)) * decay
    decay = (since_BHCG[:, :, :, None] - since_BHCG[:, :, None]).float().clamp(max=0.0).exp()
    return torch.einsum("bhtd,bhtsd,bhsd->bhts", a_BHCD, decay, b_BHCD)


def channel_scan(decay_BMXN: Tensor, add_BMXN: Tensor, state_BXN: Tensor) -> Tensor:
    """h_t = decay_t * h_{t-1} + add_t elementwise (decay as it is, not its log): all states [B, M, X, N].

    By doubling: after step n every place holds the sum over its last 2^n tokens.
    """
    decay, add = decay_BMXN.clone(), add_BMXN.clone()
    add[:, 0] += decay[:, 0] * state_BXN
    reach = 1
    while reach < add.shape[1]:
        further = add[:, reach:] + decay[:, reach:] * add[:, :-reach]
        decay = torch.cat([decay[:, :reach], decay[:, reach:] * decay[:, :-reach]], 1)
        add = torch.cat([add[:, :reach], further], 1)
        reach *= 2
    return add
