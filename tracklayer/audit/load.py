"""Routes as engines reply them, read without trust: what is malformed is for the audit to name, not to refuse here.

Reads a JSON reply (or a list, or one a line) of SGLang or vLLM, our packed form, a `.npy` array, or a route file of
`tracklayer.routes.store`. S tokens, T rows, K chosen. numpy only; safetensors for route files.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tracklayer.audit.compare import Observed
from tracklayer.audit.scores import Array
from tracklayer.errors import UserError
from tracklayer.routes.forms import RouteShape

MAX_SHARED = 4  # columns of shared experts that a reply may have behind the routed ones


@dataclass(frozen=True, eq=False)
class Recorded:
    """One request's routes as found in a file: ids flat or [T, X, K], tokens if the file has them.

    layer_ids: the decoder layers of the X columns, where the file says so.
    """

    name: str
    ids: Array
    start: int = 0
    token_ids: Array | None = None
    layer_ids: tuple[int, ...] | None = None


def read_recorded(path: str | Path, dtype: str = "int32") -> list[Recorded]:
    """All requests of a file. `dtype` is the type of flat base64 ids where the reply does not say it.

    Raises UserError for a file that can not be read or holds no routes.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{str(path)!r} is not a file; give a JSON reply, a .npy array or a route file")
    if path.suffix == ".npy":
        return [Recorded(path.name, _npy(path.read_bytes(), str(path)))]
    if path.suffix == ".safetensors":
        return list(_route_file(path))
    try:
        text = path.read_text()
        replies = json.loads(text) if text.lstrip()[:1] in ("[", "{") and not _is_lines(text) else _lines(text)
    except ValueError as error:
        raise UserError(f"{path} is neither JSON, .npy nor .safetensors: {error}") from error
    replies = replies if isinstance(replies, list) else [replies]
    found = [r for i, reply in enumerate(replies) for r in _reply(reply, f"{path.name}[{i}]", dtype)]
    if not found:
        raise UserError(
            f"{path} holds no routes: expected meta_info.routed_experts, sglext.routed_experts, "
            "choices[].routed_experts or routed_experts. Was the server started with --enable-return-routed-experts?"
        )
    return found


def read_tokens(path: str | Path) -> list[Array]:
    """Token sequences from JSON (a list of ids, or of such lists) or a .npy array; one array a request."""
    path = Path(path)
    try:
        value = np.load(path, allow_pickle=False).tolist() if path.suffix == ".npy" else json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can not be read as token ids: {error}") from error
    nested = isinstance(value, list) and value and all(isinstance(v, list) for v in value)
    return [_tokens(v, f"{path}[{i}]") for i, v in enumerate(value if nested else [value])]


def lay(recorded: Recorded, shape: RouteShape, num_tokens: int, layers: str | None = None) -> Observed:
    """The rows of the model's MoE layers. `layers`: "moe" or "all" settles a payload that two readings fit.

    Raises UserError for a row count, a layer axis or a width that no reading (or more than one) explains.
    """
    columns = {"moe": len(shape.layer_ids)}
    if shape.num_hidden_layers:
        columns["all"] = shape.num_hidden_layers
    if layers is not None:
        if layers not in columns:
            raise UserError(f"layers must be one of {', '.join(columns)}, got {layers!r}")
        columns = {layers: columns[layers]}
    if recorded.layer_ids is not None and recorded.layer_ids != shape.layer_ids:
        raise UserError(
            f"{recorded.name} is of layers {list(recorded.layer_ids)}, the model routes in {list(shape.layer_ids)}"
        )
    readings: dict[tuple[int, int, int], str] = {}
    for width in range(shape.top_k, shape.top_k + MAX_SHARED + 1):
        for axis, count in columns.items():
            for rows in (num_tokens - 1 - recorded.start, num_tokens - recorded.start):
                lengths = (rows, count, width)
                fits = (
                    recorded.ids.shape == lengths if recorded.ids.ndim == 3 else recorded.ids.size == np.prod(lengths)
                )
                if rows > 0 and fits:
                    readings.setdefault(lengths, axis)
        if readings:
            break  # columns of shared experts are a last resort
    if len(readings) != 1:
        raise UserError(_misfit(recorded, shape, num_tokens, readings))
    (lengths, axis), *_ = readings.items()
    ids_TXK = recorded.ids.reshape(lengths)
    if axis == "all" and lengths[1] != len(shape.layer_ids):
        ids_TXK = ids_TXK[:, list(shape.layer_ids)]
    return Observed(ids_TXK.astype(np.int32), recorded.start, recorded.name)


