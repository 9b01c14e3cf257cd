"""Where whole prompts begin in a step: what the library that knows no pages is given."""

from __future__ import annotations

import numpy as np
import pytest

from tracklayer.runner.batch import cut_whole_prompts
from tracklayer.types import Share


def share(row: int, start: int, count: int) -> Share:
    slots = np.arange(count, dtype=np.int32)
    return Share(str(row), row, start, count, slots, start, None if count == 1 else [0] * count, True)


CASES = {
    "equal neighbours are one group": ([(0, 0, 1024), (1, 0, 1024)], [(0, 2, 1024)], [0, 1], [0, 1024, 2048], [-1, -1]),
    "a tail is cut off": ([(0, 0, 1100)], [(0, 1, 1024)], [0, 0], [0, 1024, 1100], [-1, 1100]),
    "a tail parts neighbours": (
        [(0, 0, 1030), (1, 0, 1024)],
        [(0, 1, 1024), (1030, 1, 1024)],
        [0, 0, 1],
        [0, 1024, 1030, 2054],
        [-1, 1030, -1],
    ),
    "short, cached and decoding stay": (
        [(3, 9, 1), (0, 0, 700), (1, 4096, 2048), (2, 0, 1536)],
        [(2749, 1, 1536)],
        [3, 0, 1, 2],
        [0, 1, 701, 2749, 4285],
        [10, 700, 6144, -1],
    ),
    "nothing": ([(0, 5, 1)], [], [0], [0, 1], [6]),
}


@pytest.mark.parametrize("case", CASES)
def test_cut(case):
    shares, groups, *cut = CASES[case]
    assert cut_whole_prompts([share(*s) for s in shares]) == (groups, tuple(cut))
