"""Pages of layers that see a window only: fewer than the others', lent to pages of tokens while these can be seen.

A layer with a sliding window, or with chunks, never looks back further than `Sight.first` says: its keys of what came
before need no place. Such layers keep a cache of their own. A page of the main cache is lent one of its pages when it
is allocated, which is held as long as a running sequence can see a token of it, and then stays for the sake of prefixes
until others want it, the longest idle first. Routes lie in the main cache's slots: they stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from tracklayer.scheduler.prefix import Ints
from tracklayer.scheduler.sequence import Sequence as Request
from tracklayer.scheduler.sight import STRIDE, Sight
from tracklayer.types import Share


class WindowPages:
    """Which window page each page of the main cache has: page_of [pages] int32, 0 for none; page 0 is never lent."""

    def __init__(self, num_slots: int, num_pages: int, page_size: int, sight: Sight) -> None:
        self.page_size, self.sight = page_size, sight
        self.page_of = np.zeros(num_pages, np.int32)
        self._main_of = np.zeros(num_slots // page_size, np.int32)
        self._holders = np.zeros(num_pages, np.int32)
        self._idle_since = np.zeros(len(self._main_of), np.int64)
        self._free = np.arange(len(self._main_of) - 1, 0, -1, dtype=np.int32)
        self._num_free = len(self._free)
        self._clock = 0

    def lend(self, pages: Ints) -> None:
        """A window page for each of these, which were just allocated for a sequence that holds them."""
        count = len(pages)
        if count > self._num_free:
            self._evict(count - self._num_free)
        self._num_free -= count
        lent = self._free[self._num_free : self._num_free + count]
        self.page_of[pages], self._main_of[lent], self._holders[pages] = lent, pages, 1

    def _evict(self, count: int) -> None:
        """Take at least `count` idle pages back, and some more: looking for them costs a pass over all."""
        idle = np.flatnonzero((self._main_of > 0) & (self._holders[self._main_of] == 0))
        assert count <= len(idle), f"{count} window pages wanted, {len(idle)} idle: too few for the rows and the step"
        count = min(len(idle), max(count, len(self._main_of) // 16))
        self._take(idle[np.argpartition(self._idle_since[idle], count - 1)[:count]])

    def _take(self, lent: NDArray[np.integer]) -> None:
        self.page_of[self._main_of[lent]] = 0
        self._main_of[lent] = 0
        self._free[self._num_free : self._num_free + len(lent)] = lent
        self._num_free += len(lent)

    def hold(self, pages: Ints) -> None:
        """Count one more sequence that sees these distinct pages, which have window pages."""
        assert self.page_of[pages].all(), "a page is held whose window page is gone"
        self._holders[pages] += 1

    def drop(self, pages: Ints) -> None:
        """Take back one `hold` of these distinct pages."""
        self._holders[pages] -= 1
        self._clock += 1
        self._idle_since[self.page_of[pages]] = self._clock

    def free(self, pages: Ints) -> None:
        """The main cache has these pages back; nobody holds them."""
        assert not self._holders[pages].any(), "a page is freed that a sequence sees"
        lent = self.page_of[pages]
        self._take(lent[lent > 0])

    def inherit(self, heirs: Ints, slots: Ints) -> None:
        """Equal tokens lie in `slots`, which will be freed, and in the slots `heirs`, both main slots on whole pages:

        heirs without window pages get those of the others.
        """
        heirs, pages = self.pages_of(heirs), self.pages_of(slots)
        moves = (self.page_of[heirs] == 0) & (self.page_of[pages] > 0) & (heirs != pages)
        heirs, pages = heirs[moves], pages[moves]
        lent = self.page_of[pages]
        self.page_of[heirs], self._main_of[lent], self.page_of[pages] = lent, heirs, 0

    def pages_of(self, slots: Ints) -> Ints:
        """The main pages under slots that begin on a page border."""
        return slots[:: self.page_size] // self.page_size

    def usable(self, slots: Ints, tail: Ints) -> int:
        """How much of a cached prefix (its main slots on whole pages, and of a tail) a sequence can go on from."""
        size, lent = self.page_size, self.page_of[self.pages_of(slots)] > 0
        # After k pages: the last one without a window page must lie before what is seen from there.
        last_missing = np.maximum.accumulate(np.concatenate(([-1], np.where(lent, -1, np.arange(len(lent))))))
        ends = np.arange(len(lent) + 1)
        enough = last_missing < np.maximum(self.sight.first(ends * size) // size, 0)
        enough[0] = True
        best = int(np.flatnonzero(enough)[-1])
        whole = best == len(lent)
        return best * size + (len(tail) if whole and len(tail) and self.page_of[tail[0] // size] else 0)

    def enter(self, seq: Request, length: int) -> None:
        """A sequence begins with `length` cached tokens on whole pages: hold what it sees from there on."""
        seq.window_from = int(self.sight.first(length)) // self.page_size
        seq.window_due = 0
        self.hold(self.pages_of(seq.slots[seq.window_from * self.page_size : length]))

    def advance(self, sequences: Iterable[Request]) -> None:
        """Let go of what the next token of each does not see any more."""
        for seq in sequences:
            position = seq.num_computed
            if position >= seq.window_due:
                seq.window_due = position + STRIDE
                first = int(self.sight.first(position)) // self.page_size
                if first > seq.window_from:
                    size = self.page_size
                    self.drop(self.pages_of(seq.slots[seq.window_from * size : first * size]))
                    seq.window_from = first

    def leave(self, seq: Request) -> None:
        """The sequence gives up its slots: it sees nothing any more."""
        self.drop(self.pages_of(seq.slots[seq.window_from * self.page_size : seq.num_allocated]))
        seq.window_from = 0

    def slots(self, slots: Ints) -> Ints:
        """The window slots of main slots (any shape); in page 0 where there are none, which nobody reads."""
        if self.page_size == 1:
            return self.page_of[slots]
        return self.page_of[slots // self.page_size] * self.page_size + slots % self.page_size

    def fill_in(self, shares: Sequence[Share]) -> None:
        """Say of each share where windowed layers keep its positions."""
        found = self.slots(np.concatenate([share.slots for share in shares]))
        at = 0
        for share in shares:
            share.window_slots = found[at : at + len(share.slots)]
            at += len(share.slots)

    def check(self, holders: Iterable[Request], free: Ints) -> None:
        """Assert that lent pages and pages match, holders are counted right, and nothing held lacks its page."""
        counted = np.zeros(len(self.page_of), np.int64)
        for seq in holders:
            np.add.at(counted, self.pages_of(seq.slots[seq.window_from * self.page_size : seq.num_allocated]), 1)
        wrong = np.flatnonzero(counted != self._holders)
        assert not len(wrong), f"pages {wrong[:8].tolist()} have {self._holders[wrong[:8]].tolist()} holders counted"
        assert self.page_of[counted > 0].all(), "a page that is seen has no window page"
        assert not self.page_of[free].any() and self.page_of[0] == 0, "a free page has a window page"
        has = np.flatnonzero(self.page_of)
        assert (self._main_of[self.page_of[has]] == has).all() and len(has) == np.count_nonzero(self._main_of)
        unused = np.sort(np.concatenate((self._free[: self._num_free], self.page_of[has])))
        assert (unused == np.arange(1, len(self._main_of))).all(), "window pages are lost, or lent twice"
