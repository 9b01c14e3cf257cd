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
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tracklayer.errors import IncompleteRoutes, UserError

Array = npt.NDArray[Any]
CHECK_ROWS = 1 << 15  # rows examined at a time, so that the scratch arrays stay in the cache


def narrow_dtype(num_experts: int, top_k: int = 2) -> np.dtype[Any]:
    """The type in which ids in [0, num_experts) are kept: uint8 (fill 255), int16 or int32 (fill -1).

    With 256 experts id 255 is also the fill: a row of at least two distinct ids can not be all 255, so uint8 still
    does; with top_k = 1 (which also stands for layers that differ in it) the fill must be no id, and int16 is taken.
    """
    if num_experts <= 255 or (num_experts == 256 and top_k >= 2):
        return np.dtype(np.uint8)
    return np.dtype(np.int16 if num_experts <= 1 << 15 else np.int32)


def fill_value(dtype: npt.DTypeLike) -> int:
    """What all K ids of a missing row are: the largest value of an unsigned type, -1 in a signed one."""
    dtype = np.dtype(dtype)
    return int(np.iinfo(dtype).max) if dtype.kind == "u" else -1


def differing(layer_top_k: Iterable[int] | None, layers: int, top_k: int) -> tuple[int, ...] | None:
    """How many experts each of the layers chooses, checked; None when all choose top_k. Raises UserError."""
    if layer_top_k is None:
        return None
    whole = isinstance(layer_top_k, Iterable) and all(isinstance(k, (int, np.integer)) for k in layer_top_k)
    counts = tuple(int(k) for k in layer_top_k) if whole else ()
    if len(counts) != layers or max(counts, default=0) != top_k or min(counts) < 1:
        raise UserError(
            f"layer_top_k must have one number for each of {layers} layers, 1 or more, the largest being the width "
            f"{top_k}; got {layer_top_k!r}"
        )
    return counts if min(counts) < top_k else None


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
        self._check_shape(ids_TLK)
        self.experts_TLK = ids_TLK
        narrow = narrow_dtype(self.num_experts, 1 if self.layer_top_k else ids_TLK.shape[2])
        if check or ids_TLK.dtype != narrow:
            _check_range(ids_TLK, self)
        if ids_TLK.dtype != narrow:
            ids_TLK = _narrow(ids_TLK, narrow, self.layer_top_k)
        self.experts_TLK = ids_TLK.view()
        self.experts_TLK.flags.writeable = False
        if check:
            _check_distinct(self)

    def _check_shape(self, ids_TLK: Array) -> None:
        if ids_TLK.ndim != 3 or ids_TLK.dtype.kind not in "iu":
            raise UserError(
                f"routes must be an integer array [tokens, layers, top_k], got {ids_TLK.dtype} {list(ids_TLK.shape)}"
            )
        layers, top_k = ids_TLK.shape[1:]
        if layers != len(self.layer_ids) or layers == 0:
            raise UserError(f"routes have {layers} layer columns but {len(self.layer_ids)} layer ids were given")
        if any(b <= a for a, b in pairwise(self.layer_ids)) or self.layer_ids[0] < 0:
            raise UserError(f"layer_ids must ascend from 0 or more, got {list(self.layer_ids)}")
        if not 1 <= top_k <= self.num_experts:
            raise UserError(f"{top_k} distinct experts per token can not be chosen from {self.num_experts}")
        if self.start < 0:
            raise UserError(f"start must be 0 or more, got {self.start}")
        fill = fill_value(ids_TLK.dtype)
        if (top_k == 1 or self.layer_top_k) and 0 <= fill < self.num_experts and (ids_TLK == fill).any():
            given, reading = self.layer_top_k or 1, "an unused place" if self.layer_top_k else "a missing row"
            raise UserError(
                f"with top_k {given}, {fill} in {ids_TLK.dtype} can be expert {fill} or {reading}: widen it"
            )

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
            self._missing_TL = _missing(self.experts_TLK)
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


