"""What a step holds: a token of each sequence that decodes, then chunks of prompts, then requests that wait."""

from __future__ import annotations

import numpy as np

from tracklayer.scheduler.prefix import EMPTY, Match, common_prefix
from tracklayer.scheduler.roster import Roster
from tracklayer.scheduler.sequence import Draft, SchedulerConfig, Sequence, SequenceState
from tracklayer.types import Share

# A request is admitted only when its prompt and this many tokens of every running one fit: else one of them would be
# preempted soon, and what it computed be thrown away. More room (a share of what each may still sample) was tried: it
# cost more in steps, with fewer in each, than it saved in tokens computed again.
HEADROOM_TOKENS = 32
# A request waits a step for a prefix that is being computed if it saves this many tokens, or all that it could save.
WORTH_WAITING_TOKENS = 32


class Planner:
    """Fills a Draft, giving slots to its tokens: `decodes`, then `prefills`, then `admit`."""

    def __init__(self, config: SchedulerConfig, roster: Roster) -> None:
        self.config = config
        self.roster = roster
        self.cache = roster.cache

    def decodes(self, draft: Draft) -> None:
        """One token for each sequence past its prefill, in order of rank."""
        ready = [seq for seq in self.roster.running if seq.to_sample > 0 and seq.num_computed >= len(seq.fill)]
        size, cache = self.config.page_size, self.cache
        lacking = [seq for seq in ready if seq.num_computed == seq.num_allocated]
        if len(lacking) <= cache.available:
            pages = cache.allocate(len(lacking))
            for seq, page in zip(lacking, pages.tolist(), strict=True):
                cache.append_page(seq, page)
        else:
            for seq in lacking:
                if seq.state is SequenceState.RUNNING and self.roster.make_room(seq):
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

    def prefills(self, draft: Draft) -> None:
        """The next chunk of each sequence that is inside its prefill, as far as budget and pages go."""
        for seq in [seq for seq in self.roster.running if seq.prefilling]:
            if draft.budget <= 0 or seq.state is not SequenceState.RUNNING:
                continue
            room = self._room(seq)
            # Others' shares of this plan can not be taken back, so others give way only while there are none; that
            # is enough for progress.
            if room == 0 and not draft.shares and self.roster.make_room(seq):
                room = self._room(seq)
            count = seq.whole_blocks(seq.num_computed, min(draft.budget, room), self.config.block_length)
            if count > 0:
                self._add_prefill(draft, seq, count)

    def _room(self, seq: Sequence) -> int:
        """Tokens that the sequence could be given slots for."""
        return seq.num_allocated - seq.num_computed + self.cache.available * self.config.page_size

    def admit(self, draft: Draft) -> None:
        """Start waiting sequences in order of rank while budget, rows and pages last."""
        if not self.roster.waiting or not self.roster.free_rows or draft.budget <= 0:
            return
        before = len(self.roster.running)
        draft.wanted_pages = sum(self._wanted_pages(seq) for seq in self.roster.running)
        draft.prefilling = [seq for seq in self.roster.running if seq.prefilling]
        for seq in self.roster.waiting:
            # A preempted sequence starts again when its tokens in flight have come; those behind it wait with it.
            if draft.budget < self.config.block_length or not self.roster.free_rows or seq.in_flight:
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
        if len(self.roster.running) > before:
            self.roster.settle()

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
            if self.roster.running:
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
        self.roster.start(seq)
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
        if admitted or seq.renewed:
            share.admitted = seq.request
            share.history = seq.request.input_ids + seq.output_ids if seq.output_ids else seq.request.input_ids
            seq.renewed = False
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
        more = seq.to_sample if seq.request.masked_from is None else HEADROOM_TOKENS
        end = max(seq.num_computed, len(seq.fill)) + min(more, HEADROOM_TOKENS)
        return max(0, self.cache.pages_for(end) - seq.num_allocated // self.config.page_size)
