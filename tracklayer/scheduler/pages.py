"""Pages of the KV cache: the free list, and who holds the rest (a sequence or the prefix tree).

Page p is slots p * page_size .. (p + 1) * page_size - 1. Page 0 is never given out: padded rows write there.
Positions are tokens' places in a sequence, slots their places in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tracklayer.scheduler.prefix import EMPTY, Ints, Match, Node, PrefixTree
from tracklayer.scheduler.sequence import SchedulerConfig, Sequence
from tracklayer.scheduler.windows import WindowPages


class PageAllocator:
    """A stack of free pages, taken and returned as int32 arrays."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages - 1
        self._stack = np.arange(num_pages - 1, 0, -1, dtype=np.int32)
        self._is_free = np.ones(num_pages, np.bool_)
        self._is_free[0] = False

    def allocate(self, count: int) -> Ints:
        assert 0 <= count <= self.num_free, f"{count} pages wanted, {self.num_free} free"
        self.num_free -= count
        pages = self._stack[self.num_free : self.num_free + count][::-1].copy()
        self._is_free[pages] = False
        return pages

    def free(self, pages: Ints) -> None:
        assert not self._is_free[pages].any() and (pages > 0).all(), f"pages freed twice, or page 0: {pages.tolist()}"
        self._is_free[pages] = True
        self._stack[self.num_free : self.num_free + len(pages)] = pages
        self.num_free += len(pages)

    def free_pages(self) -> Ints:
        """The free pages, in no order."""
        return self._stack[: self.num_free]


