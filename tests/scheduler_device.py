"""A pretended device for scheduler tests: it runs plans in order and checks every slot that they touch.

Each slot remembers what was last written to it: the cache key and all tokens up to its own. The "model" is a hash of
that, so what each request must produce is known without any scheduler.
"""

from __future__ import annotations

import zlib
from collections import deque

import numpy as np

from tracklayer.scheduler.scheduler import Committed, Scheduler, SchedulerConfig, Sequence
from tracklayer.scheduler.sight import slots_needed
from tracklayer.types import EngineRequest, FinishReason, SamplingParams, StepPlan

VOCAB = 5


def next_token(key: str, tokens: tuple[int, ...]) -> int:
    return zlib.crc32(repr((key, tokens)).encode()) % VOCAB


def expected_output(request: EngineRequest, max_new: int) -> tuple[list[int], str]:
    """What a request yields when it runs alone without a cache, and how it ends."""
    tokens, output = list(request.input_ids), []
    while len(output) < max_new:
        token = next_token(request.cache_key, tuple(tokens))
        tokens.append(token)
        output.append(token)
        if token in request.stop_token_ids and len(output) >= request.sampling.min_new_tokens:
            return output, "stop"
    return output, "length"


def request(rid, prompt, max_new=4, min_new=0, stop=(), key="", priority=0, logprobs_from=-1) -> EngineRequest:
    sampling = SamplingParams(max_new_tokens=max_new, min_new_tokens=min_new)
    return EngineRequest(
        rid=rid,
        input_ids=list(prompt),
        sampling=sampling,
        stop_token_ids=frozenset(stop),
        cache_key=key,
        priority=priority,
        return_logprob=logprobs_from >= 0,
        logprob_start_len=logprobs_from,
    )


def scheduler(
    num_pages=64, page_size=1, running=8, budget=32, context=200, queued=None, cache=True, sight=None
) -> Scheduler:
    """With `sight`, windowed layers have as few slots as are never lacking."""
    return Scheduler(
        SchedulerConfig(
            num_slots=(num_pages + 1) * page_size,
            page_size=page_size,
            max_running_requests=running,
            max_step_tokens=budget,
            context_length=context,
            max_queued_requests=queued,
            prefix_cache=cache,
            num_window_slots=slots_needed(sight, budget, min(running, budget), page_size) if sight else 0,
            sight=sight,
        )
    )


