"""Every way of running gives the tokens, routes and log-probabilities of the plain one (float32, CPU).

The plain way: alone, whole prefill, cold cache, no overlap. On one CPU thread the same rows of a matrix product may
be summed in another order in another batch size, so log-probabilities are compared within 1e-4; tokens and routes of
these seeded models have no such near ties and must be equal.
"""

from __future__ import annotations

import numpy as np
import pytest
import tiny
from engine_tools import Result, make_core, prompts, request, run

from tracklayer.engine import delivery
from tracklayer.engine.engine import EngineCore
from tracklayer.types import EngineRequest

PROMPTS = prompts(6)
NUM_NEW = 12


@pytest.fixture(scope="module", params=["qwen3_moe", "glm4_moe", "deepseek_v4"])
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    tiny.save(request.param, folder)
    return folder


def requests(indices: list[int] | None = None) -> list[EngineRequest]:
    return [
        request(str(i), PROMPTS[i], tokens=NUM_NEW, return_logprob=True, logprob_start_len=0)
        for i in (indices if indices is not None else range(len(PROMPTS)))
    ]


@pytest.fixture(scope="module")
def plain(checkpoint) -> dict[str, Result]:
    core = make_core(checkpoint, disable_radix_cache=True, disable_overlap_schedule=True)
    found: dict[str, Result] = {}
    for i in range(len(PROMPTS)):
        found |= run(core, requests([i]))
    return found


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Rows come home a few at a time, so that each way of running meets requests with rows here, under way and there.

    The plain answers are made before, with rows that all come at the end.
    """
    monkeypatch.setattr(delivery, "PIECE_ROWS", 3)
    monkeypatch.setattr(delivery, "STEP_ROWS", 7)


def check(results: dict[str, Result], plain: dict[str, Result]) -> None:
    for rid, result in results.items():
        expected = plain[rid]
        assert result.tokens == expected.tokens, rid
        np.testing.assert_array_equal(result.routes, expected.routes, err_msg=rid)
        assert result.routes.shape[0] == len(PROMPTS[int(rid)]) + NUM_NEW - 1
        np.testing.assert_allclose(result.output_logprobs.logprobs, expected.output_logprobs.logprobs, atol=1e-4)
        np.testing.assert_array_equal(result.input_logprobs.token_ids, PROMPTS[int(rid)][1:])
        np.testing.assert_allclose(result.input_logprobs.logprobs, expected.input_logprobs.logprobs, atol=1e-4)


def overlapped(core: EngineCore, depth: int) -> EngineCore:
    core.depth = depth
    return core


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_batched_and_overlapped(checkpoint, plain, page_size, depth):
    core = overlapped(make_core(checkpoint, page_size=page_size), depth)
    check(run(core, requests()), plain)


@pytest.mark.parametrize("chunk", [8, 9, 13])
def test_chunked_prefill(checkpoint, plain, chunk):
    check(run(make_core(checkpoint, chunked_prefill_size=chunk), requests()), plain)


@pytest.mark.parametrize("page_size", [1, 4])
def test_prefix_hit(checkpoint, plain, page_size):
    core = make_core(checkpoint, page_size=page_size)
    run(core, [request("warm", PROMPTS[2] + plain["2"].tokens[:-1], tokens=3)])
    results = run(core, [request("2", PROMPTS[2], tokens=NUM_NEW)])
    assert results["2"].cached_tokens == len(PROMPTS[2]) - 1
    assert results["2"].tokens == plain["2"].tokens
    np.testing.assert_array_equal(results["2"].routes, plain["2"].routes)


@pytest.mark.parametrize("depth", [0, 1])
def test_preempted(checkpoint, plain, depth):
    core = overlapped(make_core(checkpoint, max_total_tokens=110, disable_radix_cache=True), depth)
    results = run(core, requests([1, 2, 4, 5]))
    assert sum(r.retractions for r in results.values()) > 0, "the cache was large enough: nothing was tested"
    check(results, plain)


@pytest.mark.parametrize("depth", [0, 1])
def test_samples_of_one_prompt(checkpoint, plain, depth):
    core = overlapped(make_core(checkpoint), depth)
    results = run(core, [request(f"2#{k}", PROMPTS[2], tokens=NUM_NEW) for k in range(4)])
    for result in results.values():
        assert result.tokens == plain["2"].tokens
        np.testing.assert_array_equal(result.routes, plain["2"].routes)
    assert sum(r.cached_tokens for r in results.values()) == 3 * (len(PROMPTS[2]) - 1), "the prompt was computed twice"


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_stop_token_drops_the_surplus(checkpoint, plain, depth):
    """A stop seen one step late leaves no trace: not in tokens, not in rows, not in the cache."""
    core = overlapped(make_core(checkpoint), depth)
    expected = plain["1"]
    at = next(i for i in range(3, NUM_NEW) if expected.tokens[i] not in expected.tokens[:i])
    stop = frozenset({expected.tokens[at]})
    results = run(core, [request("1", PROMPTS[1], tokens=NUM_NEW, stop_token_ids=stop), *requests([0, 2])])
    assert results["1"].finish.type == "stop" and results["1"].finish.matched == expected.tokens[at]
    assert results["1"].tokens == expected.tokens[: at + 1]
    np.testing.assert_array_equal(results["1"].routes, expected.routes[: len(PROMPTS[1]) + at])
    check({k: results[k] for k in "02"}, plain)


@pytest.mark.parametrize("depth", [0, 1])
def test_start_offset_is_the_tail(checkpoint, plain, depth):
    core = overlapped(make_core(checkpoint), depth)
    for start in (0, 7, len(PROMPTS[1])):
        result = run(core, [request("1", PROMPTS[1], tokens=NUM_NEW, routed_experts_start_len=start)])["1"]
        np.testing.assert_array_equal(result.routes, plain["1"].routes[start:])


def test_prefill_only(checkpoint, plain):
    core = make_core(checkpoint)
    without = run(core, [request("1", PROMPTS[1], tokens=0)])["1"]
    with_last = run(core, [request("1", PROMPTS[1], tokens=0, routed_experts_include_last=True)])["1"]
    assert without.tokens == [] and without.finish.type == "length"
    np.testing.assert_array_equal(without.routes, plain["1"].routes[: len(PROMPTS[1]) - 1])
    np.testing.assert_array_equal(with_last.routes, plain["1"].routes[: len(PROMPTS[1])])


def test_finish_early_cuts_tokens_rows_and_logprobs(checkpoint, plain):
    """What a front end does when a stop string appears: the cut does not depend on when it says so."""
    from tracklayer.types import FinishReason

    for when in (6, 9):
        core = overlapped(make_core(checkpoint), 1)

        def stop(core: EngineCore, step: int, when: int = when) -> None:
            if step == when:
                core.finish("1", 4, FinishReason("stop", matched="x"))

        result = run(core, requests([1]), between=stop)["1"]
        assert result.finish.type == "stop"
        np.testing.assert_array_equal(result.routes, plain["1"].routes[: len(PROMPTS[1]) + 3])


def test_abort_returns_what_there_is(checkpoint, plain):
    core = overlapped(make_core(checkpoint), 1)
    results = run(core, requests([1, 2]), between=lambda c, step: c.abort("1") if step == 5 else None)
    aborted = results["1"]
    assert aborted.finish.type == "abort" and 0 < len(aborted.tokens) < NUM_NEW
    assert aborted.tokens == plain["1"].tokens[: len(aborted.tokens)]
    count = len(PROMPTS[1]) + len(aborted.tokens) - 1
    np.testing.assert_array_equal(aborted.routes, plain["1"].routes[:count])
    check({"2": results["2"]}, plain)


def test_only_those_who_asked_get_rows(checkpoint):
    core = make_core(checkpoint)
    results = run(core, [request("0", PROMPTS[0]), request("1", PROMPTS[1], return_routed_experts=False)])
    assert results["0"].routes is not None and results["1"].routes is None


def test_recording_off_changes_no_token(checkpoint, plain):
    core = make_core(checkpoint, enable_return_routed_experts=False)
    assert core.runner.caches.pool is None
    results = run(
        core, [request(str(i), p, tokens=NUM_NEW, return_routed_experts=False) for i, p in enumerate(PROMPTS)]
    )
    assert {rid: r.tokens for rid, r in results.items()} == {rid: r.tokens for rid, r in plain.items()}


def test_routes_asked_of_an_engine_that_records_none(checkpoint):
    core = make_core(checkpoint, enable_return_routed_experts=False)
    result = run(core, [request("0", PROMPTS[0])])["0"]
    assert result.finish.type == "abort" and result.finish.status == 400
    assert "--enable-return-routed-experts" in result.finish.message
