"""Which requests take part in a step, with which tokens, in which slots. Knows no model and no torch.

`plan` never needs the value of a token that is still being sampled, so several plans may be made before the first is
committed. Everything runs on one stream in plan order: a page that is freed now may be given to any later plan.
"""

from __future__ import annotations

import bisect
import collections.abc
from collections import deque

import numpy as np
from numpy.typing import NDArray

from tracklayer.errors import CapacityError, UserError
from tracklayer.scheduler.integrity import check
from tracklayer.scheduler.pages import PagedCache
from tracklayer.scheduler.prefix import EMPTY, Ints, Match, common_prefix
from tracklayer.scheduler.sequence import Committed, Draft, SchedulerConfig, Sequence, SequenceState, by_rank
from tracklayer.types import EngineRequest, FinishReason, Share, StepPlan

__all__ = ["Committed", "Scheduler", "SchedulerConfig", "Sequence", "SequenceState"]

# A request is admitted only when its prompt and this many tokens of every running one fit: else one of them would be
# preempted soon, and what it computed be thrown away. More room (a share of what each may still sample) was tried: it
# cost more in steps, with fewer in each, than it saved in tokens computed again.
HEADROOM_TOKENS = 32
# A request waits a step for a prefix that is being computed if it saves this many tokens, or all that it could save.
WORTH_WAITING_TOKENS = 32


