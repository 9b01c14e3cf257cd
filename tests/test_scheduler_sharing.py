"""Prefix reuse between requests, operations on the whole cache, and the scheduler's own integrity check."""

from __future__ import annotations

import statistics
import time

import pytest
from scheduler_device import Device, expected_output, next_token, request, scheduler

from tracklayer.scheduler.scheduler import Scheduler
from tracklayer.types import FinishReason

ABORT = FinishReason("abort")


# shared prefixes


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("budget", [64, 100, 4096])
def test_groups_of_equal_prompts_that_arrive_together(page_size, budget):
    """Scaled-down samples of one prompt: each prompt is computed once, the others compute their last token."""
    prompts = [[1, i, *range(100 + i, 190 + i)] for i in range(6)]
    device = Device(scheduler(4096 // page_size, page_size, running=48, budget=budget), depth=1)
    for i, prompt in enumerate(prompts):
        for j in range(8):
            device.add(request(f"{i}.{j}", prompt, max_new=2))
    device.drain()
    assert device.computed <= 6 * 92 + 6 * 7 + 48
    cached = [seq.cached_tokens for seq in device.seqs.values()]
    assert sum(c == 91 for c in cached) >= 6 * 7


def test_a_short_common_beginning_is_not_waited_for():
    device = Device(scheduler())
    device.add(request("a", [1, 10, 11, 12], max_new=1))
    device.add(request("b", [1, 20, 21, 22], max_new=1))
    device.step()
    assert len(device.plans[0].shares) == 2


def test_it_waits_for_the_whole_prompt_of_one_that_is_inside_its_prefill():
    device = Device(scheduler(num_pages=200, budget=10))
    prompt = list(range(35))
    device.add(request("a", prompt, max_new=1))
    device.add(request("b", prompt, max_new=1))
    device.add(request("c", [90, 91], max_new=1))
    device.drain()
    assert device.seqs["b"].cached_tokens == 34
    first = {share.rid: plan.step for plan in device.plans[::-1] for share in plan.shares}
    assert first["c"] == 3 and first["b"] == 4, "c may pass b, which waits for a"


def test_the_owner_of_an_awaited_prefix_may_vanish():
    device = Device(scheduler(num_pages=200, budget=10))
    device.add(request("a", range(35), max_new=1))
    seq = device.add(request("b", range(35), max_new=1))
    device.step()
    device.finish("a", 0, ABORT)
    device.drain()
    assert seq.cached_tokens == 10 and device.done["b"].finish.type == "length"


@pytest.mark.parametrize("start, hit", [(-1, 9), (0, 0), (4, 4), (9, 9)])
def test_prompt_logprobs_cap_the_hit(start, hit):
    device = Device(scheduler())
    device.add(request("a", range(10), max_new=2))
    device.drain()
    seq = device.add(request("b", range(10), max_new=2, logprobs_from=start))
    device.drain()
    assert seq.cached_tokens == hit
    assert device.logprobs.get("b", []) == ([] if start < 0 else list(range(start, 10)))


def test_a_hit_inside_a_page_copies_that_part():
    device = Device(scheduler(num_pages=16, page_size=4))
    device.add(request("a", range(10), max_new=2))
    device.drain()
    seq = device.add(request("b", [*range(10), next_token("", tuple(range(10))) + 1, 50], max_new=2))
    device.step()
    plan = device.plans[-1]
    assert seq.cached_tokens == 10 and len(plan.copies) == 2
    assert plan.copies[:, 1].tolist() == plan.shares[0].slots[8:10].tolist()
    device.drain()


def test_without_the_prefix_cache_nothing_is_found_and_nothing_kept():
    device = Device(scheduler(cache=False))
    for rid in "ab":
        seq = device.add(request(rid, range(10), max_new=2))
        device.drain()
        assert seq.cached_tokens == 0
    assert device.sched.cache.allocator.num_free == 64


def test_a_reply_that_grows_into_anothers_prompt_is_found_to_the_token():
    """The first one's begun page grows into the very page that the second has entered meanwhile."""
    prompt = [0, 1]
    longer = [*prompt, *expected_output(request("x", prompt), 2)[0]]
    device = Device(scheduler(num_pages=100, page_size=4, running=4, budget=8))
    device.add(request("a", prompt, max_new=6))
    device.add(request("b", longer, max_new=6))
    device.drain()
    whole = longer + device.seqs["b"].output_ids[:-1]
    again = device.add(request("c", whole, max_new=0))
    device.drain()
    assert again.cached_tokens == len(whole) - 1


def test_no_more_is_evicted_than_is_needed():
    device = Device(scheduler(num_pages=20))
    device.add(request("a", [1] * 12, max_new=0))
    device.drain()
    device.add(request("b", [2] * 10, max_new=0))
    device.drain()
    again = device.add(request("c", [1] * 12, max_new=0))
    device.drain()
    assert again.cached_tokens == 10, "8 pages were free and 2 were taken from the end"


def test_what_is_kept_does_not_depend_on_a_surplus_token():
    for depth in (0, 1):
        device = Device(scheduler(), depth)
        seq = device.add(request("a", [7, 8], max_new=20, stop=range(5)))
        device.drain()
        again = device.add(request("b", [7, 8, *seq.output_ids, 9], max_new=0))
        device.drain()
        assert again.cached_tokens == 2, "the last token sampled is not kept, fed or not"


@pytest.mark.parametrize("cache", [True, False])
def test_a_key_leaves_nothing_behind(cache):
    device = Device(scheduler(cache=cache))
    for i in range(5):
        device.add(request(str(i), [1, 2], max_new=1, key=str(i)))
    device.drain()
    assert len(list(device.sched.cache.tree.nodes())) == (10 if cache else 0)
    device.sched.flush()
    assert not list(device.sched.cache.tree.nodes())


# whole-cache operations and invariants


def test_flush_and_retract():
    device = Device(scheduler())
    device.add(request("a", range(10), max_new=4))
    assert device.sched.flush(), "waiting requests hold nothing"
    device.step()
    assert not device.sched.flush() and device.sched.num_used_slots > 0
    device.sched.retract_all()
    assert (device.sched.num_running, device.sched.num_waiting) == (0, 1)
    device.gather_preempted()
    assert device.sched.flush() and device.sched.cache.allocator.num_free == 64
    device.kv.clear()  # as new weights would
    device.drain()
    assert device.sched.num_free_slots == 64 and device.sched.num_used_slots == 0


def planted(fault) -> Scheduler:
    device = Device(scheduler())
    device.add(request("a", range(6), max_new=9))
    device.step()
    fault(device.sched)
    return device.sched


@pytest.mark.parametrize(
    "fault, message",
    [
        (lambda s: s.cache.allocator.allocate(1), "owners"),
        (lambda s: s.running[0].slots.__setitem__(6, s.running[0].slots[2]), "owners"),
        (lambda s: s.cache.tree.lock(s.running[0].node), "references"),
        (lambda s: s.roster.free_rows.pop(), "rows"),
        (lambda s: s.roster.free_rows.append(s.running[0].row), "rows"),
        (lambda s: setattr(s.cache.tree, "num_evictable", 3), "evictable"),
    ],
)
def test_the_integrity_check_sees_planted_faults(fault, message):
    sched = planted(lambda s: None)
    sched.plan()
    sched.check_integrity()
    fault(sched)
    with pytest.raises(AssertionError, match=message):
        sched.check_integrity()


def test_a_step_of_256_decodes_is_planned_and_committed_in_far_less_than_it_runs():
    sched = scheduler(num_pages=60000, running=256, budget=16384, context=1000)
    for i in range(256):
        sched.add(request(str(i), range(i, i + 50), max_new=200))
    seconds = []
    for _ in range(60):
        begin = time.perf_counter()
        plan = sched.plan()
        sched.commit(plan, [1] * sum(share.samples for share in plan.shares))
        seconds.append(time.perf_counter() - begin)
    assert plan.decode_only and len(plan.shares) == 256
    assert statistics.median(seconds) < 0.005  # about 0.3 ms on a free core
