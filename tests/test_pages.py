"""The free list and the owners of pages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracklayer.scheduler.pages import PageAllocator


def test_page_zero_is_never_given_out_and_all_others_are():
    pages = PageAllocator(9)
    taken = pages.allocate(8)
    assert sorted(taken.tolist()) == list(range(1, 9)) and pages.num_free == 0 and taken.dtype == np.int32
    assert len(pages.allocate(0)) == 0


def test_more_than_there_is_is_refused_with_both_numbers():
    with pytest.raises(AssertionError, match="5 pages wanted, 3 free"):
        PageAllocator(4).allocate(5)


@pytest.mark.parametrize("bad", [[1, 2], [0]])
def test_a_page_freed_twice_is_seen(bad):
    pages = PageAllocator(4)
    pages.allocate(1)
    with pytest.raises(AssertionError, match="freed twice"):
        pages.free(np.array(bad, np.int32))


def test_what_was_taken_is_not_changed_by_what_is_freed_later():
    pages = PageAllocator(6)
    first, second = pages.allocate(2), pages.allocate(2)
    kept = first.copy()
    pages.free(second)
    pages.allocate(3)
    assert first.tolist() == kept.tolist()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-6, 6), max_size=40))
def test_taken_and_free_are_always_a_partition(steps):
    pages, taken = PageAllocator(20), []
    for step in steps:
        if step >= 0:
            got = pages.allocate(min(step, pages.num_free)).tolist()
            assert not set(got) & set(taken)
            taken += got
        else:
            back, taken = taken[:-step], taken[-step:]
            pages.free(np.array(back, np.int32))
        assert sorted(taken + pages.free_pages().tolist()) == list(range(1, 20))
