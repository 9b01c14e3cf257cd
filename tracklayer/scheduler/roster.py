"""Who runs and who waits, and what comes and goes with it: the row of a running sequence and its pages."""

from __future__ import annotations

import bisect

from tracklayer.scheduler.integrity import check
from tracklayer.scheduler.pages import PagedCache
from tracklayer.scheduler.prefix import EMPTY, Ints
from tracklayer.scheduler.sequence import SchedulerConfig, Sequence, SequenceState, by_rank


class Roster:
    """The sequences that live, by state, with the rows and the cache that the running ones hold.

    running, waiting: by rank; always the same two lists. known: all of them by rid. preempted: those that lost their
    pages since these were last asked for, with their slots. step: of the next plan; committed: the last step that was.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.cache = PagedCache(config)
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.known: dict[str, Sequence] = {}
        self.preempted: list[tuple[Sequence, Ints]] = []
        self.step = 0
        self.committed = -1
        # Each running request decodes one token a step, so more than the budget of a step can not run.
        self._num_rows = min(config.max_running_requests, config.max_step_tokens)
        self.free_rows = list(range(self._num_rows - 1, -1, -1))
        self._held_rows: list[tuple[int, int]] = []  # (last step that uses it, row), of sequences that left

    def enter(self, seq: Sequence) -> None:
        """Take in a new sequence, which waits."""
        self.known[seq.rid] = seq
        bisect.insort(self.waiting, seq, key=by_rank)

    def start(self, seq: Sequence) -> None:
        """Let a waiting sequence run, in a row of its own. It stays in the queue until `settle`."""
        seq.state, seq.row = SequenceState.RUNNING, self.free_rows.pop()
        bisect.insort(self.running, seq, key=by_rank)

    def settle(self) -> None:
        """Take those that were started out of the queue."""
        self.waiting[:] = [seq for seq in self.waiting if seq.state is SequenceState.WAITING]

    def free_held_rows(self) -> None:
        """Give back the rows of sequences that left, as far as no step in flight uses them."""
        self.free_rows += [row for step, row in self._held_rows if step <= self.committed]
        self._held_rows = [held for held in self._held_rows if held[0] > self.committed]

    def make_room(self, seq: Sequence) -> bool:
        """Get one page, preempting sequences of lower rank from the lowest up; False if that can not help now."""
        while self.cache.available == 0:
            for victim in reversed(self.running):
                # One whose last token is in flight gives its pages back at its commit anyway.
                if victim is seq or victim.prefilling or victim.to_sample > 0:
                    break
            if victim is seq:
                return False
            self.preempt(victim)
        return True

    def preempt(self, seq: Sequence) -> None:
        """Back to the queue; the tree keeps what it may of the sequence's tokens."""
        self.preempted.append((seq, seq.slots[: seq.num_computed]))
        self._leave(seq, seq.num_computed)
        seq.state = SequenceState.WAITING
        seq.num_retractions += 1
        bisect.insort(self.waiting, seq, key=by_rank)

    def end(self, seq: Sequence, keep: int | None = None) -> Ints:
        """End a sequence with its first `keep` output tokens (all by default); the slots of its routes."""
        slots = EMPTY
        count = len(seq.output_ids)
        if seq.state is SequenceState.RUNNING:
            kept = count if keep is None else min(keep, count)
            slots = seq.slots[: min(seq.num_computed, seq.prompt_len + max(0, kept - 1))]
            self._leave(seq, min(seq.num_computed, seq.prompt_len + max(0, count - 1)))
        else:
            self.waiting.remove(seq)
        if keep is not None:
            del seq.output_ids[keep:]
        seq.state = SequenceState.FINISHED
        del self.known[seq.rid]
        return slots

    def _leave(self, seq: Sequence, num_tokens: int) -> None:
        """Take row and pages from a running sequence; of its first `num_tokens` the known may stay in the tree."""
        tokens = seq.known()[: min(num_tokens, seq.cacheable)]
        self.cache.release(seq, tokens, self.step - 1)
        self.running.remove(seq)
        assert seq.row is not None
        if seq.last_step <= self.committed:
            self.free_rows.append(seq.row)
        else:
            self._held_rows.append((seq.last_step, seq.row))
        seq.row = None

    def check(self) -> None:
        """Assert the invariants; see integrity.py."""
        self.cache.check(self.running)
        spare = self.free_rows + [row for _, row in self._held_rows]
        check(self.running, self.waiting, spare, self._num_rows, self.known.values())