def _misfit(
    recorded: Recorded, shape: RouteShape, num_tokens: int, readings: Mapping[tuple[int, int, int], str]
) -> str:
    got = f"{recorded.name}: {recorded.ids.size} ids" + (
        f" of shape {list(recorded.ids.shape)}" if recorded.ids.ndim == 3 else ""
    )
    if readings:
        both = "; or ".join(f"{r} rows x {c} layers ({axis}) x {w}" for (r, c, w), axis in readings.items())
        return f"{got} can be read as {both}: declare --layers"
    return (
        f"{got} do not fit {num_tokens} tokens from position {recorded.start}: expected "
        f"{num_tokens - 1 - recorded.start} rows (or one more) of {len(shape.layer_ids)} MoE layers or all "
        f"{shape.num_hidden_layers}, {shape.top_k} experts"
    )


# replies


def _is_lines(text: str) -> bool:
    """One JSON object a line, rather than one document."""
    lines = [line for line in text.splitlines() if line.strip()]
    return len(lines) > 1 and all(line.lstrip().startswith("{") and line.rstrip().endswith("}") for line in lines)


def _lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _reply(reply: Any, name: str, dtype: str) -> Iterator[Recorded]:
    if not isinstance(reply, Mapping):
        return
    choices = [c for c in reply.get("choices") or [] if isinstance(c, Mapping)]
    for i, part in enumerate([reply, *choices]):
        places = [part.get("meta_info"), part.get("sglext"), part.get("sgl_ext"), part.get("nvext"), part]
        place = next((p for p in places if isinstance(p, Mapping) and p.get("routed_experts") is not None), None)
        packed = part if str(part.get("format", "")).startswith("tracklayer.routes/") else None
        if place is None and packed is None:
            continue
        label = name if i == 0 else f"{name}.choices[{i - 1}]"
        tokens = _find_tokens(reply, part, place or {}, label)
        value = packed if place is None else place["routed_experts"]
        start = 0 if place is None else int(place.get("routed_experts_start_len") or place.get("start") or 0)
        kind = dtype if place is None else str(place.get("routed_experts_dtype") or dtype)
        if isinstance(value, Mapping):
            yield _packed(value, label, tokens)
            continue
        ids = _ids(value, kind, label)
        prompt = part.get("prompt_routed_experts", reply.get("prompt_routed_experts"))
        if prompt is not None:  # vLLM's two arrays, prompt and output
            ids = np.concatenate([_ids(prompt, kind, label), ids])
        yield Recorded(label, ids, start, tokens)


def _find_tokens(
    reply: Mapping[str, Any], part: Mapping[str, Any], place: Mapping[str, Any], name: str
) -> Array | None:
    """The whole sequence: prompt and output where both are given, else `token_ids` alone."""
    sources = (part, place, reply)

    def get(*keys: str) -> Any:
        return next((s[k] for k in keys for s in sources if isinstance(s.get(k), Sequence)), None)

    prompt, output, whole = (
        get("prompt_token_ids", "input_ids"),
        get("output_ids", "response_token_ids"),
        get("token_ids"),
    )
    if prompt is not None and (output is not None or whole is not None):
        return _tokens([*prompt, *(whole if output is None else output)], name)
    return None if whole is None else _tokens(whole, name)


