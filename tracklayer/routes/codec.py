"""Routes on the wire: one pair of calls reads and writes every form of the table in forms.py.

    encode(routes, form, shape)     Routes -> text, bytes, array or dict
    decode(payload, form, shape)    and back

T rows, L MoE layers, K chosen experts, H decoder layers of the model (dense ones included).

Where layers choose different numbers of experts, rows are as wide as the largest, and unused places hold -1 in a signed
type, the largest value of an unsigned one; both ends of the wire know `layer_top_k` from the RouteShape.

What a form does not declare is declared by the caller (`decode(..., layers="moe")`); where the sizes leave two
readings, `decode` refuses and names both. numpy only.
"""

from __future__ import annotations

import binascii
import operator
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from tracklayer.errors import UserError, malformed
from tracklayer.routes.containers import brief, from_bytes, pack, reshape, text_to_bytes, unpack
from tracklayer.routes.forms import Form, RouteShape, resolve_form
from tracklayer.routes.ids import Array, fill_value, narrow_dtype
from tracklayer.routes.readings import read_sizes
from tracklayer.routes.record import Routes

PACKED = "tracklayer.routes/1"
BLOCK_BYTES = 1 << 16


# writing


def encode(routes: Routes, form: str | Form, shape: RouteShape | None = None, **declared: Any) -> Any:
    """Write `routes` in a form of FORMS (or a Form of your own); keywords change its fields.

    `shape` is needed for forms over all decoder layers (its num_hidden_layers). Returns str for base64 containers,
    bytes for npy and bytes, an array, nested lists, or a dict for raw.
    Raises IncompleteRoutes when a row is missing and the form can not say so, UserError when ids do not fit.
    """
    form = resolve_form(form, declared)
    shape = shape or RouteShape.of(routes)
    if shape.layer_ids != routes.layer_ids:
        raise UserError(f"routes have layers {list(routes.layer_ids)}, the shape says {list(shape.layer_ids)}")
    if form.layers is None:
        raise UserError('this form has either layer axis: say layers="all" or layers="moe"')
    if form.missing is None or (form.missing == 0 and routes.top_k == 1):  # one expert 0 is a route, not a gap
        routes.require_complete()
    dtype = np.dtype(form.dtype or _written_dtype(routes, form))
    if form.container != "base64" or form.axes != "TLK":
        return pack(_wire_array(routes, form, shape, dtype), form.container, routes.start)
    return _base64_text(routes, form, shape, dtype)


