"""The referee: a plain Hugging Face forward of the same checkpoint in float32, and what it says of returned routes.

T tokens, L MoE layers, E routed experts, K chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tracklayer.routes.record import Routes

TIE = 1e-5
# Nats by which a greedy token may fall short of the float32 model's best one. 16 bits round a logit of 16 by 0.06.
NEAR = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one sample's routes are worth.

    sets       (token, layer) sets compared
    differing  sets in which the plain forward chose other experts
    ties       sets that differ although the forward followed the returned routes before, by at most TIE in router score
    wrong      the same, by more than TIE
    worst_gap  the largest such difference in score (0.0 when none differs)
    """

    sets: int
    differing: int
    ties: int
    wrong: int
    worst_gap: float


def compare(model: nn.Module, token_ids: list[int], routes: Routes) -> Verdict:
    """Compare `routes` (start 0) with the experts that `model` chooses for the same tokens.

    Sets are compared with a plain forward. Where one differs, the gap is read from a second forward that follows the
    returned routes: after one tie, the hidden states of the layers behind it are not the same any more.
    """
    given_TLK = routes.to(np.int64)
    own_TLK, _ = forward(model, token_ids)
    sets, differing = given_TLK[..., 0].size, int((~same_sets(own_TLK, given_TLK)).sum())
    if not differing:
        return Verdict(sets=sets, differing=0, ties=0, wrong=0, worst_gap=0.0)
    own_TLK, scores_TLE = forward(model, token_ids, follow_TLK=given_TLK)
    gap_N = gaps(given_TLK, scores_TLE)[~same_sets(own_TLK, given_TLK)]
    ties = int((gap_N <= TIE).sum())
    return Verdict(sets=sets, differing=differing, ties=ties, wrong=len(gap_N) - ties, worst_gap=float(gap_N.max()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a greedy answer is worth: tokens, those that are not the model's best one, and the worst shortfall in nats.

    With none differing, the model's own greedy answer is the same, token by token.
    """

    tokens: int
    differing: int
    worst_gap: float


@torch.no_grad()
def answer(model: nn.Module, input_ids: list[int], output_ids: list[int]) -> Answer:
    """Look each token of `output_ids` up in what `model` says of the tokens before it."""
    if not output_ids:
        return Answer(tokens=0, differing=0, worst_gap=0.0)
    logits_TV = model(torch.tensor([[*input_ids, *output_ids]])).logits[0, len(input_ids) - 1 : -1].float()
    chosen_T = logits_TV.gather(1, torch.tensor(output_ids)[:, None])[:, 0]
    gap_T = logits_TV.amax(-1) - chosen_T
    return Answer(tokens=len(output_ids), differing=int((gap_T > 0).sum()), worst_gap=float(gap_T.max()))


def same_sets(one_TLK: np.ndarray, other_TLK: np.ndarray) -> np.ndarray:
    """bool [T, L]: equal as sets."""
    return (np.sort(one_TLK, -1) == np.sort(other_TLK, -1)).all(-1)


def gaps(given_TLK: np.ndarray, scores_TLE: np.ndarray) -> np.ndarray:
    """float32 [T, L]: the best score that was left out less the worst that was taken."""
    left_TLE = scores_TLE.copy()
    np.put_along_axis(left_TLE, given_TLK, -np.inf, -1)
    return left_TLE.max(-1) - np.take_along_axis(scores_TLE, given_TLK, -1).min(-1)


@torch.no_grad()
def forward(
    model: nn.Module, token_ids: list[int], follow_TLK: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """One forward of a Qwen2MoeForCausalLM: the experts that its routers choose and the scores of all.

    With `follow_TLK` the experts given there are used instead (weights from the live scores), in every layer.
    Returns ids int64 [T, L, K] and scores float32 [T, L, E].
    """
    seen: list[tuple[Tensor, Tensor]] = []
    with _watch(model, seen, follow_TLK):
        model(torch.tensor([token_ids]))
    ids = torch.stack([ids_TK for ids_TK, _ in seen], 1)
    scores = torch.stack([scores_TE for _, scores_TE in seen], 1)
    return ids.numpy(), scores.numpy()


@contextmanager
def _watch(model: nn.Module, seen: list[tuple[Tensor, Tensor]], follow_TLK: np.ndarray | None) -> Iterator[None]:
    def hook(gate: Any, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...] | None:
        logits_TE, _, ids_TK = output
        scores_TE = logits_TE.softmax(-1)
        seen.append((ids_TK, scores_TE))
        if follow_TLK is None:
            return None
        given_TK = torch.from_numpy(follow_TLK[:, len(seen) - 1])
        weights_TK = scores_TE.gather(1, given_TK)
        if gate.norm_topk_prob:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return logits_TE, weights_TK, given_TK

    handles = [layer.mlp.gate.register_forward_hook(hook) for layer in model.model.layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
