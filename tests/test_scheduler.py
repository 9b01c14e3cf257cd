"""The scheduler's rules one by one: who runs, in which order, with what, and what bad input gets."""

from __future__ import annotations

import numpy as np
import pytest
from scheduler_device import Device, expected_output, request, scheduler

from tracklayer.errors import CapacityError, UserError
from tracklayer.scheduler.scheduler import SchedulerConfig
from tracklayer.scheduler.sequence import SequenceState
from tracklayer.types import FinishReason

ABORT = FinishReason("abort")


def shapes(plan) -> list[tuple[str, int, int, bool]]:
    return [(share.rid, share.start, share.num_tokens, share.samples) for share in plan.shares]


# what can never run


@pytest.mark.parametrize(
    "prompt, max_new, context, pages, names",
    [
        ([], 4, 50, 40, ["empty"]),
        ([1] * 50, 0, 50, 90, ["50", "context_length is 50"]),
        ([1] * 45, 6, 50, 90, ["45", "6", "51", "context_length 50"]),
        ([1] * 30, 11, 100, 40, ["30", "11", "41", "hold 40", "max_total_tokens"]),
        ([1] * 40, None, 100, 40, ["40", "41", "max_total_tokens"]),
        ([1] * 41, 0, 100, 40, ["41", "hold 40", "max_total_tokens"]),
    ],
)
def test_what_can_never_run_is_refused_at_once_with_its_numbers(prompt, max_new, context, pages, names):
    sched = scheduler(pages, context=context)
    with pytest.raises(UserError) as error:
        sched.add(request("a", prompt, max_new))
    assert all(name in str(error.value) for name in names), error.value
    assert not sched.has_work


@pytest.mark.parametrize(
    "name", ["num_slots", "page_size", "max_running_requests", "max_step_tokens", "context_length"]
)
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_bad_sizes_are_named(name, value):
    sizes = dict(num_slots=64, page_size=1, max_running_requests=4, max_step_tokens=8, context_length=50)
    with pytest.raises(UserError, match=name):
        SchedulerConfig(**(sizes | {name: value}))


def test_a_cache_of_one_page_is_refused():
    with pytest.raises(UserError, match="max_total_tokens"):
        SchedulerConfig(num_slots=31, page_size=16, max_running_requests=4, max_step_tokens=8, context_length=50)


def test_a_full_queue_and_a_rid_twice():
    sched = scheduler(queued=2)
    sched.add(request("a", [1]))
    with pytest.raises(UserError, match="'a'"):
        sched.add(request("a", [2]))
    sched.add(request("b", [1]))
    with pytest.raises(CapacityError, match="max_queued_requests 2"):
        sched.add(request("c", [1]))
    sched.plan()
    sched.add(request("c", [1]))


@pytest.mark.parametrize("context, pages, most", [(20, 100, 20), (100, 30, 30)])
def test_no_limit_runs_to_the_end_of_context_or_cache(context, pages, most):
    device = Device(scheduler(pages, context=context))
    seq = device.add(request("a", [1, 2, 3], max_new=None))
    device.drain()
    assert len(seq.output_ids) == most - 3 and device.done["a"].finish.length == most - 3


# one step


def test_nothing_to_do_plans_nothing():
    sched = scheduler()
    assert sched.plan() is None and not sched.has_work and sched.take_preempted() == []
    assert sched.abort("nobody", ABORT) is None and sched.finish("nobody", 3, ABORT) is None


def test_decodes_come_first_and_take_nothing_from_the_prompts_budget():
    device = Device(scheduler(budget=6))
    device.add(request("a", [1, 2], max_new=9))
    device.step()
    device.add(request("b", range(10, 20), max_new=9))
    device.step()
    assert shapes(device.plans[1]) == [("a", 2, 1, True), ("b", 0, 6, False)]
    device.add(request("c", [30, 31, 32], max_new=9))
    device.step()
    assert shapes(device.plans[2]) == [("a", 3, 1, True), ("b", 6, 4, True), ("c", 0, 2, False)]
    device.step()
    assert shapes(device.plans[3]) == [("a", 4, 1, True), ("b", 10, 1, True), ("c", 2, 1, True)]
    device.step()
    assert device.plans[4].decode_only


def test_the_first_share_says_all_that_a_new_row_needs():
    device = Device(scheduler())
    device.add(request("a", [1, 2, 3], max_new=2))
    device.step()
    device.add(request("b", [1, 2, 4, 4], max_new=2))
    device.step()
    share = next(share for share in device.plans[1].shares if share.rid == "b")
    assert (share.table_start, share.start, len(share.slots), share.token_ids) == (0, 2, 4, [4, 4])
    assert share.admitted.rid == "b" and share.history == [1, 2, 4, 4]
    assert device.seqs["b"].cached_tokens == 2
    decode = device.plans[1].shares[0]
    assert (decode.rid, decode.token_ids, decode.table_start, decode.admitted) == ("a", None, 3, None)