def _base64_text(routes: Routes, form: Form, shape: RouteShape, dtype: np.dtype[Any]) -> str:
    """Base64 of the wire array, made in blocks that stay in the cache: widened ids are never written to memory."""
    token_bytes = shape.columns(form.layers or "moe") * routes.top_k * dtype.itemsize
    block_tokens = 3 * max(1, BLOCK_BYTES // (3 * token_bytes))  # a multiple of 3 bytes, so that the texts join
    text = np.empty(-(-len(routes) * token_bytes // 3) * 4, np.uint8)
    at = 0
    for first in range(routes.start, routes.stop, block_tokens):
        block = routes.tokens(first, min(first + block_tokens, routes.stop))
        part = binascii.b2a_base64(_wire_array(block, form, shape, dtype).data, newline=False)
        text[at : at + len(part)] = np.frombuffer(part, np.uint8)
        at += len(part)
    return str(text.data, "ascii")


def _wire_array(routes: Routes, form: Form, shape: RouteShape, dtype: np.dtype[Any]) -> Array:
    """The ids as they lie on the wire: C-contiguous, little-endian."""
    as_kept = dtype == routes.dtype and routes.complete
    ids = routes.experts_TLK if as_kept else routes.to(dtype, missing=form.missing)
    if form.layers == "all" and shape.columns("all") != len(routes.layer_ids):
        wide = np.full((len(routes), shape.columns("all"), routes.top_k), form.dense or 0, dtype)
        wide[:, _column_index(shape.layer_ids)] = ids
        ids = wide
    ids = ids if form.axes == "TLK" else ids.transpose(1, 0, 2)
    return np.ascontiguousarray(ids, dtype.newbyteorder("<"))


def _written_dtype(routes: Routes, form: Form) -> str:
    """As narrow as the ids allow: unsigned where nothing is marked -1, signed where a row or an unused place may be."""
    if routes.layer_top_k or (form.missing == -1 and not routes.complete):
        return "int16" if routes.num_experts <= 1 << 15 else "int32"
    return "uint8" if routes.num_experts <= 256 else "uint16" if routes.num_experts <= 1 << 16 else "int32"


def _column_index(layer_ids: tuple[int, ...]) -> slice | list[int]:
    """The layers as a slice where they are evenly spaced (so that reading is a view), else as a list."""
    step = layer_ids[1] - layer_ids[0] if len(layer_ids) > 1 else 1
    spaced = all(b - a == step for a, b in pairwise(layer_ids))
    return slice(layer_ids[0], layer_ids[-1] + 1, step) if spaced else list(layer_ids)


# reading


def decode(
    payload: Any,
    form: str | Form,
    shape: RouteShape,
    *,
    start: int = 0,
    num_tokens: int | None = None,
    shared_columns: int = 0,
    check: bool = True,
    **declared: Any,
) -> Routes:
    """Read a payload in a form of FORMS (or a Form of your own); keywords change its fields, e.g. dtype="uint8".

    start           position of the first row (the offset that the producer was asked for, or says)
    num_tokens      S, tokens of the whole sequence, the last sampled one included; with it the row count is checked
    shared_columns  columns of shared experts behind the K routed ones, cut off
    check           examine the ids (see `Routes`); False only for what this package wrote and nothing altered
    Raises UserError for a size that no reading explains or that two explain, for ids in dense layers' columns,
    and for what `Routes` refuses.
    """
    form = resolve_form(form, declared)
    with malformed("the payload"):
        ids, start = unpack(payload, form, start)
    reading = read_sizes(ids, form, shape, start, num_tokens, shape.top_k + shared_columns)
    ids = ids.reshape(reading.lengths(form.axes))
    if form.axes == "LTK":
        ids = ids.transpose(1, 0, 2)
    if reading.layers == "all" and ids.shape[1] != len(shape.layer_ids):
        _check_dense(ids, form, shape, start)
        ids = ids[:, _column_index(shape.layer_ids)]
    ids = ids[:, :, : shape.top_k]
    if form.missing == 0 and shape.top_k > 1:
        zero_TL = (ids == 0).all(-1)
        if zero_TL.any():
            ids = ids.astype(np.int32)
            ids[zero_TL] = -1
    return Routes(ids, shape.layer_ids, shape.num_experts, start, layer_top_k=shape.layer_top_k, check=check)


def _check_dense(ids: Array, form: Form, shape: RouteShape, start: int) -> None:
    if form.dense is None:
        return
    value = form.dense if ids.dtype.kind == "i" or form.dense >= 0 else fill_value(ids.dtype)
    for layer in sorted(set(range(ids.shape[1])) - set(shape.layer_ids)):
        wrong_T = (ids[:, layer] != value).any(-1)
        if wrong_T.any():
            t = int(np.argmax(wrong_T))
            raise UserError(
                f"layer {layer} is dense in this model, but token {start + t} has ids {ids[t, layer].tolist()} there "
                f"({int(wrong_T.sum())} rows): the layer axis is another one, or shifted"
            )


# our own forms


def encode_sglang(routes: Routes, num_hidden_layers: int | None = None, dtype: str = "int32") -> str:
    """SGLang's wire form: base64 of little-endian ids [T, H, K], zeros in dense layers; without H the MoE layers."""
    form = "sglang" if num_hidden_layers is not None else "sglang_moe"
    return str(encode(routes, form, RouteShape.of(routes, num_hidden_layers), dtype=dtype))


def encode_packed(routes: Routes, *, binary: bool = False) -> dict[str, Any]:
    """The narrow self-describing form: a JSON object, `data` base64 text (or bytes with `binary`, for msgpack).

    It has `layer_top_k` only where layers choose different numbers of experts.
    """
    data = pack(np.ascontiguousarray(routes.experts_TLK), "bytes" if binary else "base64", 0)
    return {
        "format": PACKED,
        "dtype": str(routes.dtype),
        "shape": list(routes.shape),
        "start": routes.start,
        "layer_ids": list(routes.layer_ids),
        "num_experts": routes.num_experts,
        **({"layer_top_k": list(routes.layer_top_k)} if routes.layer_top_k else {}),
        "data": data,
    }


def decode_packed(payload: Mapping[str, Any], *, check: bool = True) -> Routes:
    """Read `encode_packed`'s object, binary or not; `check` as in `decode`.

    Raises UserError for another format, type or size.
    """
    if not isinstance(payload, Mapping) or payload.get("format") != PACKED:
        raise UserError(f"packed routes are an object with format {PACKED!r}, got {brief(payload)}")
    lacking = [key for key in ("dtype", "shape", "start", "layer_ids", "num_experts", "data") if key not in payload]
    if lacking:
        raise UserError(f"packed routes lack {', '.join(lacking)}")
    with malformed("the packed object"):
        shape, num_experts = payload["shape"], operator.index(payload["num_experts"])
        layer_top_k = payload.get("layer_top_k")
        if len(shape) != 3 or payload["dtype"] != str(narrow_dtype(num_experts, 1 if layer_top_k else int(shape[2]))):
            raise UserError(f"{payload['dtype']} of shape {shape} is not how {num_experts} experts are packed")
        data = payload["data"]
        blob = text_to_bytes(data, "base64") if isinstance(data, str) else data
        ids_TLK = reshape(from_bytes(blob, payload["dtype"]), shape)
        start = operator.index(payload["start"])
        return Routes(ids_TLK, payload["layer_ids"], num_experts, start, layer_top_k=layer_top_k, check=check)