def _tokens(value: Any, name: str) -> Array:
    ids = np.asarray(value)
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
        raise UserError(f"{name}: token ids must be a non-empty list of integers")
    return ids.astype(np.int64)


def _ids(value: Any, dtype: str, name: str) -> Array:
    """Nested lists, base64 of a .npy blob, or base64 of flat little-endian ids."""
    if not isinstance(value, str):
        try:
            ids = np.asarray(value)
        except ValueError as error:
            raise UserError(f"{name}: nested lists of routes have unequal lengths: {error}") from error
        if ids.dtype.kind not in "iu" or ids.ndim != 3:
            raise UserError(
                f"{name}: routes must be integers [tokens][layers][top_k], got {ids.dtype} {list(ids.shape)}"
            )
        return ids
    try:
        blob = base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise UserError(f"{name}: routes are not base64: {error}") from error
    if blob.startswith(b"\x93NUMPY"):
        return _npy(blob, name)
    return _flat(blob, dtype, name)


def _flat(blob: bytes, dtype: str, name: str) -> Array:
    try:
        kind = np.dtype(dtype).newbyteorder("<")
    except TypeError as error:
        raise UserError(f"{name}: unknown type of ids {dtype!r}; take int32, uint16 or uint8") from error
    if kind.kind not in "iu" or len(blob) % kind.itemsize:
        raise UserError(f"{name}: {len(blob)} bytes are not a whole number of {dtype}; declare the type of the ids")
    return np.frombuffer(blob, kind)


def _npy(blob: bytes, name: str) -> Array:
    try:
        ids = np.load(io.BytesIO(blob), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise UserError(f"{name} is not a .npy array: {error}") from error
    if ids.dtype.kind not in "iu" or ids.ndim not in (1, 3):
        raise UserError(
            f"{name}: routes must be integers, flat or [tokens, layers, top_k], got {ids.dtype} {list(ids.shape)}"
        )
    return ids


# our own forms: an unwritten row is all fill


def _packed(value: Mapping[str, Any], name: str, tokens: Array | None) -> Recorded:
    try:
        shape = tuple(int(n) for n in value["shape"])
        ids = _flat(base64.b64decode(value["data"]), str(value["dtype"]), name)
        layer_ids, start = tuple(int(i) for i in value["layer_ids"]), int(value["start"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{name} is not a packed routes object: it lacks or garbles {error}") from error
    if len(shape) != 3 or ids.size != np.prod(shape):
        raise UserError(f"{name}: {ids.size} ids do not fill the shape {list(shape)} that comes with them")
    return Recorded(name, _unfilled(ids.reshape(shape)), start, tokens, layer_ids)


def _route_file(path: Path) -> Iterator[Recorded]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            described = file.metadata() or {}
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        layer_ids = tuple(json.loads(described["layer_ids"]))
        offsets, starts = arrays["row_offsets"], arrays["starts"]
    except (SafetensorError, KeyError, ValueError) as error:
        raise UserError(f"{path} is not a route file of tracklayer.routes.store: {error}") from error
    for i in range(len(starts)):
        tokens = None
        if "token_ids" in arrays:
            first, end = arrays["token_offsets"][i : i + 2]
            tokens = _tokens(arrays["token_ids"][first:end], f"{path.name}[{i}]")
        rows = _unfilled(arrays["experts"][offsets[i] : offsets[i + 1]])
        yield Recorded(f"{path.name}[{i}]", rows, int(starts[i]), tokens, layer_ids)


def _unfilled(ids_TLK: Array) -> Array:
    """int32, rows that are all fill become -1."""
    fill = np.iinfo(ids_TLK.dtype).max if ids_TLK.dtype.kind == "u" else -1
    wide_TLK = ids_TLK.astype(np.int32)
    wide_TLK[(ids_TLK == fill).all(-1)] = -1
    return wide_TLK
