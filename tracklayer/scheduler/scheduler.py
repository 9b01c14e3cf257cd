"""Which requests take part in a step, with which tokens, in which slots. Knows no model and no torch.

`plan` never needs the value of a token that is still being sampled, so several plans may be made before the first is
committed. Everything runs on one stream in plan order: a page that is freed now may be given to any later plan.
"""

from __future__ import annotations

import collections.abc
from collections import deque

import numpy as np
from numpy.typing import NDArray

from tracklayer.errors import CapacityError, UserError
from tracklayer.scheduler.planning import Planner
from tracklayer.scheduler.prefix import Ints
from tracklayer.scheduler.roster import Roster
from tracklayer.scheduler.sequence import Committed, Draft, SchedulerConfig, Sequence, SequenceState
from tracklayer.types import EngineRequest, FinishReason, StepPlan

__all__ = ["Committed", "Scheduler", "SchedulerConfig", "Sequence", "SequenceState"]


class Scheduler:
    """Continuous batching over a paged cache with prefix reuse, chunked prefill and preemption.

    A step: `plan`, then `take_preempted` (gather those slots before the plan is launched), later `commit`, in the
    order of the plans. `plan` gives None when nothing can run: commit what is in flight, or wait for `add`.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.roster = Roster(config)
        self.cache, self.running, self.waiting = self.roster.cache, self.roster.running, self.roster.waiting
        self._planner = Planner(config, self.roster)
        self._pending: deque[Draft] = deque()
        self._arrivals = 0

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_free_slots(self) -> int:
        """Slots that can be given out: free, or cached without a user."""
        return self.cache.available * self.config.page_size

    @property
    def num_used_slots(self) -> int:
        return (self.cache.allocator.num_pages - 1) * self.config.page_size - self.num_free_slots

    @property
    def has_work(self) -> bool:
        """Something runs, waits, or is in flight."""
        return bool(self.running or self.waiting or self._pending)

    def add(self, request: EngineRequest, after: Sequence | None = None) -> Sequence:
        """Put a request in the queue. Raises UserError if it can never run, CapacityError if the queue is full.

        `after`: the ended sequence that it goes on for, whose place in the order and first counts it takes over.
        """
        if request.rid in self.roster.known:
            raise UserError(f"a request with rid {request.rid!r} is running already; give each its own rid")
        max_new = self.config.output_limit(request)
        limit = self.config.max_queued_requests
        if after is None and limit is not None and len(self.waiting) >= limit:
            raise CapacityError(
                f"{len(self.waiting)} requests wait already (max_queued_requests {limit}); try again later"
            )
        self._arrivals += 1
        seq = Sequence(
            request=request,
            rank=(-request.priority, self._arrivals),
            prompt_len=len(request.input_ids),
            max_new=max_new,
            prompt=np.array(request.input_ids, np.int32),
            to_sample=max_new,
            logprobs_next=request.logprob_start_len if request.logprob_start_len >= 0 else None,
        )
        if after is not None:
            seq.follow(after)
        self.roster.enter(seq)
        return seq

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run now."""
        draft = Draft(self.roster.step, self.config.max_step_tokens)
        windows = self.cache.windows
        if windows is not None:
            windows.advance(self.running)
        retracted = len(self.roster.preempted)
        self._planner.decodes(draft)
        self._planner.prefills(draft)
        if len(self.roster.preempted) == retracted:
            self._planner.admit(draft)
        if not draft.shares and not self._pending and self.running:
            # All pages are held and none can come free: a request lies twice in the cache, its own tokens beside equal
            # ones in the tree that its children there keep alive. It starts again, and keeps out of the tree.
            self.cache.unpin()
            for seq in self.running[::-1]:
                seq.private = True
                self.roster.preempt(seq)
            self._planner.admit(draft)
        self.cache.unpin()
        if not draft.shares:
            return None
        self.roster.step += 1
        self._pending.append(draft)
        copies = np.concatenate(draft.copies) if draft.copies else np.empty((0, 2), np.int32)
        if windows is None:
            return StepPlan(draft.step, draft.shares, copies)
        windows.fill_in(draft.shares)
        return StepPlan(draft.step, draft.shares, copies, windows.slots(copies))

    def take_preempted(self) -> list[tuple[Sequence, Ints]]:
        """Sequences preempted since the last call, and the slots (int32) of their positions 0..num_computed-1.

        To be called after each `plan` and `retract_all`, before the plan is launched: it may write to these slots.
        """
        taken, self.roster.preempted = self.roster.preempted, []
        return taken

    def commit(self, plan: StepPlan, token_ids: collections.abc.Sequence[int] | NDArray[np.int32]) -> list[Committed]:
        """Take in the tokens of a plan's sampling shares, in plan order. Plans are committed in the order made.

        Gives the news of each sequence that is still alive, prefill-only ones at their end last.
        """
        draft = self._pending.popleft()
        assert plan.step == draft.step, f"commit of step {plan.step}, expected {draft.step}"
        assert len(token_ids) == len(draft.sampled), f"{len(token_ids)} tokens for {len(draft.sampled)} sampling shares"
        tokens = token_ids.tolist() if isinstance(token_ids, np.ndarray) else token_ids
        self.roster.committed = plan.step
        news = []
        for seq, token in zip(draft.sampled, tokens, strict=True):
            seq.in_flight -= 1
            if seq.state is SequenceState.FINISHED:
                continue  # ended while this token was in flight: surplus
            seq.output_ids.append(token)
            count, request = len(seq.output_ids), seq.request
            if token in request.stop_token_ids and count >= request.sampling.min_new_tokens:
                news.append(Committed(seq, token, FinishReason("stop", matched=token), self.roster.end(seq)))
            elif count == seq.max_new:
                news.append(Committed(seq, token, FinishReason("length", length=count), self.roster.end(seq)))
            else:
                news.append(Committed(seq, token))
        for seq in draft.ended:
            seq.in_flight -= 1
            if seq.state is SequenceState.FINISHED:
                continue
            if seq.request.masked_from is not None:  # it stays where it is until `renew` or `finish`
                news.append(Committed(seq, None, None, seq.slots[: seq.num_computed]))
                continue
            news.append(Committed(seq, None, FinishReason("length", length=0), self.roster.end(seq)))
        self.roster.free_held_rows()
        return news

    def renew(self, seq: Sequence, request: EngineRequest) -> None:
        """Go on with a sequence whose pass over masks has come back: `request` has its next pass.

        Positions before the masks of the last pass are kept, all others are computed.
        """
        seq.renew(request)
        if seq.state is SequenceState.RUNNING:
            self.cache.lengthen(seq)

    def finish(self, rid: str, keep: int, reason: FinishReason) -> Committed | None:
        """End a request now, wherever it is, with its first `keep` output tokens; None for an unknown rid."""
        assert keep >= 0, f"keep {keep} tokens"
        seq = self.roster.known.get(rid)
        return None if seq is None else Committed(seq, None, reason, self.roster.end(seq, keep))

    def abort(self, rid: str, reason: FinishReason) -> Committed | None:
        """End a request now with all the output that it has; None for an unknown rid."""
        seq = self.roster.known.get(rid)
        return None if seq is None else self.finish(rid, len(seq.output_ids), reason)

    def flush(self) -> bool:
        """Empty the prefix cache; False, and nothing done, while sequences hold pages."""
        if self.running:
            return False
        self.cache.flush()
        return True

    def retract_all(self) -> None:
        """Send all running sequences back to the queue and free their pages; see `take_preempted`."""
        for seq in self.running[::-1]:
            self.roster.preempt(seq)

    def check_integrity(self) -> None:
        """Assert the invariants; see integrity.py."""
        self.roster.check()
