"""Mismatch figures against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tracklayer.errors import UserError
from tracklayer.replay.metrics import logprob_mismatch, route_mismatch
from tracklayer.routes.record import Routes


def test_logprobs_by_hand() -> None:
    rollout = np.log([0.5, 0.5, 0.5, 0.5])
    training = np.log([0.5, 0.25, 0.125, 1.0])  # r = 1, 1/2, 1/4, 2
    got = logprob_mismatch(rollout, training)
    assert got.k1 == pytest.approx((0 + math.log(2) + math.log(4) - math.log(2)) / 4)
    k3 = [0, 0.5 - 1 + math.log(2), 0.25 - 1 + math.log(4), 2 - 1 - math.log(2)]
    assert got.k3 == pytest.approx(sum(k3) / 4)
    assert got.extreme_share == 0.25 and got.largest_ratio == pytest.approx(4.0)
    assert logprob_mismatch(rollout, training, threshold=1.5).extreme_share == 0.75
    masked = logprob_mismatch(rollout, training, [0, 1, 0, 0])
    assert (masked.tokens, masked.k1) == (1, pytest.approx(math.log(2)))


def test_k3_is_zero_for_equal_and_estimates_the_divergence() -> None:
    rng = np.random.default_rng(0)
    q, p = rng.dirichlet(np.ones(20)), rng.dirichlet(np.ones(20) * 5)
    tokens = rng.choice(20, 200_000, p=q)
    truth = float((q * np.log(q / p)).sum())
    got = logprob_mismatch(np.log(q)[tokens], np.log(p)[tokens])
    assert got.k1 == pytest.approx(truth, rel=0.03) and got.k3 == pytest.approx(truth, rel=0.05)
    same = logprob_mismatch(np.log(q)[tokens], np.log(q)[tokens])
    assert (same.k1, same.k3, same.extreme_share, same.largest_ratio) == (0.0, 0.0, 0.0, 1.0)


def test_missing_values_infinities_and_torch() -> None:
    got = logprob_mismatch([float("nan"), -1.0, -np.inf], [-1.0, -1.0, -np.inf])
    assert (got.tokens, got.k1, got.k3) == (2, 0.0, 0.0)
    assert logprob_mismatch([-1.0], [-np.inf]).largest_ratio == math.inf
    torch = pytest.importorskip("torch")
    tensor = torch.tensor([[-1.0, -2.0]], dtype=torch.bfloat16, requires_grad=True)
    assert logprob_mismatch(tensor, tensor).tokens == 2


@pytest.mark.parametrize(
    ("rollout", "training", "mask", "message"),
    [
        ([-1.0], [-1.0, -2.0], None, "1 rollout and 2 training"),
        ([-1.0], [float("nan")], None, "no token to compare"),
        ([-1.0], [-1.0], [False], "no token to compare"),
        ([-1.0], [-1.0], [True, True], "a mask of 2 for 1"),
        ([0.7], [0.7], None, "probabilities were given"),
    ],
)
def test_refused(rollout: list[float], training: list[float], mask: list[bool] | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        logprob_mismatch(rollout, training, mask)


def test_routes_by_hand() -> None:
    a = Routes([[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[0, 1], [2, 3]]], (1, 2), 8)
    b = Routes([[[1, 0], [2, 3]], [[0, 4], [5, 6]], [[0, 1], [2, 7]]], (1, 2), 8)
    got = route_mismatch(a, b)
    assert (got.tokens, got.rows, got.missing_rows) == (3, 6, 0)
    assert got.router_share == pytest.approx(3 / 6)  # order does not count
    assert got.token_share == pytest.approx(2 / 3) and got.layers_per_token == pytest.approx(1.0)
    assert got.experts_share == pytest.approx((1 + 2 + 1) / 12)


def test_only_the_overlap_and_recorded_rows_count() -> None:
    ids = np.array([[[0, 1], [2, 3]]] * 6)
    a = Routes(ids, (0, 1), 8)
    holed = ids[2:].copy()
    holed[0], holed[1, 0] = -1, -1
    got = route_mismatch(a, Routes(holed, (0, 1), 8, start=2))
    assert (got.tokens, got.rows, got.missing_rows, got.router_share) == (3, 5, 3, 0.0)
    with pytest.raises(UserError, match="no position in common"):
        route_mismatch(a, Routes(ids, (0, 1), 8, start=6))
    with pytest.raises(UserError, match="num_experts 8 and 9"):
        route_mismatch(a, Routes(ids, (0, 1), 9))
    with pytest.raises(UserError, match="recorded on both sides"):
        route_mismatch(a, Routes(np.full_like(ids, -1), (0, 1), 8))


def test_layers_that_choose_different_numbers() -> None:
    """Unused places are on neither side: 1 of 3 chosen experts differs, not 1 of 4."""
    ids = np.array([[[1, 2], [3, -1]]])
    other = np.array([[[2, 5], [3, -1]]])
    a, b = (Routes(x, (0, 1), 8, layer_top_k=(2, 1)) for x in (ids, other))
    found = route_mismatch(a, b)
    assert (found.rows, found.router_share, found.experts_share) == (2, 0.5, pytest.approx(1 / 3))
    assert route_mismatch(a, a).experts_share == 0.0
    with pytest.raises(UserError, match="layer_top_k"):
        route_mismatch(a, Routes(np.array([[[1, 2], [3, 4]]]), (0, 1), 8))