class Scheduler:
    """Continuous batching over a paged cache with prefix reuse, chunked prefill and preemption.

    A step: `plan`, then `take_preempted` (gather those slots before the plan is launched), later `commit`, in the
    order of the plans. `plan` gives None when nothing can run: commit what is in flight, or wait for `add`.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.cache = PagedCache(config.num_slots, config.page_size, config.prefix_cache, config.block_length)
        self.running: list[Sequence] = []  # by rank
        self.waiting: list[Sequence] = []  # by rank
        self._sequences: dict[str, Sequence] = {}
        # Each running request decodes one token a step, so more than the budget of a step can not run.
        self._num_rows = min(config.max_running_requests, config.max_step_tokens)
        self._free_rows = list(range(self._num_rows - 1, -1, -1))
        self._held_rows: list[tuple[int, int]] = []  # (last step that uses it, row), of sequences that left
        self._pending: deque[Draft] = deque()
        self._preempted: list[tuple[Sequence, Ints]] = []
        self._step = 0  # of the next plan
        self._committed = -1
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
        if request.rid in self._sequences:
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
        self._sequences[request.rid] = seq
        bisect.insort(self.waiting, seq, key=by_rank)
        return seq

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run now."""
        draft = Draft(self._step, self.config.max_step_tokens)
        retracted = len(self._preempted)
        self._plan_decodes(draft)
        self._plan_prefills(draft)
        if len(self._preempted) == retracted:
            self._admit(draft)
        if not draft.shares and not self._pending and self.running:
            # All pages are held and none can come free: a request lies twice in the cache, its own tokens beside equal
            # ones in the tree that its children there keep alive. It starts again, and keeps out of the tree.
            self.cache.unpin()
            for seq in self.running[::-1]:
                seq.private = True
                self._preempt(seq)
            self._admit(draft)
        self.cache.unpin()
        if not draft.shares:
            return None
        self._step += 1
        self._pending.append(draft)
        copies = np.concatenate(draft.copies) if draft.copies else np.empty((0, 2), np.int32)
        return StepPlan(draft.step, draft.shares, copies)

    def take_preempted(self) -> list[tuple[Sequence, Ints]]:
        """Sequences preempted since the last call, and the slots (int32) of their positions 0..num_computed-1.

        To be called after each `plan` and `retract_all`, before the plan is launched: it may write to these slots.
        """
        taken, self._preempted = self._preempted, []
        return taken

    def commit(self, plan: StepPlan, token_ids: collections.abc.Sequence[int] | NDArray[np.int32]) -> list[Committed]:
        """Take in the tokens of a plan's sampling shares, in plan order. Plans are committed in the order made.

        Gives the news of each sequence that is still alive, prefill-only ones at their end last.
        """
        draft = self._pending.popleft()
        assert plan.step == draft.step, f"commit of step {plan.step}, expected {draft.step}"
        assert len(token_ids) == len(draft.sampled), f"{len(token_ids)} tokens for {len(draft.sampled)} sampling shares"
        tokens = token_ids.tolist() if isinstance(token_ids, np.ndarray) else token_ids
        self._committed = plan.step
        news = []
        for seq, token in zip(draft.sampled, tokens, strict=True):
            seq.in_flight -= 1
            if seq.state is SequenceState.FINISHED:
                continue  # ended while this token was in flight: surplus
            seq.output_ids.append(token)
            count, request = len(seq.output_ids), seq.request
            if token in request.stop_token_ids and count >= request.sampling.min_new_tokens:
                news.append(Committed(seq, token, FinishReason("stop", matched=token), self._end(seq)))
            elif count == seq.max_new:
                news.append(Committed(seq, token, FinishReason("length", length=count), self._end(seq)))
            else:
                news.append(Committed(seq, token))
        for seq in draft.ended:
            seq.in_flight -= 1
            if seq.state is not SequenceState.FINISHED:
                news.append(Committed(seq, None, FinishReason("length", length=0), self._end(seq)))
        self._free_rows += [row for step, row in self._held_rows if step <= self._committed]
        self._held_rows = [held for held in self._held_rows if held[0] > self._committed]
        return news

    def finish(self, rid: str, keep: int, reason: FinishReason) -> Committed | None:
        """End a request now, wherever it is, with its first `keep` output tokens; None for an unknown rid."""
        assert keep >= 0, f"keep {keep} tokens"
        seq = self._sequences.get(rid)
        return None if seq is None else Committed(seq, None, reason, self._end(seq, keep))

    def abort(self, rid: str, reason: FinishReason) -> Committed | None:
        """End a request now with all the output that it has; None for an unknown rid."""
        seq = self._sequences.get(rid)
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
            self._preempt(seq)

    def check_integrity(self) -> None:
        """Assert the invariants; see integrity.py."""
        self.cache.check(self.running)
        spare = self._free_rows + [row for _, row in self._held_rows]
        check(self.running, self.waiting, spare, self._num_rows, self._sequences.values())

    def _plan_decodes(self, draft: Draft) -> None:
        """One token for each sequence past its prefill, in order of rank."""
        ready = [seq for seq in self.running if seq.to_sample > 0 and seq.num_computed >= len(seq.fill)]
        size, cache = self.config.page_size, self.cache
        lacking = [seq for seq in ready if seq.num_computed == seq.num_allocated]
        if len(lacking) <= cache.available:
            pages = cache.allocate(len(lacking))
            for seq, page in zip(lacking, pages.tolist(), strict=True):
                cache.append_page(seq, page)
        else:
            for seq in lacking:
                if seq.state is SequenceState.RUNNING and self._make_room(seq):
                    cache.extend(seq, seq.num_allocated + size)
        for seq in ready:
            at = seq.num_computed
            row = seq.row
            if row is None or at == seq.num_allocated:
                continue  # preempted above, or no page for it now
            draft.shares.append(Share(seq.request.rid, row, at, 1, seq.slots[at : at + 1], at, None, True))
            draft.sampled.append(seq)
            seq.num_computed = at + 1
            seq.in_flight += 1
            seq.to_sample -= 1
            seq.last_step = draft.step

    def _plan_prefills(self, draft: Draft) -> None:
        """The next chunk of each sequence that is inside its prefill, as far as budget and pages go."""
        for seq in [seq for seq in self.running if seq.prefilling]:
            if draft.budget <= 0 or seq.state is not SequenceState.RUNNING:
                continue
            room = self._room(seq)
            # Others' shares of this plan can not be taken back, so others give way only while there are none; that
            # is enough for progress.
            if room == 0 and not draft.shares and self._make_room(seq):
                room = self._room(seq)
            count = seq.whole_blocks(seq.num_computed, min(draft.budget, room), self.config.block_length)
            if count > 0:
                self._add_prefill(draft, seq, count)

    def _room(self, seq: Sequence) -> int:
        """Tokens that the sequence could be given slots for."""
        return seq.num_allocated - seq.num_computed + self.cache.available * self.config.page_size

    def _admit(self, draft: Draft) -> None:
        """Start waiting sequences in order of rank while budget, rows and pages last."""
        if not self.waiting or not self._free_rows or draft.budget <= 0:
            return
        before = len(self.running)
        draft.wanted_pages = sum(self._wanted_pages(seq) for seq in self.running)
        draft.prefilling = [seq for seq in self.running if seq.prefilling]
        for seq in self.waiting:
            # A preempted sequence starts again when its tokens in flight have come; those behind it wait with it.
            if draft.budget < self.config.block_length or not self._free_rows or seq.in_flight:
                break
            if seq.waits_for is not None:
                if seq.waits_for.state is SequenceState.RUNNING and seq.waits_for.prefilling:
                    continue
                seq.waits_for = None
            seq.fill = seq.known()
            match = self.cache.match(seq, draft.step)
            if self._better_wait(draft, seq, match):
                continue
            if not self._start(draft, seq, match):
                break
        if len(self.running) > before:
            self.waiting = [seq for seq in self.waiting if seq.state is SequenceState.WAITING]

    def _better_wait(self, draft: Draft, seq: Sequence, match: Match) -> bool:
        """Whether a running sequence is computing enough of this one's prefix to wait for it."""
        limit = seq.hit_limit()
        worth = min(WORTH_WAITING_TOKENS, limit - match.total)
        if worth <= 0 or not self.config.prefix_cache:
            return False
        for owner in draft.prefilling:
            if owner.request.cache_key != seq.request.cache_key or owner.private or len(owner.fill) <= match.total:
                continue
            if owner.fill[match.total] != seq.fill[match.total]:
                continue  # cheap, and mostly decides
            if common_prefix(owner.fill, seq.fill[:limit]) - match.total >= worth:
                seq.waits_for = owner
                return True
        return match.longest - match.total >= worth

    def _start(self, draft: Draft, seq: Sequence, match: Match) -> bool:
        """Admit one sequence with its first chunk; False when the pages do not suffice."""
        cache, size = self.cache, self.config.page_size
        cache.place(seq, match)
        tail = match.tail
        need = cache.pages_for(len(seq.fill)) - match.length // size
        if cache.available < need + draft.wanted_pages:
            if self.running:
                cache.release(seq, EMPTY, draft.step)
                return False
            if cache.available == 0:  # alone, it may take even the page that its tail would be copied from
                cache.unpin()
                tail = EMPTY
        start = match.length + len(tail)
        most = min(draft.budget, cache.available * size - len(tail))
        chunk = seq.whole_blocks(start, most, self.config.block_length)
        assert chunk > 0, f"no page for {seq.rid!r} although nothing runs"
        cache.extend(seq, start + chunk)
        if len(tail):
            draft.copies.append(np.stack((tail, seq.slots[match.length : start]), axis=1))
        seq.num_computed = start
        seq.state, seq.row = SequenceState.RUNNING, self._free_rows.pop()
        bisect.insort(self.running, seq, key=by_rank)
        if not seq.admitted_once:
            seq.admitted_once, seq.cached_tokens = True, start
        self._add_prefill(draft, seq, chunk, admitted=True)
        draft.wanted_pages += self._wanted_pages(seq)
        if seq.prefilling:
            draft.prefilling.append(seq)
        return True

    def _add_prefill(self, draft: Draft, seq: Sequence, count: int, admitted: bool = False) -> None:
        """Plan the next `count` tokens of the prefill."""
        start, end = seq.num_computed, seq.num_computed + count
        self.cache.extend(seq, end)
        seq.num_computed = end
        table_start = 0 if admitted else start
        assert seq.row is not None
        last = not seq.prefilling
        share = Share(
            rid=seq.rid,
            row=seq.row,
            start=start,
            num_tokens=count,
            slots=seq.slots[table_start:end],
            table_start=table_start,
            token_ids=seq.fill[start:end].tolist(),
            samples=last and seq.to_sample > 0,
        )
        if admitted:
            share.admitted, share.history = seq.request, seq.request.input_ids + seq.output_ids
        if seq.logprobs_next is not None and seq.logprobs_next < min(end, seq.prompt_len):
            if seq.request.return_logprob:
                share.logprobs_from = max(seq.logprobs_next, start)
            seq.logprobs_next = min(end, seq.prompt_len)
        if last:
            (draft.sampled if share.samples else draft.ended).append(seq)
            seq.in_flight += 1
            seq.to_sample -= share.samples
        seq.last_step = draft.step
        draft.shares.append(share)
        draft.budget -= count
        self.cache.publish(seq, draft.step)

    def _wanted_pages(self, seq: Sequence) -> int:
        """Pages that a running sequence is expected to need soon."""
        end = max(seq.num_computed, len(seq.fill)) + min(seq.to_sample, HEADROOM_TOKENS)
        return max(0, self.cache.pages_for(end) - seq.num_allocated // self.config.page_size)

    def _make_room(self, seq: Sequence) -> bool:
        """Get one page, preempting sequences of lower rank from the lowest up; False if that can not help now."""
        while self.cache.available == 0:
            for victim in reversed(self.running):
                # One whose last token is in flight gives its pages back at its commit anyway.
                if victim is seq or victim.prefilling or victim.to_sample > 0:
                    break
            if victim is seq:
                return False
            self._preempt(victim)
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Back to the queue; the tree keeps what it may of the sequence's tokens."""
        self._preempted.append((seq, seq.slots[: seq.num_computed]))
        self._leave_cache(seq, seq.num_computed)
        seq.state = SequenceState.WAITING
        seq.num_retractions += 1
        bisect.insort(self.waiting, seq, key=by_rank)

    def _end(self, seq: Sequence, keep: int | None = None) -> Ints:
        """End a sequence with its first `keep` output tokens (all by default); the slots of its routes."""
        slots = EMPTY
        count = len(seq.output_ids)
        if seq.state is SequenceState.RUNNING:
            kept = count if keep is None else min(keep, count)
            slots = seq.slots[: min(seq.num_computed, seq.prompt_len + max(0, kept - 1))]
            self._leave_cache(seq, min(seq.num_computed, seq.prompt_len + max(0, count - 1)))
        else:
            self.waiting.remove(seq)
        if keep is not None:
            del seq.output_ids[keep:]
        seq.state = SequenceState.FINISHED
        del self._sequences[seq.rid]
        return slots

    def _leave_cache(self, seq: Sequence, num_tokens: int) -> None:
        """Take row and pages from a running sequence; of its first `num_tokens` the known may stay in the tree."""
        tokens = seq.known()[: min(num_tokens, seq.cacheable)]
        self.cache.release(seq, tokens, self._step - 1)
        self.running.remove(seq)
        assert seq.row is not None
        if seq.last_step <= self._committed:
            self._free_rows.append(seq.row)
        else:
            self._held_rows.append((seq.last_step, seq.row))
        seq.row = None
