"""Layers that see a window only keep fewer tokens: every way of running gives what it gives when they keep all.

The plain way: the same model alone, whole, with `disable_hybrid_swa_memory`. Window 7 or chunk 6 in these tiny models.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import tiny
import torch
from engine_tools import make_core, prompts, request, run

from tracklayer.runner.kv_cache import SlotCost
from tracklayer.scheduler import planning
from tracklayer.scheduler.sight import Sight, slots_needed
from tracklayer.scheduler.windows import WindowPages

PROMPTS = prompts(6, (5, 40, 90, 130, 60, 33))
WAYS = {
    "batched": {},
    "chunked": {"chunked_prefill_size": 16},
    "pages of 4": {"page_size": 4},
    "pages of 16": {"page_size": 16, "chunked_prefill_size": 48},
    "preempted": {"max_total_tokens": 165, "chunked_prefill_size": 8, "max_running_requests": 3},
    "no prefix cache": {"disable_radix_cache": True},
}


@pytest.fixture(scope="module", params=["gpt_oss", "mimo_v2", "llama4", "gemma4_moe", "mixtral_window"])
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    tiny.save(request.param, folder)
    return folder


def asked(tokens=30, **fields):
    return [request(f"{i}", p, tokens=tokens, return_logprob=True, **fields) for i, p in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def plain(checkpoint):
    core = make_core(checkpoint, disable_hybrid_swa_memory=True, disable_radix_cache=True)
    assert core.scheduler.cache.windows is None
    return {rid: result for one in asked() for rid, result in run(core, [one]).items()}


def windowed_core(checkpoint, **config):
    core = make_core(checkpoint, **config)
    assert core.scheduler.cache.windows is not None
    sizes = {len(kv[0]) for kv, w in zip(core.runner.caches.kv, core.runner.caches.windowed, strict=True) if w}
    assert sizes == {core.runner.caches.num_window_slots} and sizes < {core.runner.caches.num_slots} | sizes
    return core


def check(found, plain, same=lambda rid: rid):
    for rid, result in found.items():
        want = plain[same(rid)]
        assert result.tokens == want.tokens, rid
        np.testing.assert_array_equal(result.routes, want.routes, err_msg=rid)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_running(checkpoint, plain, way, monkeypatch):
    if way == "preempted":
        monkeypatch.setattr(planning, "HEADROOM_TOKENS", 0)
    core = windowed_core(checkpoint, **WAYS[way])
    found = run(core, asked())
    check(found, plain)
    if way == "preempted":
        assert sum(result.retractions for result in found.values()) > 0
    core.scheduler.check_integrity()


@pytest.mark.parametrize("size", [1, 4])
def test_prefixes_whose_window_is_there_or_gone(checkpoint, plain, size):
    """A hit goes as deep as the window before it is still kept; without any it begins anew. Routes are whole."""
    core = windowed_core(checkpoint, page_size=size)
    few = {str(i): PROMPTS[i] for i in (0, 1, 5)}

    def ask(name: str, tokens: int = 30):
        found = run(core, [request(f"{rid} {name}", p, tokens=tokens) for rid, p in few.items()])
        return [found[f"{rid} {name}"].cached_tokens - len(p) + 1 for rid, p in few.items()], found

    ask("first", tokens=1)
    missed, again = ask("again")
    check(again, plain, lambda rid: rid.split()[0])
    assert missed == [0, 0, 0]
    windows = core.scheduler.cache.windows
    windows._evict(int((windows._main_of > 0).sum()))
    assert core.scheduler.num_used_slots == 0, "nothing runs: all is idle"
    _, gone = ask("gone")
    check(gone, plain, lambda rid: rid.split()[0])
    # Where a chunk begins nothing before is seen, so that nothing is missed.
    sight = core.scheduler.config.sight
    border = 1000 if sight.window else math.lcm(sight.chunk, size)
    for rid, p in few.items():
        assert gone[f"{rid} gone"].cached_tokens == (len(p) - 1) // border * border
    # The tree kept its own pages of these tokens: they got the window pages of those that were computed again.
    missed, last = ask("last")
    check(last, plain, lambda rid: rid.split()[0])
    assert missed == [0, 0, 0]
    core.scheduler.check_integrity()


def test_samples_of_one_prompt(checkpoint, plain):
    core = windowed_core(checkpoint)
    found = run(core, [request(f"{k} {i}", PROMPTS[i], tokens=30) for i in (3, 2) for k in range(3)])
    check(found, plain, lambda rid: rid.split()[1])


def test_an_aborted_request_has_all_its_rows(checkpoint, plain):
    core = windowed_core(checkpoint)
    asked_for = [request(str(i), PROMPTS[i], tokens=30) for i in (2, 3)]
    found = run(core, asked_for, between=lambda core, step: core.abort("2") if step == 12 else None)
    rows = found["2"].routes
    assert len(PROMPTS[2]) <= len(rows) < len(plain["2"].routes) and (rows == plain["2"].routes[: len(rows)]).all()


@pytest.mark.parametrize("way", ["batched", "chunked"])
def test_what_is_out_of_sight_is_never_read(checkpoint, plain, way):
    """NaN in every window page that no running sequence may see, before each step; those let go are taken at once."""
    core = windowed_core(checkpoint, **WAYS[way])
    windows, launch = core.scheduler.cache.windows, core.runner.launch
    kept = zip(core.runner.caches.kv, core.runner.caches.windowed, strict=True)
    tensors = [tensor for kv, windowed in kept if windowed for tensor in kv]
    taken = 0

    def poisoned(plan, *rest):
        nonlocal taken
        idle = int(((windows._main_of > 0) & (windows._holders[windows._main_of] == 0)).sum())
        if idle:
            windows._evict(idle)
        free = torch.from_numpy(np.append(windows._free[: windows._num_free], 0)).long()
        for tensor in tensors:
            tensor[free] = float("nan")
        taken += idle
        return launch(plan, *rest)

    core.runner.launch = poisoned
    check(run(core, asked()), plain)
    assert taken > 100


def test_more_tokens_than_window_slots_fit(checkpoint, plain):
    core = windowed_core(checkpoint, max_total_tokens=2000, max_running_requests=2, chunked_prefill_size=16)
    assert core.runner.caches.num_window_slots < 400
    check(run(core, asked()), plain)
    cached = core.scheduler.cache.allocator.num_pages - 1 - core.scheduler.cache.allocator.num_free
    assert cached > core.runner.caches.num_window_slots


def test_a_window_as_long_as_the_cache_changes_nothing(checkpoint):
    core = make_core(checkpoint, max_total_tokens=200, max_running_requests=64)
    assert core.scheduler.cache.windows is None and not core.runner.caches.num_window_slots


@pytest.mark.parametrize("sight", [Sight(window=5), Sight(chunk=6), Sight(window=3, chunk=8)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_usable_is_the_deepest_point_whose_sight_is_whole(sight, size):
    random = np.random.default_rng(0)
    for _ in range(300):
        count = int(random.integers(0, 9))
        pages = np.arange(1, count + 2, dtype=np.int32)
        windows = WindowPages(20 * size, 12, size, sight)
        windows.lend(pages[random.random(count + 1) < 0.7])
        slots = (pages[:count, None] * size + np.arange(size, dtype=np.int32)).ravel()
        tail = pages[count] * size + np.arange(random.integers(0, size), dtype=np.int32)
        lent = np.repeat(windows.page_of[pages] > 0, size)
        ends = [k * size for k in range(count + 1) if lent[int(sight.first(k * size)) // size * size : k * size].all()]
        best = max(ends)
        best += len(tail) if best == count * size and len(tail) and lent[-1] else 0
        assert windows.usable(slots, tail) == best


def test_sizes():
    """By arithmetic from published shapes: tokens that fit into 40 GiB of cache, 64 rows, steps of 8,192."""
    budget = 40 << 30
    gpt_oss, mimo = (24576 + 96, 24576, 1.7), (23040 + 376, 199680, 4.0)
    for kept, windowed, least_gain in (gpt_oss, mimo):
        alike = SlotCost(kept, windowed).fitting(budget)
        cost = SlotCost(kept, windowed, slots_needed(Sight(window=128), 8192, 64, 1))
        apart = cost.fitting(budget)
        assert apart > least_gain * alike and cost.total(apart, 1) <= budget < cost.total(apart + 100, 1)
