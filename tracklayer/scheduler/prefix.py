"""Prefix tree: which token sequences lie in the cache, and in which slots.

One radix tree per cache key. An edge holds token ids and their slots as numpy arrays; nodes begin on a page border and
only a leaf may end inside a page. References count the sequences that use a node, along the whole path to the root, so
a node without references has none below it and may be evicted, leaves first, the longest unused first.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
EMPTY: Ints = np.empty(0, np.int32)


def common_prefix(a: Ints, b: Ints) -> int:
    """Length of the longest common prefix of two int32 arrays."""
    n = min(len(a), len(b))
    if n == 0:
        return 0
    differs = a[:n] != b[:n]
    first = int(differs.argmax())
    return first if differs[first] else n


class Node:
    """One edge and what hangs below it. `step`: the plan that computes its tokens; `used`: time of last use."""

    __slots__ = ("children", "key", "keys", "parent", "queued", "refs", "slots", "step", "tokens", "used")

    def __init__(self, parent: Node | None, tokens: Ints, slots: Ints, step: int, key: str = "") -> None:
        self.parent = parent
        self.tokens = tokens
        self.slots = slots
        self.step = step
        self.key = key
        # In order of `keys`, the tokens of their first page: the longest common prefix is always with a neighbour.
        self.children: list[Node] = []
        self.keys: list[bytes] = []
        self.refs = 0
        self.used = 0
        self.queued = False


@dataclass(slots=True)
class Match:
    """Longest prefix found: `length` tokens on whole pages, ending `offset` tokens into `node`'s edge.

    tail: slots (int32) of further tokens inside a page of `tail_node`; to be copied, never shared.
    total: length + tail. longest: what the total will be once the plan that is being made has run.
    """

    node: Node | None = None
    offset: int = 0
    length: int = 0
    tail_node: Node | None = None
    tail: Ints = field(default_factory=lambda: EMPTY)
    newest: int = -1
    longest: int = 0

    @property
    def total(self) -> int:
        return self.length + len(self.tail)


class PrefixTree:
    """Radix trees by cache key. Pages enter by `insert` and leave by `evict` and `clear`, which return them."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.num_evictable = 0  # pages of nodes without references
        self._roots: dict[str, Node] = {}
        self._heap: list[tuple[int, int, Node]] = []  # (used, serial, node): candidates, checked when popped
        self._serial = itertools.count()
        self._clock = 0

    def match(self, key: str, tokens: Ints, limit: int, step: int) -> Match:
        """The longest prefix of tokens[:limit] that plans before `step` have computed. Changes nothing."""
        root = self._roots.get(key)
        if root is None:
            return Match()
        found = self._walk(root, tokens[:limit], None)
        longest = found.total
        if found.newest >= step:
            found = self._walk(root, tokens[:limit], step)
        found.longest = longest
        return found

    def take(self, key: str, match: Match) -> Node:
        """Lock the matched path, split where the match ends; the node returned ends exactly there."""
        node = match.node
        if node is None:
            node = self._roots.get(key) or self._roots.setdefault(key, Node(None, EMPTY, EMPTY, -1, key))
        elif match.offset < len(node.tokens):
            node = self._split(node, match.offset)
        self.lock(node)
        return node

    def path_slots(self, node: Node) -> Ints:
        """Slots (int32) of all tokens from the root to the end of `node`."""
        parts = []
        while node.parent is not None:
            parts.append(node.slots)
            node = node.parent
        return np.concatenate(parts[::-1]) if parts else EMPTY

    def insert(self, node: Node, tokens: Ints, slots: Ints, step: int) -> tuple[Node | None, int]:
        """Enter tokens that follow `node` (locked by the caller), computed by plans up to `step`.

        Returns (new node, index of the first token that entered); (None, n) when all were there already.
        The pages from that index on are the tree's; those before stay the caller's, as duplicates.
        """
        assert len(node.tokens) % self.page_size == 0, "nothing can follow a node that ends inside a page"
        done, n = 0, len(tokens)
        while done < n:
            child, same = self._best_child(node, tokens[done:], None)
            if same == n - done:
                return None, n
            whole = same - same % self.page_size
            if child is None or whole == 0:
                break
            node = child if whole == len(child.tokens) else self._split(child, whole)
            done += whole
        if done == n:
            return None, n
        # Copies: views would keep the whole sequence's arrays alive.
        leaf = Node(node, tokens[done:].copy(), slots[done:].copy(), step)
        self._attach(node, leaf)
        self.num_evictable += self._pages_of(leaf)
        self._touch(leaf)
        return leaf, done

    def withdraw(self, leaf: Node) -> Node:
        """Give a leaf's pages back to its one user, who wants to enter it anew, longer; returns the parent, locked."""
        assert leaf.refs == 1 and not leaf.children, f"{leaf.refs} users, {len(leaf.children)} children"
        return self._detach(leaf)

    def lock(self, node: Node) -> None:
        """Count one more user of the path to `node`."""
        at: Node | None = node
        while at is not None:
            if at.refs == 0:
                self.num_evictable -= self._pages_of(at)
            at.refs += 1
            at = at.parent

    def unlock(self, node: Node) -> None:
        """Take back one `lock` of the same node."""
        at: Node | None = node
        while at is not None:
            assert at.refs > 0, "unlock without lock"
            at.refs -= 1
            if at.refs == 0:
                self.num_evictable += self._pages_of(at)
                self._touch(at)
            root, at = at, at.parent
        self._forget_if_empty(root)

    def evict(self, num_pages: int) -> Ints:
        """Remove up to `num_pages` unreferenced pages from the ends of the longest unused leaves; returns them."""
        freed: list[Ints] = []
        while num_pages > 0 and self._heap:
            used, _, node = heapq.heappop(self._heap)
            node.queued = False
            if node.parent is None or node.refs or node.children:
                continue  # it queues itself again when it becomes an unreferenced leaf
            if node.used != used:
                self._queue(node)
                continue
            pages = node.slots[:: self.page_size] // self.page_size
            keep = max(0, len(pages) - num_pages)
            freed.append(pages[keep:])
            num_pages -= len(pages) - keep
            self.num_evictable -= len(pages) - keep
            if keep:
                node.tokens = node.tokens[: keep * self.page_size]
                node.slots = node.slots[: keep * self.page_size]
                self._queue(node)
            else:
                self._remove(node)
        return np.concatenate(freed) if freed else EMPTY

    def clear(self) -> Ints:
        """Empty all trees and return their pages; no node may be locked."""
        pages = [node.slots[:: self.page_size] // self.page_size for node in self.nodes()]
        assert all(node.refs == 0 for node in self.nodes()), "clear while sequences use the tree"
        self._roots.clear()
        self._heap.clear()
        self.num_evictable = 0
        return np.concatenate(pages) if pages else EMPTY

    def nodes(self) -> Iterator[Node]:
        """Every node, roots too."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children)

    def _walk(self, root: Node, tokens: Ints, before: int | None) -> Match:
        """Follow `tokens` down; `before` leaves out nodes of that plan and later ones."""
        match = Match(node=root)
        node = root
        while match.length < len(tokens):
            child, same = self._best_child(node, tokens[match.length :], before)
            if child is None:
                break
            match.newest = max(match.newest, child.step)
            whole = same - same % self.page_size
            if whole:
                match.node, match.offset, match.length = child, whole, match.length + whole
            if whole < same:
                match.tail_node, match.tail = child, child.slots[whole:same]
            if whole < len(child.tokens):
                break
            node = child
        return match

    def _best_child(self, node: Node, tokens: Ints, before: int | None) -> tuple[Node | None, int]:
        best, best_same = None, 0
        at = bisect.bisect_left(node.keys, self._key(tokens)) if node.keys else 0
        for side in (range(at, len(node.children)), range(at - 1, -1, -1)):
            for i in side:
                child = node.children[i]
                if before is None or child.step < before:
                    same = common_prefix(child.tokens, tokens)
                    if same > best_same:
                        best, best_same = child, same
                    break
        return best, best_same

    def _key(self, tokens: Ints) -> bytes:
        # Any fixed order of the tokens will do, so that of their bytes.
        return tokens[: self.page_size].tobytes()

    def _attach(self, parent: Node, node: Node) -> None:
        key = self._key(node.tokens)
        at = bisect.bisect_left(parent.keys, key)
        parent.keys.insert(at, key)
        parent.children.insert(at, node)
        node.parent = parent

    def _detach(self, node: Node) -> Node:
        parent, at = self._place_of(node)
        del parent.keys[at], parent.children[at]
        node.parent = None
        return parent

    def _place_of(self, node: Node) -> tuple[Node, int]:
        """The parent and the index among its children."""
        assert node.parent is not None, "a root has no parent"
        at = bisect.bisect_left(node.parent.keys, self._key(node.tokens))
        return node.parent, node.parent.children.index(node, at)

    def _split(self, node: Node, offset: int) -> Node:
        """Cut an edge: a new upper node takes its first `offset` tokens, `node` keeps the rest and its users."""
        assert offset % self.page_size == 0 and 0 < offset < len(node.tokens), f"split at {offset}"
        parent, at = self._place_of(node)
        upper = Node(parent, node.tokens[:offset], node.slots[:offset], node.step)
        upper.refs, upper.used = node.refs, node.used
        parent.children[at] = upper
        node.tokens, node.slots = node.tokens[offset:], node.slots[offset:]
        self._attach(upper, node)
        return upper

    def _remove(self, node: Node) -> None:
        parent = self._detach(node)
        if parent.refs == 0 and not parent.children:
            if parent.parent is None:
                self._forget_if_empty(parent)
            else:
                self._queue(parent)

    def _forget_if_empty(self, root: Node) -> None:
        # Keys may be as many as requests: a root that nothing hangs on is dropped.
        if root.refs == 0 and not root.children and self._roots.get(root.key) is root:
            del self._roots[root.key]

    def _touch(self, node: Node) -> None:
        self._clock += 1
        node.used = self._clock
        if not node.children and node.parent is not None:
            self._queue(node)

    def _queue(self, node: Node) -> None:
        if not node.queued:
            node.queued = True
            heapq.heappush(self._heap, (node.used, next(self._serial), node))

    def _pages_of(self, node: Node) -> int:
        return -(-len(node.tokens) // self.page_size)
