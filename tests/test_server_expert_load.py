"""Counts of chosen experts: against a loop, missing rows refused, unused places not counted."""

from __future__ import annotations

import numpy as np
import pytest

from tracklayer.errors import IncompleteRoutes
from tracklayer.routes.record import Routes
from tracklayer.server.expert_load import ExpertLoad


@pytest.mark.parametrize("experts", [9, 256])
@pytest.mark.parametrize("layer_top_k", [None, (3, 1)])
def test_counts_equal_a_loop(experts: int, layer_top_k: tuple[int, ...] | None) -> None:
    random = np.random.default_rng(1)
    ids = np.argsort(random.random((20, 2, experts)), -1)[..., :3]
    expected = np.zeros((2, experts), int)
    for layer in range(2):
        used = layer_top_k[layer] if layer_top_k else 3
        ids[:, layer, used:] = -1
        for expert in ids[:, layer, :used].ravel():
            expected[layer, expert] += 1
    load = ExpertLoad(2, experts)
    load.add(Routes(ids[:7], (1, 2), experts, layer_top_k=layer_top_k))
    load.add(Routes(ids[7:], (1, 2), experts, 7, layer_top_k=layer_top_k))
    assert np.array_equal(load.counts_LE, expected) and load.rows == 20


def test_missing_rows_are_not_counted_as_experts() -> None:
    load = ExpertLoad(2, 9)
    with pytest.raises(IncompleteRoutes):
        load.add(Routes(np.array([[[1, 2], [-1, -1]]]), (1, 2), 9))
    assert load.rows == 0 and not load.counts_LE.any()