def test_priority_then_arrival_and_nobody_is_overtaken_for_being_large():
    device = Device(scheduler(num_pages=40, running=9, budget=40))
    device.add(request("old", [1] * 10, max_new=2))
    device.add(request("big", [2] * 35, max_new=2))
    device.add(request("small", [3], max_new=2))
    device.add(request("urgent", [4], max_new=2, priority=5))
    device.step()
    assert [share.rid for share in device.plans[0].shares] == ["urgent", "old"]
    device.drain()
    admitted = [share.rid for plan in device.plans for share in plan.shares if share.admitted]
    assert admitted == ["urgent", "old", "big", "small"]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_length_is_known_when_planning(depth):
    device = Device(scheduler(), depth)
    device.add(request("a", [1, 2], max_new=5))
    device.drain()
    assert device.computed == 2 + 4, "no surplus token"
    assert len(device.done["a"].slots) == 6


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_prefill_only(depth):
    device = Device(scheduler(budget=3), depth)
    seq = device.add(request("a", [1, 2, 3, 4], max_new=0))
    device.drain()
    news = device.done["a"]
    assert (news.token, news.finish.type, news.finish.length, len(news.slots)) == (None, "length", 0, 4)
    assert seq.output_ids == [] and not any(share.samples for plan in device.plans for share in plan.shares)


def stop_at(prompt, count) -> int:
    """A token that the model gives as output number `count` and not before."""
    output, _ = expected_output(request("x", prompt), 50)
    assert output[count - 1] not in output[: count - 1]
    return output[count - 1]


PROMPT = next([i, i] for i in range(200) if len(set(expected_output(request("x", [i, i]), 3)[0])) == 3)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_stop_token_ends_it_and_the_surplus_is_dropped(depth):
    device = Device(scheduler(), depth)
    seq = device.add(request("a", PROMPT, max_new=20, stop=[stop_at(PROMPT, 3)]))
    device.drain()
    assert (device.done["a"].finish.type, device.done["a"].finish.matched) == ("stop", seq.output_ids[-1])
    assert len(seq.output_ids) == 3 and len(device.done["a"].slots) == 4
    assert device.computed == 2 + 2 + depth


def test_the_least_length_overrules_stop_tokens():
    device = Device(scheduler())
    seq = device.add(request("a", PROMPT, max_new=7, min_new=6, stop=range(5)))
    device.drain()
    assert len(seq.output_ids) == 6 and device.done["a"].finish.type == "stop"


def test_a_row_is_not_given_away_while_its_last_step_is_in_flight():
    sched = scheduler(running=1)
    sched.add(request("a", PROMPT, max_new=20, stop=[stop_at(PROMPT, 1)]))
    sched.add(request("b", [9], max_new=2))
    first = sched.plan()
    second = sched.plan()  # a's surplus token
    (news,) = sched.commit(first, [stop_at(PROMPT, 1)])
    assert news.finish.type == "stop" and sched.plan() is None
    assert sched.commit(second, [0]) == []
    assert sched.plan().shares[0].rid == "b"
    sched.check_integrity()


def test_commits_out_of_order_or_of_the_wrong_size_are_seen():
    sched = scheduler()
    sched.add(request("a", [1], max_new=9))
    first, second = sched.plan(), sched.plan()
    with pytest.raises(AssertionError, match="commit of step 1, expected 0"):
        sched.commit(second, [1])
    sched = scheduler()
    sched.add(request("a", [1], max_new=9))
    first = sched.plan()
    with pytest.raises(AssertionError, match="2 tokens for 1"):
        sched.commit(first, [1, 2])


def test_tokens_come_as_a_list_or_an_array():
    sched = scheduler()
    sched.add(request("a", [1], max_new=9))
    (news,) = sched.commit(sched.plan(), np.array([7], np.int32))
    assert news.token == 7 and type(news.seq.output_ids[0]) is int


# ends from outside


