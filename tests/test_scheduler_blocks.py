"""Passes over blocks through the scheduler, on a pretended device that remembers what stands in every slot.

A slot holds the tokens that its own block and all before it had when it was computed. Whatever a pass reads before its
first token must be final; what is said to be final of a pass that came back too.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest

from tracklayer.scheduler.scheduler import Committed, Scheduler, SchedulerConfig, Sequence
from tracklayer.types import EngineRequest, FinishReason, SamplingParams, StepPlan

LENGTH, MASK = 4, -1
DONE = FinishReason("length", length=0)


def token_at(tokens: tuple[int, ...]) -> int:
    return zlib.crc32(repr(tokens).encode()) % 5


def final_tokens(prompt: list[int], num_blocks: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < num_blocks * LENGTH:
        tokens.append(token_at(tuple(tokens)))
    return tokens


@dataclass
class Run:
    """One request: what its tokens will be, and which it has; at the end one pass over final tokens if `last`."""

    final: list[int]
    begin: int
    tokens: list[int]
    last: bool
    seq: Sequence | None = None

    def request(self, rid: str) -> EngineRequest:
        over = self.begin >= len(self.final)
        params = SamplingParams(max_new_tokens=0)
        return EngineRequest(
            rid=rid, input_ids=list(self.tokens), sampling=params, masked_from=None if over else self.begin
        )

    def next_block(self) -> None:
        self.begin += LENGTH
        if self.begin < len(self.final):
            self.tokens += [MASK] * LENGTH


@dataclass
class Driver:
    """The engine's loop with random fills, retractions, aborts and early ends."""

    sched: Scheduler
    depth: int
    random: np.random.Generator
    slots: dict[int, tuple[int, ...]] = field(default_factory=dict)
    rows: dict[int, tuple[EngineRequest, list[int]]] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    pending: deque[StepPlan] = field(default_factory=deque)
    computed: int = 0
    ended: int = 0

    def add(self, rid: str, prompt: list[int], num_blocks: int, last: bool) -> None:
        begin = len(prompt) // LENGTH * LENGTH
        tokens = prompt + [MASK] * (begin + LENGTH - len(prompt))
        run = self.runs[rid] = Run(final_tokens(prompt, num_blocks), begin, tokens, last)
        run.seq = self.sched.add(run.request(rid))

    def step(self) -> None:
        plan = self.sched.plan()
        self.sched.take_preempted()
        self.sched.check_integrity()
        if plan is not None:
            self.launch(plan)
            self.pending.append(plan)
        while len(self.pending) > (self.depth if plan is not None else 0):
            self.commit(self.pending.popleft())
        self.sched.check_integrity()
        assert all((node.tokens != MASK).all() for node in self.sched.cache.tree.nodes()), "masks in the prefix tree"

    def holds(self, slots: list[int], tokens: list[int], end: int) -> None:
        for p in range(end):
            stop = min((p // LENGTH + 1) * LENGTH, len(tokens))
            assert self.slots.get(slots[p]) == tuple(tokens[:stop]), f"position {p} is not final"

    def launch(self, plan: StepPlan) -> None:
        for source, target in plan.copies.tolist():
            self.slots[target] = self.slots[source]
        assert len({share.row for share in plan.shares}) == len(plan.shares)
        for share in plan.shares:
            if share.admitted is not None:
                before = self.rows.get(share.row, (None, []))[1] if share.table_start else []
                self.rows[share.row] = (share.admitted, before)
            request, table = self.rows[share.row]
            end = share.start + share.num_tokens
            assert request.rid == share.rid and request.input_ids[share.start : end] == share.token_ids
            assert share.start % LENGTH == 0 and (end % LENGTH == 0 or end == len(request.input_ids))
            table[share.table_start :] = share.slots.tolist()
            assert len(table) == end
            self.holds(table, request.input_ids, share.start)
            self.computed += share.num_tokens
        for share in plan.shares:
            request, table = self.rows[share.row]
            for p in range(share.start, share.start + share.num_tokens):
                stop = min((p // LENGTH + 1) * LENGTH, len(request.input_ids))
                self.slots[table[p]] = tuple(request.input_ids[:stop])

    def commit(self, plan: StepPlan) -> None:
        for news in self.sched.commit(plan, []):
            rid = news.seq.rid
            run = self.runs[rid]
            assert news.seq is run.seq
            if news.finish is not None:
                assert run.begin >= len(run.final), "ended before its last pass"
                self.holds(news.slots.tolist(), run.tokens, len(news.slots))
                del self.runs[rid]
                self.ended += 1
                continue
            self.holds(news.slots.tolist(), run.tokens, min(run.begin, len(news.slots)))
            masked = [p for p in range(run.begin, len(run.tokens)) if run.tokens[p] == MASK]
            for p in self.random.permutation(masked)[: self.random.integers(1, LENGTH + 1)].tolist():
                run.tokens[p] = run.final[p]
            if MASK not in run.tokens[run.begin :]:
                run.next_block()
            if run.begin >= len(run.final) and not run.last:
                self.end(rid)
            else:
                self.sched.renew(news.seq, run.request(rid))

    def end(self, rid: str) -> Committed | None:
        self.runs.pop(rid)
        self.ended += 1
        return self.sched.finish(rid, 0, DONE)


def make(pages: int = 64, page: int = LENGTH, rows: int = 8, budget: int = 32, cache: bool = True, **rest) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            num_slots=(pages + 1) * page,
            page_size=page,
            max_running_requests=rows,
            max_step_tokens=budget,
            context_length=200,
            prefix_cache=cache,
            block_length=LENGTH,
            **rest,
        )
    )


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(40))
def test_every_pass_reads_final_tokens(seed, depth):
    random = np.random.default_rng(seed)
    page = LENGTH * int(random.integers(1, 4))
    rows, budget, longest = int(random.integers(1, 7)), 5 * int(random.integers(1, 6)) + 3, 48
    pages = int(random.integers(-(-longest // page) + 1, 40))
    sched = make(pages, page, rows, budget, cache=bool(random.random() < 0.8))
    driver = Driver(sched, depth, random)
    base = random.integers(0, 5, 40).tolist()
    for n in range(10):
        prompt = base[: random.integers(1, 32)] + random.integers(0, 5, random.integers(0, 4)).tolist()
        blocks = len(prompt) // LENGTH + int(random.integers(1, 4))
        driver.add(str(n), prompt, min(blocks, longest // LENGTH - 1), bool(random.random() < 0.5))
    for _ in range(3000):
        if not driver.runs:
            break
        driver.step()
        chance = random.random()
        if chance < 0.03 and not driver.pending:
            sched.retract_all()
            sched.take_preempted()
        elif chance < 0.05 and driver.runs:
            driver.end(random.choice(list(driver.runs)))
        sched.check_integrity()
    assert not driver.runs and driver.ended == 10, f"still running: {list(driver.runs)}"
    while driver.pending:
        driver.commit(driver.pending.popleft())
    sched.check_integrity()
    assert not sched.has_work and sched.num_used_slots == 0


@pytest.mark.parametrize("cache", [True, False])
def test_a_pass_computes_what_is_not_final_and_no_more(cache):
    """One block a pass, two when the pass before has finished one, whether or not prefixes are kept for others."""
    sched = make(cache=cache)
    driver = Driver(sched, 0, np.random.default_rng(1))
    prompt = list(range(10))
    driver.add("a", prompt, 5, last=True)
    passes = []
    while driver.runs:
        before, begin = driver.computed, driver.runs["a"].begin
        driver.step()
        passes.append((begin, driver.computed - before))
    assert passes[0] == (8, 12), "the prompt, and its rest with masks"
    for (before, _), (begin, count) in pairwise(passes):
        finished, masked = begin > before, begin < 20
        assert count == LENGTH * (finished + masked), passes


def test_room_is_kept_for_blocks_to_come():
    """A request is not let in where the pages would have to be taken from it at once."""
    sched = make(pages=10, page=LENGTH)
    driver = Driver(sched, 0, np.random.default_rng(3))
    driver.add("first", list(range(7)), 6, last=False)
    driver.add("second", list(range(10, 17)), 6, last=False)
    retracted = 0
    while driver.runs:
        plan = sched.plan()
        retracted += len(sched.take_preempted())
        if plan is not None:
            driver.launch(plan)
            driver.commit(plan)
    assert retracted == 0


def test_renewing_keeps_the_place_in_the_order():
    sched = make(rows=1)
    driver = Driver(sched, 0, np.random.default_rng(2))
    driver.add("a", [1, 2, 3], 4, last=False)
    driver.add("b", [1, 2, 4], 4, last=False)
    while "a" in driver.runs:
        driver.step()
        assert [seq.rid for seq in sched.waiting] == ["b"]
    assert "b" in driver.runs and driver.runs["b"].seq.num_computed == 0


def test_only_a_pass_over_masks_can_be_renewed():
    sched = make()
    request = EngineRequest(rid="a", input_ids=[1, 2, 3], sampling=SamplingParams(max_new_tokens=4))
    seq = sched.add(request)
    with pytest.raises(AssertionError):
        sched.renew(seq, replace(request, input_ids=[1, 2, 3, 4]))
