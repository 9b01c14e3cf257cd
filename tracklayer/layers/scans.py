"""The recurrences of linear attention, in torch: chunk by chunk over whole sequences, and the same from a given state.

B sequences, M tokens each, H heads, D key width, E value width, C tokens of a chunk. All in float32; `state_BHDE` is
what was before the first token, and each function returns it as it is after the last. A token that must change nothing
(padding) has decay 0 in log_decay and a key of 0 (beta 0 in the delta rule).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

HEAD_CHUNK, CHANNEL_CHUNK, SCAN_CHUNK = 64, 16, 64  # tokens of a chunk: one decay a head, one a channel, elementwise
SLAB = 16  # chunks that are prepared at once: fewer launches, more memory


def delta_rule(
    q_BMHD: Tensor, k_BMHD: Tensor, v_BMHE: Tensor, log_decay_BMHG: Tensor, beta_BMH: Tensor, state_BHDE: Tensor
) -> tuple[Tensor, Tensor]:
    """S = exp(log_decay) S;  S += k (beta (v - S^T k))^T;  o = S^T q. G is 1 (one decay a head) or D (one a channel).

    Returns (o [B, M, H, E], the last state). Within a chunk the corrections u_t = beta_t (v_t - S_t^T k_t) solve a unit
    lower triangular system, because each depends on the ones before it alone; they are linear in the state before the
    chunk, so the systems of many chunks are solved at once.
    """
    chunk = HEAD_CHUNK if log_decay_BMHG.shape[-1] == 1 else CHANNEL_CHUNK
    pieces = []
    for q, k, v, decay, beta in _slabs(chunk, q_BMHD, k_BMHD, v_BMHE, log_decay_BMHG, beta_BMH[..., None]):
        since = _since(decay)
        right = beta * torch.cat([v, k * since.float().exp()], -1)
        if q.shape[3] > 1:
            lower = beta * _products(k, k, since).tril(-1)
            right = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
        given, of_state = right.split([v.shape[-1], k.shape[-1]], -1)
        piece, state_BHDE = _through_chunks(q, k, given, of_state, since, state_BHDE)
        pieces.append(piece)
    return torch.cat(pieces, 2)[:, :, : q_BMHD.shape[1]].transpose(1, 2), state_BHDE


def linear_attention(
    q_BMHD: Tensor, k_BMHD: Tensor, v_BMHE: Tensor, log_decay_BMH: Tensor, state_BHDE: Tensor
) -> tuple[Tensor, Tensor]:
    """S = exp(log_decay) S + k v^T;  o = S^T q. Returns (o [B, M, H, E], the last state)."""
    pieces = []
    for q, k, v, decay in _slabs(HEAD_CHUNK, q_BMHD, k_BMHD, v_BMHE, log_decay_BMH[..., None]):
        piece, state_BHDE = _through_chunks(q, k, v, None, _since(decay), state_BHDE)
        pieces.append(piece)
    return torch.cat(pieces, 2)[:, :, : q_BMHD.shape[1]].transpose(1, 2), state_BHDE


def _slabs(chunk: int, *tensors_BMHX: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """SLAB chunks of each tensor at a time, [B, H, chunks, C, X], the last chunk filled up with zeros."""
    tokens = tensors_BMHX[0].shape[1]
    for start in range(0, tokens, chunk * SLAB):
        count = min(chunk * SLAB, tokens - start)
        size = min(chunk, count)
        padding = -count % size
        parts = (x[:, start : start + count].transpose(1, 2) for x in tensors_BMHX)
        yield tuple(F.pad(x, (0, 0, 0, padding)).unflatten(2, (-1, size)) for x in parts)


def _through_chunks(
    q: Tensor, k: Tensor, given: Tensor, of_state: Tensor | None, since: Tensor, state_BHDE: Tensor
) -> tuple[Tensor, Tensor]:
    """The state through chunks that differ in what they add to it: given - of_state S. Returns ([B, H, C.., E], state).

    All [B, H, chunks, C, X]; since float64, the log of the decay from each chunk's beginning.
    """
    last = since[:, :, :, -1:]
    within, first = _products(q, k, since).tril(), q * since.float().exp()
    keep, adds = last.float().exp().transpose(3, 4), (k * (last - since).float().exp()).transpose(3, 4)
    pieces = []
    for i in range(q.shape[2]):
        u = given[:, :, i] if of_state is None else given[:, :, i] - of_state[:, :, i] @ state_BHDE
        pieces.append(first[:, :, i] @ state_BHDE + within[:, :, i] @ u)
        state_BHDE = keep[:, :, i] * state_BHDE + adds[:, :, i] @ u
    return torch.cat(pieces, 2), state_BHDE


def _since(log_decay: Tensor) -> Tensor:
    """Log of the decay from the chunk's beginning to each token; float64, because differences of sums are taken."""
    return log_decay.double().cumsum(3)


def _products(a: Tensor, b: Tensor, since: Tensor) -> Tensor:
    """a_t . b_s, decayed from s to t: [B, H, chunks, C, C]. Meaningful for s <= t; finite everywhere."""
    if since.shape[-1] == 1:
        return (a @ b.mT) * (since - since.mT).float().clamp(max=0.0).exp()
    decay = (since[..., :, None, :] - since[..., None, :, :]).float().clamp(max=0.0).exp()
    return torch.einsum("bhntd,bhntsd,bhnsd->bhnts", a, decay, b)


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