def test_finish_keeps_what_it_is_told_wherever_the_request_is():
    device = Device(scheduler(num_pages=100, budget=8, running=3), depth=1)
    running = device.add(request("running", [1, 2], max_new=30))
    for _ in range(6):
        device.step()
    middle = device.add(request("middle", [5] * 30, max_new=3))
    device.step()
    assert middle.prefilling and middle.num_computed > 0
    waiting = device.add(request("waiting", [7], max_new=3))
    device.finish("waiting", 2, FinishReason("stop", matched="x"))
    device.finish("middle", 0, ABORT)
    assert len(running.output_ids) >= 4 and running.in_flight == 1
    device.finish("running", 2, FinishReason("stop", matched="end"))
    assert len(running.output_ids) == 2 and len(device.done["running"].slots) == 3
    assert len(device.done["middle"].slots) == 8 and len(device.done["waiting"].slots) == 0
    assert [seq.state for seq in (running, middle, waiting)] == [SequenceState.FINISHED] * 3
    device.sched.check_integrity()
    assert device.sched.num_used_slots == 0 and device.sched.has_work, "a step is still in flight"
    device.drain()
    assert device.sched.finish("running", 1, ABORT) is None, "known no more"
    device.sched.add(request("running", [1], max_new=1))


# too few pages


def test_the_latest_of_the_lowest_priority_gives_way_and_all_end():
    device = Device(scheduler(num_pages=110, budget=64, running=4))
    device.add(request("low", [1, 1], max_new=60, priority=-1))
    device.add(request("first", [2, 2], max_new=60))
    device.add(request("second", [3, 3], max_new=60))
    order = []
    while device.sched.has_work:
        plan = device.sched.plan()
        taken = device.sched.take_preempted()
        order += [seq.rid for seq, _ in taken]
        for seq, slots in taken:
            device.check_holds(seq.request, device.tokens_of(seq), slots)
        device.launch(plan)
        device.commit()
        device.sched.check_integrity()
    assert order[:1] == ["low"] and "first" not in order
    for rid, seq in device.seqs.items():
        assert seq.output_ids == expected_output(seq.request, 60)[0]
        assert seq.num_retractions == order.count(rid)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_token_in_flight_reaches_a_preempted_sequence(depth):
    device = Device(scheduler(), depth)
    seq = device.add(request("a", [1, 2], max_new=3))
    for _ in range(depth):
        assert device.step()
    before = len(seq.output_ids)
    assert seq.in_flight == depth
    device.sched.retract_all()
    ((taken, slots),) = device.sched.take_preempted()
    assert taken is seq and len(slots) == 2 + before + depth - 1
    device.saved["a"] = len(slots)
    assert device.sched.plan() is None, "it must not start again before its token is known"
    while device.pending:
        device.commit()
    assert len(seq.output_ids) == before + depth and seq.state is SequenceState.WAITING
    device.drain()
    assert seq.output_ids == expected_output(seq.request, 3)[0] and seq.num_retractions == 1


def test_it_may_end_while_it_waits_after_a_preemption():
    device = Device(scheduler(), depth=1)
    device.add(request("a", [1, 2], max_new=1))
    device.step()
    device.sched.retract_all()
    device.gather_preempted()
    device.commit()
    news = device.done["a"]
    assert news.finish.type == "length" and len(news.slots) == 0 and device.saved["a"] == 2
    assert not device.sched.has_work


def test_a_preempted_sequence_finds_its_own_tokens_again():
    device = Device(scheduler())
    seq = device.add(request("a", range(20), max_new=10))
    for _ in range(4):
        device.step()
    device.sched.retract_all()
    device.gather_preempted()
    computed = device.computed
    device.step()
    assert device.computed - computed == 1, "its last token alone"
    share = device.plans[-1].shares[0]
    assert share.admitted is seq.request and share.history == [*range(20), *seq.output_ids[:4]]
    assert seq.cached_tokens == 0, "of the first admission"


def test_a_request_that_lies_twice_in_the_cache_is_not_stuck():
    """Computed anew for its log-probabilities beside equal cached tokens, it would need more pages than there are."""
    device = Device(scheduler(num_pages=10))
    device.add(request("a", [1, 2, 3, 4, 5, 6], max_new=0))
    device.drain()
    seq = device.add(request("b", [1, 2, 3, 4, 5, 6, 7], max_new=3, logprobs_from=0))
    device.drain()
    assert seq.output_ids == expected_output(seq.request, 3)[0]
    assert device.logprobs["b"] == list(range(7)), "each wanted position once, though it started twice"


def test_waiting_requests_do_not_starve_behind_a_stream_of_small_ones():
    device = Device(scheduler(num_pages=30, running=3, budget=16))
    device.add(request("s0", [9, 0], max_new=8))
    device.step()
    device.add(request("big", range(20), max_new=8))
    for i in range(1, 60):
        device.add(request(f"s{i}", [9, i], max_new=8))
        device.step()
        if "big" in device.done:
            break
    assert "big" in device.done
    device.drain()
