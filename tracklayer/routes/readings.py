"""How many rows, layers and ids a payload's size stands for: the one reading that the declarations leave.

A form may leave open whether dense layers have columns, and whether the last token has a row; of a payload only the
number of ids may be known. None that fits, or two, are refused with what would.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tracklayer.errors import UserError
from tracklayer.routes.forms import Form, RouteShape
from tracklayer.routes.ids import Array


@dataclass(frozen=True, slots=True)
class Reading:
    """One way to read a payload's size: rows x columns x width."""

    layers: str
    last_row: bool | None
    rows: int
    columns: int
    width: int

    def lengths(self, axes: str) -> tuple[int, int, int]:
        return (self.rows, self.columns, self.width) if axes == "TLK" else (self.columns, self.rows, self.width)

    def __str__(self) -> str:
        last = "" if self.last_row is None else f", {'with' if self.last_row else 'without'} a row for the last token"
        return f'{self.rows} rows x {self.columns} layers (layers="{self.layers}") x {self.width}{last}'


def read_sizes(ids: Array, form: Form, shape: RouteShape, start: int, num_tokens: int | None, width: int) -> Reading:
    """The one reading of the payload's size that the declarations leave; refuses none and several."""
    if ids.ndim not in (1, 3):
        raise UserError(f"routes should be flat or [tokens, layers, top_k], got shape {list(ids.shape)}")
    declared = _readings(ids, form, shape, start, num_tokens, width)
    if len(declared) == 1:
        return declared[0]
    if declared:
        both = "; or ".join(str(reading) for reading in declared)
        raise UserError(f"{_size(ids)} can be read as {both}: declare layers, last_row or num_tokens")
    expected = f"{shape.top_k} experts of {len(shape.layer_ids)} MoE layers ({shape.num_hidden_layers} decoder layers)"
    if num_tokens is not None:
        expected += f", sequence of {num_tokens} tokens from position {start}"
    open_form = replace(form, layers=None, last_row=None)
    fits = [str(r) for s in {start, 0} for r in _readings(ids, open_form, shape, s, num_tokens, width)]
    hint = f"; it would fit as {'; or '.join(fits)}" if fits else "; it may have columns of shared experts"
    hint += " from position 0 (was start ignored?)" if fits and start else ""
    raise UserError(f"{_size(ids)} is not what was declared: {expected}{hint}")


def _size(ids: Array) -> str:
    return f"a payload of {ids.size} ids" if ids.ndim == 1 else f"an array {list(ids.shape)}"


def _readings(
    ids: Array, form: Form, shape: RouteShape, start: int, num_tokens: int | None, width: int
) -> list[Reading]:
    """Every reading of the payload's size that the form, the model and the token count allow."""
    axes = [form.layers] if form.layers else ["moe"] + ["all"] * (shape.num_hidden_layers is not None)
    lasts = [form.last_row] if form.last_row is not None else [False, True]
    found: dict[tuple[int, int], Reading] = {}
    for layers in axes:
        columns = shape.columns(layers)
        for last in lasts if num_tokens is not None else [None]:
            rows = ids.size // (columns * width) if num_tokens is None else num_tokens - start - (not last)
            rows = max(rows, 0)
            reading = Reading(layers, last, rows, columns, width)
            lengths = reading.lengths(form.axes)
            if (ids.shape == lengths) if ids.ndim == 3 else (ids.size == rows * columns * width):
                found.setdefault((rows, columns), reading)
    if ids.size == 0 and len(found) > 1 and len({rows for rows, _ in found}) == 1:
        return list(found.values())[:1]  # no rows: every layer axis reads the same
    return list(found.values())