class Device:
    """Drives a scheduler as the engine does, `depth` plans ahead of the commits."""

    def __init__(self, sched: Scheduler, depth: int = 0) -> None:
        self.sched = sched
        self.depth = depth
        self.kv: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.window_kv: dict[int, tuple[str, tuple[int, ...]]] = {}  # of layers that see a window only
        self.window_slots: dict[int, list[int]] = {}  # by row
        self.rows: dict[int, tuple[EngineRequest, list[int], list[int]]] = {}  # request, tokens, slots
        self.pending: deque[tuple[StepPlan, list[int]]] = deque()
        self.saved: dict[str, int] = {}  # rid -> leading positions gathered at preemptions
        self.seqs: dict[str, Sequence] = {}
        self.done: dict[str, Committed] = {}
        self.logprobs: dict[str, list[int]] = {}
        self.computed = 0
        self.plans: list[StepPlan] = []

    def add(self, req: EngineRequest) -> Sequence:
        self.seqs[req.rid] = self.sched.add(req)
        return self.seqs[req.rid]

    def step(self) -> bool:
        """One turn of the engine's loop; False when there was nothing to do."""
        plan = self.sched.plan()
        self.gather_preempted()
        if plan is not None:
            self.launch(plan)
        worked = plan is not None
        while len(self.pending) > (self.depth if plan is not None else 0):
            self.commit()
            worked = True
            if plan is None:
                break
        return worked

    def gather_preempted(self) -> None:
        for seq, slots in self.sched.take_preempted():
            row_tokens = self.tokens_of(seq)
            self.check_holds(seq.request, row_tokens, slots)
            self.saved[seq.rid] = max(self.saved.get(seq.rid, 0), len(slots))

    def tokens_of(self, seq: Sequence) -> list[int]:
        """All tokens that the device has of a sequence, also those that the scheduler has not been told yet."""
        output, _ = expected_output(seq.request, seq.max_new + 2)
        full = list(seq.request.input_ids)
        for _ in range(seq.max_new + 3):
            full.append(next_token(seq.request.cache_key, tuple(full)))
        assert full[seq.prompt_len :][: len(seq.output_ids)] == seq.output_ids, (output, seq.output_ids)
        return full

    def check_holds(self, req: EngineRequest, tokens: list[int], slots) -> None:
        for position, slot in enumerate(np.asarray(slots).tolist()):
            assert self.kv.get(slot) == (req.cache_key, tuple(tokens[: position + 1])), (req.rid, position, slot)

    def launch(self, plan: StepPlan) -> None:
        budget = self.sched.config.max_step_tokens
        prompt_tokens = sum(s.num_tokens for s in plan.shares if s.token_ids is not None)
        assert plan.shares and prompt_tokens <= budget and plan.copies.dtype == np.int32
        kinds = [share.token_ids is None for share in plan.shares]
        assert kinds == sorted(kinds, reverse=True), "decode shares come first"
        assert len({share.row for share in plan.shares}) == len(plan.shares)
        sources, targets = plan.copies[:, 0].tolist(), plan.copies[:, 1].tolist()
        written = targets + [s for share in plan.shares for s in share.slots[-share.num_tokens :].tolist()]
        assert len(set(written)) == len(written), "two writers of one slot"
        assert not set(sources) & set(written), "a copy's source is overwritten in the same step"
        assert min(written) >= self.sched.config.page_size, "page 0 was given out"
        for source, target in zip(sources, targets, strict=True):
            self.kv[target] = self.kv[source]
        sampled = []
        prepared = [self.enter(share) for share in plan.shares]
        self.attend_windows(plan)
        for share, (req, tokens, slots) in zip(plan.shares, prepared, strict=True):
            assert not set(slots[: share.start]) & (set(written) - set(targets)), "a prefix is written in this step"
            self.check_holds(req, tokens, slots[: share.start])
            for position in range(share.start, share.start + share.num_tokens):
                self.kv[slots[position]] = (req.cache_key, tuple(tokens[: position + 1]))
            if share.samples:
                token = next_token(req.cache_key, tuple(tokens))
                tokens.append(token)
                sampled.append(token)
        self.computed += plan.num_tokens
        self.pending.append((plan, sampled))
        self.plans.append(plan)

    def attend_windows(self, plan: StepPlan) -> None:
        """What windowed layers do: copy, write the step's tokens, then see only what each token may see."""
        sight = self.sched.config.sight
        if sight is None:
            assert all(share.window_slots is None for share in plan.shares) and plan.window_copies is None
            return
        sources, targets = plan.window_copies.T.tolist()
        written = [s for share in plan.shares for s in share.window_slots[-share.num_tokens :].tolist()]
        assert len(set(written)) == len(written) and min(written) >= self.sched.config.page_size
        assert len(set(targets)) == len(targets) and not set(sources) & {*targets, *written}
        self.window_kv |= {target: self.window_kv[source] for source, target in zip(sources, targets, strict=True)}
        seen = []
        for share in plan.shares:
            req, tokens, _ = self.rows[share.row]
            slots = self.window_slots.setdefault(share.row, [])
            slots[share.table_start :] = share.window_slots.tolist()
            for p in range(share.start, share.start + share.num_tokens):
                self.window_kv[slots[p]] = (req.cache_key, tuple(tokens[: p + 1]))
                seen += [(slots[q], req.cache_key, tuple(tokens[: q + 1])) for q in range(int(sight.first(p)), p + 1)]
        for slot, key, tokens in seen:
            assert self.window_kv.get(slot) == (key, tokens), (slot, tokens)

    def enter(self, share):
        """Lay a share into the row's tables, as the runner does."""
        end = share.start + share.num_tokens
        assert len(share.slots) == end - share.table_start and share.slots.dtype == np.int32
        if share.admitted is not None:
            assert share.table_start == 0 and share.history is not None and share.token_ids is not None
            req = share.admitted
            assert share.history[: len(req.input_ids)] == req.input_ids
            assert share.history[share.start : end] == share.token_ids
            self.rows[share.row] = (req, share.history[:end], share.slots.tolist())
        else:
            req, tokens, slots = self.rows[share.row]
            assert share.table_start == share.start == len(slots), "a share must go on where the last one ended"
            if share.token_ids is None:
                assert share.samples and share.num_tokens == 1
            else:
                tokens += share.token_ids
            slots += share.slots.tolist()
        req, tokens, slots = self.rows[share.row]
        assert len(tokens) == len(slots) == end
        if share.logprobs_from is not None:
            last = min(end, len(req.input_ids))
            self.logprobs.setdefault(req.rid, []).extend(range(share.logprobs_from, last))
        return self.rows[share.row]

    def commit(self) -> None:
        plan, tokens = self.pending.popleft()
        for news in self.sched.commit(plan, tokens):
            if news.finish is not None:
                self.end(news)

    def end(self, news: Committed) -> None:
        seq = news.seq
        assert seq.rid not in self.done and news.finish is not None
        self.done[seq.rid] = news
        self.check_holds(seq.request, self.tokens_of(seq), news.slots)
        if seq.output_ids or news.finish.type == "length":
            rows = seq.prompt_len + max(0, len(seq.output_ids) - 1)
            assert max(len(news.slots), self.saved.get(seq.rid, 0)) >= rows, "positions without a row"
            assert len(news.slots) <= rows

    def finish(self, rid: str, keep: int, reason: FinishReason) -> None:
        news = self.sched.finish(rid, keep, reason)
        if news is not None:
            self.end(news)

    def drain(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.sched.has_work:
                break
            assert self.step(), f"stuck: {self.sched.num_running} running, {self.sched.num_waiting} waiting"
            self.sched.check_integrity()
        assert not self.sched.has_work, "requests do not end"
        self.sched.check_integrity()