def _missing(ids_TLK: Array) -> Array:
    """bool [T, L]: all K ids are the fill. The first column rules out most rows cheaply."""
    fill = fill_value(ids_TLK.dtype)
    missing_TL: Array = ids_TLK[..., 0] == fill
    if missing_TL.any():
        missing_TL &= (ids_TLK == fill).all(-1)
    return missing_TL


def _check_range(ids_TLK: Array, routes: Routes) -> None:
    """Every id in [0, num_experts), or its whole row is missing."""
    if ids_TLK.size == 0:
        return
    fill = fill_value(ids_TLK.dtype)
    top, low = int(ids_TLK.max()), (int(ids_TLK.min()) if ids_TLK.dtype.kind == "i" else 0)
    if low >= 0 and top < routes.num_experts and not routes.layer_top_k:
        return
    bad_TLK = ((ids_TLK < 0) | (ids_TLK >= routes.num_experts)) & ~_missing(ids_TLK)[..., None]
    if routes.layer_top_k:
        bad_TLK = np.where(routes.used_LK, bad_TLK, ids_TLK != fill)
    if not bad_TLK.any():
        return
    t, c, k = (int(i) for i in np.argwhere(bad_TLK)[0])
    row = ids_TLK[t, c].tolist()
    remedy = "check num_experts, and columns of shared experts"
    if k >= routes.top_k_L[c]:
        raise UserError(
            f"token {routes.start + t} layer {routes.layer_ids[c]} chooses {routes.top_k_L[c]} experts, the places "
            f"after them must hold {fill}: row {row} ({int(bad_TLK.sum())} such places)"
        )
    if row[k] == fill:
        remedy = "a row may be missing as a whole only"
    raise UserError(
        f"token {routes.start + t} layer {routes.layer_ids[c]}: expert id {row[k]} is not in "
        f"0..{routes.num_experts - 1} (row {row}, {int(bad_TLK.sum())} such ids): {remedy}"
    )


def _narrow(ids_TLK: Array, narrow: np.dtype[Any], layer_top_k: tuple[int, ...] | None) -> Array:
    """Cast ids that are known to be in range; the fill becomes the narrow type's fill."""
    out_TLK = ids_TLK.astype(narrow)
    source, target = fill_value(ids_TLK.dtype), fill_value(narrow)
    # Two's complement turns -1 into 255 and 65535 into -1 by itself; only a widening cast needs the explicit step.
    if ids_TLK.dtype.itemsize < narrow.itemsize and ids_TLK.dtype.kind == "u" and (ids_TLK == source).any():
        out_TLK[ids_TLK == source if layer_top_k else _missing(ids_TLK)] = target
    return out_TLK


def _check_distinct(routes: Routes) -> None:
    """The K ids of a row differ from each other, unless the row is missing or they are of unused places."""
    top_k, fill = routes.top_k, fill_value(routes.dtype)
    tokens = max(1, CHECK_ROWS // len(routes.layer_ids))
    for first in range(0, len(routes) if top_k > 1 else 0, tokens):
        block_TLK = routes.experts_TLK[first : first + tokens]
        # One line per choice makes each comparison a pass over contiguous memory: 10 times a sort of every row.
        columns_KN = np.ascontiguousarray(block_TLK.reshape(-1, top_k).T)
        same_N = np.zeros(columns_KN.shape[1], dtype=bool)
        for k in range(1, top_k):
            for j in range(k):
                equal_N = columns_KN[j] == columns_KN[k]
                same_N |= equal_N & (columns_KN[k] != fill) if routes.layer_top_k else equal_N
        if not same_N.any():
            continue
        bad_TL = same_N.reshape(block_TLK.shape[:2]) & ~_missing(block_TLK)
        if bad_TL.any():
            t, c = (int(i) for i in np.argwhere(bad_TL)[0])
            row = block_TLK[t, c].tolist()
            raise UserError(
                f"token {routes.start + first + t} layer {routes.layer_ids[c]}: "
                f"the {top_k} experts must differ, got {row}"
                + ("; an all-zero row was never recorded, or the layer is dense" if not any(row) else "")
            )
