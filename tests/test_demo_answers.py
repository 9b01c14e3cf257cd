"""Greedy answers against the float32 referee, on a model of the demonstration's making."""

from __future__ import annotations

import pytest
import reciter
from engine_tools import make_core, request, run

from tracklayer.demo import check


@pytest.fixture(scope="module")
def recited(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reciter")
    return folder, reciter.save(folder)


def answers(folder, **config):
    core = make_core(folder, max_total_tokens=2000, **config)
    prompts = {q: reciter.question(q) for q in reciter.FACTS}
    ends = frozenset([reciter.END])
    return run(core, [request(q, ids, tokens=60, stop_token_ids=ends) for q, ids in prompts.items()])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_are_recited_and_the_referee_agrees(recited, dtype):
    folder, referee = recited
    for text, result in answers(folder, dtype=dtype).items():
        assert bytes(result.tokens[:-1]).decode() == reciter.FACTS[text]
        found = check.answer(referee, reciter.question(text), result.tokens)
        assert found.tokens == len(result.tokens) and found.differing == 0 and found.worst_gap == 0.0
        rows = len(reciter.question(text)) + len(result.tokens) - 1
        assert result.routes.shape == (rows, 2, 2)


def test_a_wrong_token_is_found(recited):
    _, referee = recited
    ids, right = reciter.question("What do bees make?"), reciter.answer("Bees make honey and wax.")
    wrong = right.copy()
    wrong[10] = ord("m")
    found = check.answer(referee, ids, wrong)
    assert found.differing >= 1 and found.worst_gap > check.NEAR
    assert check.answer(referee, ids, right[:3]).tokens == 3
    assert check.answer(referee, ids, []) == check.Answer(tokens=0, differing=0, worst_gap=0.0)
