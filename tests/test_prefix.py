"""The prefix tree against a plain list of everything that was entered."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracklayer.scheduler.prefix import PrefixTree, common_prefix


def ints(values) -> np.ndarray:
    return np.array(values, np.int32)


class Pages:
    """Hands out fresh pages, so that every slot has one meaning for a whole test."""

    def __init__(self, page_size: int) -> None:
        self.page_size, self.next = page_size, 1

    def slots(self, num_tokens: int) -> np.ndarray:
        count = -(-num_tokens // self.page_size)
        first, self.next = self.next * self.page_size, self.next + count
        return np.arange(first, first + count * self.page_size, dtype=np.int32)[:num_tokens]


def enter(tree, pages, tokens, key="", step=0):
    """As a sequence does that hits nothing: own slots, entered at its end. Returns the slots."""
    slots = pages.slots(len(tokens))
    match = tree.match(key, ints(tokens), 0, step + 1)
    node = tree.take(key, match)
    tree.insert(node, ints(tokens), slots, step)
    tree.unlock(node)
    return slots


def found_slots(tree, key, match) -> list[int]:
    node = tree.take(key, match)
    slots = tree.path_slots(node).tolist() + match.tail.tolist()
    tree.unlock(node)
    return slots


@pytest.mark.parametrize(
    "a, b, same", [([], [1], 0), ([1], [1], 1), ([1, 2], [1, 3], 1), ([2], [1], 0), ([1], [1, 1], 1)]
)
def test_common_prefix(a, b, same):
    assert common_prefix(ints(a), ints(b)) == same


tokens_st = st.lists(st.sampled_from([1, 2, 256, 513, 65536]), min_size=1, max_size=20)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(tokens_st, min_size=1, max_size=12),
    st.lists(tokens_st, min_size=1, max_size=6),
    st.sampled_from([1, 3, 4]),
)
def test_a_match_is_the_longest_common_prefix_with_anything_entered(entered, asked, page_size):
    tree, pages = PrefixTree(page_size), Pages(page_size)
    meaning = {}
    for tokens in entered:
        for i, slot in enumerate(enter(tree, pages, tokens).tolist()):
            meaning[slot] = tokens[: i + 1]
    for tokens in asked + entered:
        match = tree.match("", ints(tokens), len(tokens), 9)
        assert match.total == match.longest == max(common_prefix(ints(tokens), ints(t)) for t in entered)
        assert match.length % page_size == 0 and len(match.tail) < page_size
        slots = found_slots(tree, "", match)
        assert [meaning[slot] for slot in slots] == [tokens[: i + 1] for i in range(len(slots))]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(tokens_st, st.integers(0, 5)), min_size=1, max_size=12), tokens_st, st.integers(0, 6))
def test_a_match_keeps_to_earlier_plans_and_says_what_is_coming(entered, asked, step):
    entered.sort(key=lambda pair: pair[1])
    tree, pages = PrefixTree(1), Pages(1)
    for tokens, at in entered:
        enter(tree, pages, tokens, step=at)
    match = tree.match("", ints(asked), len(asked), step)
    ready = [common_prefix(ints(asked), ints(t)) for t, at in entered if at < step]
    assert match.total == max(ready, default=0)
    assert match.longest == max(common_prefix(ints(asked), ints(t)) for t, _ in entered)


@pytest.mark.parametrize("page_size", [1, 4])
def test_keys_part_and_limits_hold(page_size):
    tree, pages = PrefixTree(page_size), Pages(page_size)
    enter(tree, pages, list(range(10)), key="a")
    assert tree.match("b", ints(range(10)), 10, 9).total == 0
    for limit in range(11):
        assert tree.match("a", ints(range(10)), limit, 9).total == limit


def test_the_same_tokens_entered_again_stay_the_callers():
    tree, pages = PrefixTree(4), Pages(4)
    enter(tree, pages, list(range(10)))
    root = tree.take("", tree.match("", ints([]), 0, 9))
    assert tree.insert(root, ints(range(7)), pages.slots(7), 0) == (None, 7)
    leaf, start = tree.insert(root, ints([*range(8), 50, 51]), pages.slots(10), 0)
    assert start == 8 and leaf.tokens.tolist() == [50, 51]
    tree.unlock(root)


def test_a_leaf_that_ends_inside_a_page_is_withdrawn_and_entered_anew():
    tree, pages = PrefixTree(4), Pages(4)
    slots = pages.slots(12)
    root = tree.take("", tree.match("", ints([]), 0, 9))
    leaf, _ = tree.insert(root, ints([5, 6]), slots[:2], 0)
    other = enter(tree, pages, [5, 9, 9, 9, 9])
    tree.lock(leaf)
    tree.unlock(root)
    assert tree.withdraw(leaf) is root and tree.match("", ints([5, 6]), 2, 9).total == 1
    _, start = tree.insert(root, ints([5, 6, 7, 8, 9]), slots[:5], 1)
    assert start == 0
    tree.unlock(root)
    assert found_slots(tree, "", tree.match("", ints([5, 6, 7, 8, 9]), 5, 9)) == slots[:5].tolist()
    assert found_slots(tree, "", tree.match("", ints([5, 9, 9, 9, 1]), 5, 9)) == other[:4].tolist()
    assert tree.num_evictable == 4


def test_eviction_takes_the_longest_unused_ends_first_and_nothing_that_is_used():
    tree, pages = PrefixTree(1), Pages(1)
    old = enter(tree, pages, [1, 2, 3, 4])
    new = enter(tree, pages, [1, 2, 7, 8])
    held = tree.take("", tree.match("", ints([1, 2, 7]), 3, 9))
    assert tree.num_evictable == 3
    assert tree.evict(1).tolist() == [old[3]], "the end of the older leaf"
    assert tree.match("", ints([1, 2, 3, 4]), 4, 9).total == 3
    assert sorted(tree.evict(100).tolist()) == sorted([old[2], new[3]])
    assert tree.num_evictable == 0 and tree.match("", ints([1, 2, 7, 8]), 4, 9).total == 3
    tree.unlock(held)
    assert sorted(tree.evict(100).tolist()) == sorted([old[0], old[1], new[2]])
    assert list(tree.nodes()) == [], "a root that nothing hangs on is dropped"


def test_use_makes_young_again():
    tree, pages = PrefixTree(1), Pages(1)
    first, second = enter(tree, pages, [1, 2]), enter(tree, pages, [5, 6])
    tree.unlock(tree.take("", tree.match("", ints([1, 2]), 2, 9)))
    assert sorted(tree.evict(2).tolist()) == second.tolist()
    assert sorted(tree.evict(2).tolist()) == first.tolist()


def test_clear_gives_all_pages_once_and_is_refused_while_in_use():
    tree, pages = PrefixTree(4), Pages(4)
    for tokens in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7], [1, 2], [9] * 13):
        enter(tree, pages, tokens, key=str(tokens[-1] % 2))
    held = tree.take("1", tree.match("1", ints([9] * 13), 13, 9))
    with pytest.raises(AssertionError, match="while sequences use"):
        tree.clear()
    tree.unlock(held)
    evictable = tree.num_evictable
    cleared = tree.clear().tolist()
    assert len(set(cleared)) == len(cleared) == evictable
    assert tree.num_evictable == 0 and tree.match("1", ints([9] * 13), 13, 9).total == 0 and len(tree.evict(5)) == 0


def test_many_prompts_that_begin_alike_are_still_found_fast():
    """256 prompts behind one first token, in pages of 16: no list of siblings is scanned."""
    rng = np.random.default_rng(3)
    tree, pages = PrefixTree(16), Pages(16)
    prompts = [ints([1, *rng.integers(2, 30000, 40)]) for _ in range(256)]
    for prompt in prompts:
        enter(tree, pages, prompt)
    compared = 0
    plain = common_prefix

    def counting(a, b):
        nonlocal compared
        compared += 1
        return plain(a, b)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tracklayer.scheduler.prefix.common_prefix", counting)
        for prompt in prompts:
            assert tree.match("", prompt, len(prompt), 9).total == 41
    assert compared <= 256 * 4
