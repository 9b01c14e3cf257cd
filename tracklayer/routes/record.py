"""`Routes`: the experts that each token of one sequence went through. numpy only.

T tokens, L MoE layers, K experts chosen, N = T * L rows.

A *row* is the K logical expert ids of one token at one MoE layer, best first. Row t of `Routes` belongs to the token
at position `start + t` **as input**: a sequence of S tokens whose last one was never fed has S - 1 rows.

Ids are kept in the narrowest type that holds every id and a fill value (`narrow_dtype`). A row whose K ids all equal
the fill was never recorded: it is *missing*. Missing rows are explicit (`missing_TL`); no other value means missing.

Layers may choose different numbers of experts (`layer_top_k`): K is the largest, a narrower layer's row ends in the
fill, and the type is then one whose fill is no id, so that an unused place can not be taken for an expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tracklayer.errors import IncompleteRoutes, UserError
from tracklayer.routes.checks import check_distinct, check_range, check_shape, differing
from tracklayer.routes.ids import Array, fill_value, missing_rows, narrow_dtype, narrowed


class Routes:
    """Routes of the tokens at positions start .. start + T - 1 of one sequence. Immutable; slices share memory.

    experts_TLK  ids, integer [T, L, K]; kept as `narrow_dtype(num_experts, K)` (no copy when it already is)
    layer_ids    index in the model's layer list of each of the L columns, ascending
    num_experts  ids lie in [0, num_experts); zero (identity) experts count, shared experts do not
    start        position of the first row
    layer_top_k  how many each layer chooses, None when all choose K; a row's other places hold the fill

    With `check=False` ids are not examined: only for rows that this package recorded or checked itself.
    Raises UserError naming token, layer and value for a wrong shape, an id out of range, ids that are not distinct,
    or a row of which only a part is missing.
    """

    __slots__ = ("_missing_TL", "experts_TLK", "layer_ids", "layer_top_k", "num_experts", "start")

    experts_TLK: Array
    layer_ids: tuple[int, ...]
    layer_top_k: tuple[int, ...] | None
    num_experts: int
    start: int

    def __init__(
        self,
        experts_TLK: npt.ArrayLike,
        layer_ids: Iterable[int],
        num_experts: int,
        start: int = 0,
        *,
        layer_top_k: Iterable[int] | None = None,
        check: bool = True,
    ) -> None:
        ids_TLK = np.asarray(experts_TLK)
        self.layer_ids = tuple(int(i) for i in layer_ids)
        self.num_experts = int(num_experts)
        self.start = int(start)
        self._missing_TL: Array | None = None
        self.layer_top_k = differing(layer_top_k, *ids_TLK.shape[1:]) if ids_TLK.ndim == 3 else None
        check_shape(ids_TLK, self)
        self.experts_TLK = ids_TLK
        narrow = narrow_dtype(self.num_experts, 1 if self.layer_top_k else ids_TLK.shape[2])
        if check or ids_TLK.dtype != narrow:
            check_range(ids_TLK, self)
        if ids_TLK.dtype != narrow:
            ids_TLK = narrowed(ids_TLK, narrow, self.layer_top_k)
        self.experts_TLK = ids_TLK.view()
        self.experts_TLK.flags.writeable = False
        if check:
            check_distinct(self)

    # what it holds

    def __len__(self) -> int:
        return int(self.experts_TLK.shape[0])

    @property
    def shape(self) -> tuple[int, int, int]:
        tokens, layers, top_k = self.experts_TLK.shape
        return int(tokens), int(layers), int(top_k)

    @property
    def stop(self) -> int:
        """Position after the last row."""
        return self.start + len(self)

    @property
    def top_k(self) -> int:
        return int(self.experts_TLK.shape[2])

    @property
    def top_k_L(self) -> Array:
        """int [L]: how many experts each layer chooses."""
        return np.array(self.layer_top_k or [self.top_k] * len(self.layer_ids))

    @property
    def used_LK(self) -> Array:
        """bool [L, K]: places that hold experts; the others hold the fill."""
        used_LK: Array = np.arange(self.top_k) < self.top_k_L[:, None]
        return used_LK

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.experts_TLK.dtype

    @property
    def nbytes(self) -> int:
        return int(self.experts_TLK.nbytes)

    @property
    def missing_TL(self) -> Array:
        """bool [T, L]: True where no row was recorded."""
        if self._missing_TL is None:
            self._missing_TL = missing_rows(self.experts_TLK)
            self._missing_TL.flags.writeable = False
        return self._missing_TL

    @property
    def complete(self) -> bool:
        return not self.missing_TL.any()

    def require_complete(self) -> Routes:
        """Itself; raises IncompleteRoutes naming positions and layers when a row is missing."""
        if not self.complete:
            tokens, columns = np.nonzero(self.missing_TL)
            raise IncompleteRoutes((tokens + self.start).tolist(), [self.layer_ids[c] for c in columns])
        return self

    def to(self, dtype: npt.DTypeLike, *, missing: int | None = -1) -> Array:
        """A new array [T, L, K] of `dtype`; missing rows become K times `missing` (None: they raise).

        Unused places hold `fill_value(dtype)`: -1 in a signed type, the largest value of an unsigned one.
        Raises UserError when the largest id or `missing` does not fit `dtype`, or an unused place would be an id.
        """
        dtype = np.dtype(dtype)
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        if self.num_experts - 1 > high:
            raise UserError(f"ids up to {self.num_experts - 1} do not fit {dtype}: take a wider type")
        ids_TLK = self.experts_TLK.astype(dtype)
        if self.layer_top_k:
            if 0 <= fill_value(dtype) < self.num_experts:
                raise UserError(f"unused places can not be told from expert {fill_value(dtype)} in {dtype}: widen it")
            ids_TLK[:, ~self.used_LK] = fill_value(dtype)
        if missing is None:
            self.require_complete()
        elif not self.complete:
            if not low <= missing <= high:
                raise UserError(f"missing rows as {missing} do not fit {dtype}: take a signed type or another value")
            ids_TLK[self.missing_TL] = missing
        return ids_TLK

    # parts of it, sharing memory

    def _like(self, ids_TLK: Array, start: int) -> Routes:
        return Routes(ids_TLK, self.layer_ids, self.num_experts, start, layer_top_k=self.layer_top_k, check=False)

    def tokens(self, start: int, stop: int | None = None) -> Routes:
        """The rows of positions start .. stop - 1 (default: to the end), which must lie inside. No copy."""
        stop = self.stop if stop is None else stop
        if not self.start <= start <= stop <= self.stop:
            raise UserError(f"positions {start}..{stop} do not lie in the routes' {self.start}..{self.stop}")
        return self._like(self.experts_TLK[start - self.start : stop - self.start], start)

    def layers(self, first: int, end: int) -> Routes:
        """The columns of decoder layers first <= layer < end (a pipeline stage's part). No copy."""
        inside = [c for c, layer in enumerate(self.layer_ids) if first <= layer < end]
        if not inside:
            raise UserError(f"no MoE layer in {first}..{end}; there are {list(self.layer_ids)}")
        columns = slice(inside[0], inside[-1] + 1)
        top_k_L = self.layer_top_k and self.layer_top_k[columns]
        ids_TLK = self.experts_TLK[:, columns, : max(top_k_L) if top_k_L else None]
        return Routes(ids_TLK, self.layer_ids[columns], self.num_experts, self.start, layer_top_k=top_k_L, check=False)

    # joining

    def append(self, other: Routes, *, prefer: Literal["earlier", "later"] | None = None) -> Routes:
        """These rows followed by those of `other` (a later turn, a resumed rollout), as new routes.

        `other.start` says where its rows lie. Rows that both hold must be the same experts, in any order; then the
        earlier order stays. Where one side is missing the other's row is taken. Rows that differ raise UserError
        naming them unless `prefer` says whose to keep. A gap between the two raises.
        """
        self._check_same_model(other)
        if not self.start <= other.start <= self.stop:
            raise UserError(
                f"rows from position {other.start} can not follow rows {self.start}..{self.stop}: positions "
                f"{min(self.stop, other.stop)}..{max(self.start, other.start)} would be without routes"
            )
        overlap = min(self.stop, other.stop) - other.start
        at = other.start - self.start
        joined_TLK = np.concatenate([self.experts_TLK, other.experts_TLK[overlap:]])
        mine_TLK, theirs_TLK = self.experts_TLK[at : at + overlap], other.experts_TLK[:overlap]
        take_TL = self.missing_TL[at : at + overlap] & ~other.missing_TL[:overlap]
        either_missing_TL = self.missing_TL[at : at + overlap] | other.missing_TL[:overlap]
        differ_TL = (np.sort(mine_TLK, -1) != np.sort(theirs_TLK, -1)).any(-1) & ~either_missing_TL
        if differ_TL.any():
            if prefer is None:
                t, c = (int(i) for i in np.argwhere(differ_TL)[0])
                raise UserError(
                    f"{int(differ_TL.sum())} rows that both parts hold differ, first at token {other.start + t} layer "
                    f"{self.layer_ids[c]}: {mine_TLK[t, c].tolist()} then {theirs_TLK[t, c].tolist()}; the parts are "
                    "not of one sequence, or it was computed again: then say prefer='earlier' or 'later'"
                )
            if prefer == "later":
                take_TL = take_TL | differ_TL
        joined_TLK[at : at + overlap][take_TL] = theirs_TLK[take_TL]
        return self._like(joined_TLK, self.start)

    def _check_same_model(self, other: Routes) -> None:
        for name in ("layer_ids", "num_experts", "top_k", "layer_top_k"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise UserError(f"routes of different models can not be joined: {name} {mine} and {theirs}")

    # comparing, printing

    def __eq__(self, other: object) -> bool:
        """Same positions, layers, expert count and ids, order within a row included."""
        if not isinstance(other, Routes):
            return NotImplemented
        mine = (self.start, self.layer_ids, self.num_experts, self.layer_top_k)
        theirs = (other.start, other.layer_ids, other.num_experts, other.layer_top_k)
        return mine == theirs and np.array_equal(self.experts_TLK, other.experts_TLK)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        missing = int(self.missing_TL.sum())
        widths = f"{min(self.layer_top_k)}..{self.top_k}" if self.layer_top_k else self.top_k
        state = "complete" if not missing else f"{missing} of {self.missing_TL.size} rows MISSING"
        return (
            f"Routes(tokens {self.start}..{self.stop}, {len(self.layer_ids)} layers {_ranges(self.layer_ids)}, "
            f"top {widths} of {self.num_experts} experts, {self.dtype}, {state}, {self.nbytes:,} bytes)"
        )


def concat(parts: Iterable[Routes], *, prefer: Literal["earlier", "later"] | None = None) -> Routes:
    """The routes of one sequence from its parts in order (turns, prompt and output), by `Routes.append`.

    The first part must start at position 0: a part with a later start needs the rows before it.
    """
    rest = list(parts)
    if not rest:
        raise UserError("there are no routes to join")
    if rest[0].start != 0:
        raise UserError(
            f"the first part starts at position {rest[0].start}: its earlier rows are needed; ask for routes from 0, "
            "or put the part that holds them in front"
        )
    joined = rest[0]
    for part in rest[1:]:
        joined = joined.append(part, prefer=prefer)
    return joined


def _ranges(ids: Sequence[int]) -> str:
    """[0..3, 5, 7..9] for 0 1 2 3 5 7 8 9."""
    spans: list[list[int]] = []
    for i in ids:
        if spans and i == spans[-1][1] + 1:
            spans[-1][1] = i
        else:
            spans.append([i, i])
    return "[" + ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in spans) + "]"
