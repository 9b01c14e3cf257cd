"""How far layers with a window or chunks look back, and how many slots that takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

STRIDE = 16  # positions that a sequence goes on before pages behind it are let go: not at every token


@dataclass(frozen=True, slots=True)
class Sight:
    """How far layers look back: over `window` positions, their own included, or to the begin of a chunk; either may be
    None, and with both a layer of each kind is meant."""

    window: int | None = None
    chunk: int | None = None

    def first(self, position: NDArray[np.int64] | int) -> NDArray[np.int64]:
        """The first position that a token at `position` (any shape) sees in any of the layers."""
        first: NDArray[np.int64] = np.asarray(position)
        if self.window:
            first = np.minimum(first, position - self.window + 1)
        if self.chunk:
            first = np.minimum(first, position - position % self.chunk)
        return np.maximum(first, 0)

    @property
    def reach(self) -> int:
        """The most positions that a token sees."""
        return max(self.window or 0, self.chunk or 0)


def slots_needed(sight: Sight, max_step_tokens: int, max_rows: int, page_size: int) -> int:
    """Slots that are never lacking, page 0 included: what all rows can see, a step's tokens, and pages begun."""
    each = sight.reach + max(STRIDE, page_size) + 2 * page_size
    return (-(-(max_step_tokens + max_rows * each) // page_size) + 1) * page_size
