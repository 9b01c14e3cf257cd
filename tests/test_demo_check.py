"""The referee: it finds planted wrong routes, lets ties pass, and follows routes that are given to it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tracklayer.demo import check
from tracklayer.routes.record import Routes

transformers = pytest.importorskip("transformers")

TOKENS = list(range(3, 40))


@pytest.fixture(scope="module", params=[True, False], ids=["renormalised", "plain"])
def model(request):
    torch.manual_seed(1)
    config = transformers.Qwen2MoeConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=request.param,
        initializer_range=0.3,
    )
    return transformers.Qwen2MoeForCausalLM(config).float().eval()


def routes_of(ids_TLK: np.ndarray) -> Routes:
    return Routes(ids_TLK, range(ids_TLK.shape[1]), 8)


def by_hand(model, tokens: list[int]) -> np.ndarray:
    """Own ids from the model's own router logits, an output that check.py does not use."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    return torch.stack([layer.topk(3).indices for layer in logits], 1).numpy()


def run_with(model, plant) -> np.ndarray:
    """Routes of a run in which `plant` changed some choices and every later layer chose by what it then saw."""
    ids_TLK = by_hand(model, TOKENS).copy()
    for _ in range(ids_TLK.shape[1] + 1):
        plant(ids_TLK)
        ids_TLK = check.forward(model, TOKENS, follow_TLK=ids_TLK)[0]
    plant(ids_TLK)
    return ids_TLK


def test_the_models_own_routes_agree_everywhere(model):
    own_TLK = by_hand(model, TOKENS)
    shuffled_TLK = own_TLK[..., ::-1].copy()  # sets, not orders
    for ids_TLK in (own_TLK, shuffled_TLK):
        verdict = check.compare(model, TOKENS, routes_of(ids_TLK))
        assert verdict == check.Verdict(sets=37 * 3, differing=0, ties=0, wrong=0, worst_gap=0.0)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_one_wrong_set_is_found_and_is_the_only_one(model, layer):
    own = set(by_hand(model, TOKENS)[20, layer].tolist())
    outside = min(set(range(8)) - own)

    def plant(ids_TLK):
        ids_TLK[20, layer] = [outside, *sorted(own)[:2]]

    verdict = check.compare(model, TOKENS, routes_of(run_with(model, plant)))
    assert verdict.differing >= 1 and verdict.wrong == 1 and verdict.ties == 0 and verdict.worst_gap > check.TIE


def test_rows_shifted_by_a_token_are_wrong(model):
    ids_TLK = np.roll(by_hand(model, TOKENS), 1, axis=0)
    verdict = check.compare(model, TOKENS, routes_of(ids_TLK))
    assert verdict.wrong > verdict.sets / 2


def test_a_tie_is_called_a_tie(model):
    router = model.model.layers[1].mlp.gate.weight
    before = router.detach().clone()
    try:
        with torch.no_grad():
            router[:] = router[:1]  # all experts of layer 1 score alike: every choice is a tie
        other = [5, 6, 7] if set(by_hand(model, TOKENS)[0, 1].tolist()) != {5, 6, 7} else [0, 1, 2]

        def plant(ids_TLK):
            ids_TLK[:, 1] = other

        verdict = check.compare(model, TOKENS, routes_of(run_with(model, plant)))
    finally:
        with torch.no_grad():
            router.copy_(before)
    assert verdict.differing >= 37 and verdict.ties == 37 and verdict.wrong == 0 and verdict.worst_gap <= check.TIE


def test_following_given_routes_changes_the_model_and_leaves_no_hook(model):
    ids = torch.tensor([TOKENS])
    own_TLK = by_hand(model, TOKENS)
    with torch.no_grad():
        plain = model(ids).logits
        seen: list = []
        with check._watch(model, seen, own_TLK):
            torch.testing.assert_close(model(ids).logits, plain)
        with check._watch(model, [], (own_TLK + 1) % 8):
            assert (model(ids).logits - plain).abs().max() > 1e-3
        assert torch.equal(model(ids).logits, plain)
    assert len(seen) == 3


def test_gaps_on_a_case_written_out():
    scores_TLE = np.array([[[0.4, 0.3, 0.2, 0.1]]], np.float32)
    assert check.gaps(np.array([[[0, 1]]]), scores_TLE) == pytest.approx(0.2 - 0.3)
    assert check.gaps(np.array([[[0, 3]]]), scores_TLE) == pytest.approx(0.3 - 0.1)
