"""Random traces through the scheduler, every slot of every step checked by the pretended device."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_device import Device, expected_output, request, scheduler

from tracklayer.scheduler.sight import Sight
from tracklayer.types import FinishReason

SIGHTS = [Sight(window=3), Sight(window=11), Sight(chunk=6), Sight(window=2, chunk=8)]
STEMS = [[1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2] * 3, [1, 2, 3, 3, 3, 3] * 5, [4] * 30, [0, 1] * 15]


def adding(least_new: int, most_new: int, most_copies: int):
    return st.tuples(
        st.just("add"),
        st.integers(0, len(STEMS) - 1),  # stem
        st.integers(0, 30),  # its length in the prompt
        st.lists(st.integers(0, 4), min_size=1, max_size=4),  # what follows
        st.integers(least_new, most_new),  # max_new
        st.booleans(),  # has a stop token
        st.sampled_from(["", "", "", "other"]),
        st.sampled_from([0, 0, 0, 1, -1]),
        st.integers(1, most_copies),
        st.sampled_from([-1, -1, -1, 0, 5]),  # logprob_start_len
    )


adds = adding(0, 14, 4)
acts = st.one_of(
    adds,
    adds,
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("commit")),
    st.tuples(st.just("abort"), st.integers(0, 40)),
    st.tuples(st.just("finish"), st.integers(0, 40), st.integers(0, 5)),
    st.tuples(st.just("flush")),
    st.tuples(st.just("retract")),
)


def play(device, trace):
    sched, count, touched = device.sched, 0, set()
    for act, *args in trace:
        if act == "add":
            stem, cut, rest, max_new, stop, key, priority, copies, logprobs = args
            prompt = STEMS[stem][:cut] + rest
            for _ in range(copies):
                req = request(
                    f"r{count}",
                    prompt,
                    max_new,
                    min_new=min(max_new, 8 * (len(rest) - 1)),
                    stop=(0,) if stop else (),
                    key=key,
                    priority=priority,
                    logprobs_from=min(logprobs, len(prompt) - 1),
                )
                count += 1
                if len(prompt) + max_new <= sched.config.max_request_tokens:
                    device.add(req)
        elif act == "step":
            for _ in range(args[0]):
                device.step()
                sched.check_integrity()
        elif act == "commit" and device.pending:
            device.commit()
        elif act in ("abort", "finish") and device.seqs:
            rid = list(device.seqs)[args[0] % len(device.seqs)]
            if rid not in device.done:
                touched.add(rid)
            if act == "abort":
                news = sched.abort(rid, FinishReason("abort"))
                if news is not None:
                    device.end(news)
            else:
                device.finish(rid, args[1], FinishReason("stop", matched="x"))
        elif act == "flush":
            assert sched.flush() == (sched.num_running == 0)
        elif act == "retract":
            sched.retract_all()
            assert sched.num_running == 0 and sched.num_used_slots == 0
            device.gather_preempted()
        sched.check_integrity()
    return touched


@settings(max_examples=250, deadline=None)
@given(
    trace=st.lists(acts, min_size=1, max_size=30),
    page_size=st.sampled_from([1, 1, 4, 16]),
    slots=st.sampled_from([16, 32, 48, 200]),
    running=st.sampled_from([1, 3, 8]),
    budget=st.sampled_from([1, 4, 9, 64]),
    depth=st.integers(0, 2),
    cache=st.sampled_from([True, True, True, False]),
    sight=st.sampled_from([None, None, *SIGHTS]),
)
def test_random_traces(trace, page_size, slots, running, budget, depth, cache, sight):
    sched = scheduler(max(1, slots // page_size), page_size, running, budget, context=100, cache=cache, sight=sight)
    run_to_the_end(Device(sched, depth), trace)


@settings(max_examples=150, deadline=None)
@given(
    first=st.lists(adding(4, 30, 3), min_size=3, max_size=8),
    trace=st.lists(acts, max_size=20),
    page_size=st.sampled_from([1, 1, 4, 16]),
    slots=st.sampled_from([112, 400]),
    running=st.sampled_from([1, 2, 4]),
    budget=st.sampled_from([4, 9, 30]),
    depth=st.integers(0, 2),
    sight=st.sampled_from(SIGHTS),
)
def test_random_traces_with_few_window_pages(first, trace, page_size, slots, running, budget, depth, sight):
    """Prompts and their repetitions use more window pages than there are: prefixes lose theirs and are cut back."""
    sched = scheduler(slots // page_size, page_size, running, budget, context=100, sight=sight)
    run_to_the_end(Device(sched, depth), first + trace + first)


@settings(max_examples=120, deadline=None)
@given(
    first=st.lists(adding(8, 40, 3), min_size=3, max_size=8),
    trace=st.lists(acts, max_size=20),
    page_size=st.sampled_from([1, 1, 4, 16]),
    slots=st.sampled_from([64, 80, 112]),
    budget=st.sampled_from([12, 64, 300]),
    depth=st.integers(0, 2),
    sight=st.sampled_from([None, None, *SIGHTS]),
)
def test_random_traces_with_too_few_pages(first, trace, page_size, slots, budget, depth, sight):
    sched = scheduler(slots // page_size, page_size, 12, budget, context=100, sight=sight)
    run_to_the_end(Device(sched, depth), first + trace)


def run_to_the_end(device, trace):
    sched = device.sched
    touched = play(device, trace)
    device.drain()
    assert set(device.done) == set(device.seqs), "a request got no end"
    for rid, seq in device.seqs.items():
        if rid in touched:
            continue
        output, how = expected_output(seq.request, seq.max_new)
        assert (seq.output_ids, device.done[rid].finish.type) == (output, how)
        start = seq.request.logprob_start_len
        if start >= 0:
            assert device.logprobs.get(rid, []) == list(range(start, seq.prompt_len)), "each position once"
    assert sched.num_used_slots == 0
    assert sched.flush() and sched.cache.allocator.num_free == sched.cache.allocator.num_pages - 1
    sched.check_integrity()


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=6),
    page_size=st.sampled_from([1, 4, 16]),
    depth=st.integers(0, 2),
    budget=st.sampled_from([8, 64]),
)
def test_a_finished_prefix_is_found_again_to_the_token(prompts, page_size, depth, budget):
    """With room for all, asking again for prompt and output, or any cut of them, computes one token only."""
    device = Device(scheduler(2000 // page_size, page_size, 4, budget), depth)
    for i, prompt in enumerate(prompts):
        device.add(request(f"a{i}", prompt, max_new=6))
    device.drain()
    for i in range(len(prompts)):
        seq = device.seqs[f"a{i}"]
        whole = seq.request.input_ids + seq.output_ids[:-1]
        for n in sorted({1, len(whole) // 2 + 1, len(whole)}):
            again = device.add(request(f"b{i}.{n}", whole[:n], max_new=0))
            device.drain()
            assert again.cached_tokens == n - 1
            other = device.add(request(f"c{i}.{n}", whole[:n], max_new=0, key=f"{i}.{n}"))
            device.drain()
            assert other.cached_tokens == 0, "requests with different keys never share"


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=60), min_size=1, max_size=4),
    copies=st.integers(2, 6),
    page_size=st.sampled_from([1, 4, 16]),
    budget=st.sampled_from([25, 40, 500]),
    depth=st.integers(0, 2),
    shuffle=st.randoms(use_true_random=False),
)
def test_equal_prompts_that_come_together_are_computed_once(prompts, copies, page_size, budget, depth, shuffle):
    prompts = [[1, i, *prompt] for i, prompt in enumerate(prompts)]
    device = Device(scheduler(4000 // page_size, page_size, 25, budget), depth)
    together = [(i, c) for i in range(len(prompts)) for c in range(copies)]
    shuffle.shuffle(together)
    for i, c in together:
        device.add(request(f"{i}.{c}", prompts[i], max_new=3))
    device.drain()
    decoded = 2 * len(together)
    first = sum(len(prompt) for prompt in prompts)
    others = len(prompts) * (copies - 1)
    assert device.computed <= first + others + decoded