class PagedCache:
    """The pages of all sequences and of the prefix tree. Every page is free, or one sequence's own, or the tree's."""

    def __init__(self, config: SchedulerConfig) -> None:
        size = self.page_size = config.page_size
        self.block_length = config.block_length
        self.allocator = PageAllocator(config.num_slots // size)
        self.tree = PrefixTree(size)
        self.prefix_cache = config.prefix_cache
        self.windows: WindowPages | None = None
        if config.num_window_slots and config.sight is not None:
            self.windows = WindowPages(config.num_window_slots, self.allocator.num_pages, size, config.sight)
        self._offsets = np.arange(size, dtype=np.int32)
        self._pinned: list[tuple[Node, Ints]] = []  # with the page that is copied from

    @property
    def available(self) -> int:
        """Pages that `extend` can give: free, or in the tree without a user."""
        return self.allocator.num_free + self.tree.num_evictable

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> Ints:
        """Take `count` pages, evicting from the tree as needed; at most `available`."""
        if count > self.allocator.num_free:
            self._free(self.tree.evict(count - self.allocator.num_free))
        pages = self.allocator.allocate(count)
        if self.windows is not None:
            self.windows.lend(pages)
        return pages

    def _free(self, pages: Ints) -> None:
        if self.windows is not None:
            self.windows.free(pages)
        self.allocator.free(pages)

    def extend(self, seq: Sequence, end: int) -> None:
        """Give slots to positions up to `end`."""
        count = self.pages_for(end) - seq.num_allocated // self.page_size
        if count > 0:
            pages = self.allocate(count)
            slots = (pages[:, None] * self.page_size + self._offsets).ravel()
            seq.slots[seq.num_allocated : seq.num_allocated + len(slots)] = slots
            seq.num_allocated += len(slots)

    def append_page(self, seq: Sequence, page: int) -> None:
        """Give an allocated page to the sequence's next positions."""
        at, size = seq.num_allocated, self.page_size
        if size == 1:
            seq.slots[at] = page
        else:
            seq.slots[at : at + size] = page * size + self._offsets
        seq.num_allocated = at + size

    def match(self, seq: Sequence, step: int) -> Match:
        """The prefix of seq.fill that is in the cache, as far as the sequence may use it."""
        if not self.prefix_cache:
            return Match()
        block, limit = self.block_length, seq.hit_limit()
        found = self.tree.match(seq.request.cache_key, seq.fill, limit - limit % block, step)
        if found.total % block:
            found = self.tree.match(seq.request.cache_key, seq.fill, found.total - found.total % block, step)
        return found if self.windows is None else self._seen(seq, found, step)

    def _seen(self, seq: Sequence, found: Match, step: int) -> Match:
        """As much of a match as windowed layers can go on from."""
        assert self.windows is not None
        usable = self.windows.usable(self._path(found), found.tail)
        if usable == found.total:
            return found
        less = self.tree.match(seq.request.cache_key, seq.fill, usable, step)
        assert self.windows.usable(self._path(less), less.tail) == less.total == usable
        return less

    def _path(self, match: Match) -> Ints:
        """Slots of a match on whole pages."""
        return self.tree.path_slots(match.node)[: match.length] if match.node is not None else EMPTY

    def place(self, seq: Sequence, match: Match) -> None:
        """Lay the matched whole pages under the sequence and lock them; pin the page that the tail is copied from."""
        seq.node = self.tree.take(seq.request.cache_key, match)
        seq.slots = np.empty(self._most_slots(seq), np.int32)
        seq.slots[: match.length] = self.tree.path_slots(seq.node)
        seq.num_allocated = seq.num_computed = seq.num_inserted = match.length
        if self.windows is not None:
            self.windows.enter(seq, match.length)
        if match.tail_node is not None:
            page = match.tail[:1] // self.page_size
            self.tree.lock(match.tail_node)
            if self.windows is not None:
                self.windows.hold(page)
            self._pinned.append((match.tail_node, page))

    def lengthen(self, seq: Sequence) -> None:
        """Make room for slots of all tokens that the sequence may have now."""
        if self._most_slots(seq) > len(seq.slots):
            slots = np.empty(self._most_slots(seq), np.int32)
            slots[: seq.num_allocated] = seq.slots[: seq.num_allocated]
            seq.slots = slots

    def _most_slots(self, seq: Sequence) -> int:
        return self.pages_for(seq.prompt_len + seq.max_new) * self.page_size

    def unpin(self) -> None:
        """Let go of the pages that tails are copied from, once no page of this plan can be taken any more."""
        for node, page in self._pinned:
            if self.windows is not None:
                self.windows.drop(page)
            self.tree.unlock(node)
        self._pinned.clear()

    def publish(self, seq: Sequence, step: int) -> None:
        """Enter the sequence's prefilled tokens, of which the last are in plan `step`, into the tree.

        Inside a prefill only whole pages enter; at its end also the page that is begun, which the sequence goes on
        writing: the tree knows only the part that is entered.
        """
        end = min(seq.num_computed, seq.cacheable)
        if seq.prefilling or end < seq.num_computed:
            end -= end % self.page_size
        if not self.prefix_cache or seq.private or end <= seq.num_inserted:
            return
        start = self._insert(seq, seq.fill, end, step)
        if start is not None:
            if start > seq.num_inserted:
                seq.duplicates.append((seq.num_inserted, start))
            seq.num_inserted = end

    def release(self, seq: Sequence, tokens: Ints, step: int) -> None:
        """Take all pages from the sequence; the tree keeps `tokens` (int32, known and computed by plans to `step`)."""
        assert seq.node is not None
        if self.windows is not None:
            self.windows.leave(seq)
        if self.prefix_cache and len(tokens) > seq.num_inserted:
            start = self._insert(seq, tokens, len(tokens), step)
            if start is not None:
                seq.duplicates.append((seq.num_inserted, start))
                seq.num_inserted = len(tokens)
        if self.windows is not None and self.prefix_cache and (seq.duplicates or len(tokens) > seq.num_inserted):
            equals = self._path(self.tree.match(seq.request.cache_key, tokens, len(tokens), step + 1))
            self.windows.inherit(equals, seq.slots[: len(equals)])
        self._free(self.own_pages(seq))
        self.tree.unlock(seq.node)
        seq.node, seq.slots, seq.duplicates = None, EMPTY, []
        seq.num_allocated = seq.num_computed = seq.num_inserted = 0

    def _insert(self, seq: Sequence, tokens: Ints, end: int, step: int) -> int | None:
        """Enter positions num_inserted..end; the first that entered, or None when the tree has them all."""
        assert seq.node is not None
        if seq.num_inserted % self.page_size:  # the page that `publish` found begun
            seq.num_inserted -= len(seq.node.tokens)
            seq.node = self.tree.withdraw(seq.node)
        old, begin = seq.node, seq.num_inserted
        node, entered = self.tree.insert(old, tokens[begin:end], seq.slots[begin:end], step)
        if node is None:
            return None
        self.tree.lock(node)
        self.tree.unlock(old)
        seq.node = node
        return begin + entered

    def own_pages(self, seq: Sequence) -> Ints:
        """Pages of a sequence that are not in the tree."""
        rest = self.pages_for(seq.num_inserted) * self.page_size
        parts = [seq.slots[start:end] for start, end in seq.duplicates if end > start]
        parts.append(seq.slots[rest : seq.num_allocated])
        return np.concatenate([part[:: self.page_size] for part in parts]) // self.page_size

    def flush(self) -> None:
        """Empty the tree; no sequence may hold pages."""
        self._free(self.tree.clear())

    def check(self, holders: Iterable[Sequence]) -> None:
        """Assert that each page has exactly one owner and that reference counts are right."""
        holders = list(holders)
        if self.windows is not None:
            self.windows.check(holders, self.allocator.free_pages())
        owners = np.zeros(self.allocator.num_pages, np.int64)
        np.add.at(owners, self.allocator.free_pages(), 1)
        refs: dict[int, int] = {}
        assert not self._pinned, "pages stay pinned after a plan"
        for seq in holders:
            np.add.at(owners, self.own_pages(seq), 1)
            node = seq.node
            while node is not None:
                refs[id(node)] = refs.get(id(node), 0) + 1
                node = node.parent
        evictable = 0
        for node in self.tree.nodes():
            pages = node.slots[:: self.page_size] // self.page_size
            np.add.at(owners, pages, 1)
            assert node.refs == refs.get(id(node), 0), f"{node.refs} references counted, {refs.get(id(node), 0)} held"
            evictable += len(pages) if node.refs == 0 else 0
        assert owners[0] == 0, "page 0 was given out"
        wrong = np.flatnonzero(owners[1:] != 1) + 1
        assert not len(wrong), f"pages {wrong[:8].tolist()} have {owners[wrong[:8]].tolist()} owners instead of one"
        assert evictable == self.tree.num_evictable, f"{self.tree.num_evictable} pages evictable, not {evictable}"
