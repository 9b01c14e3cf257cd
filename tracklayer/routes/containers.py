"""What carries ids on the wire: base64, base85, bytes, .npy files, arrays, nested lists and raw mappings.

Arrays go into a container and come out of it, whatever their ids mean; forms.py says which form takes which.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import operator
import tokenize
from collections.abc import Mapping
from typing import Any

import numpy as np

from tracklayer.errors import UserError
from tracklayer.routes.forms import Form
from tracklayer.routes.ids import Array


def pack(ids: Array, container: str, start: int) -> Any:
    """Put an array, C-contiguous and little-endian, into its container."""
    flat = ids.reshape(-1).view(np.uint8).data
    match container:
        case "base64":
            return binascii.b2a_base64(flat, newline=False).decode("ascii")
        case "base85":
            return base64.b85encode(flat).decode("ascii")
        case "bytes":
            return bytes(flat)
        case "npy" | "npy_base64":
            header = io.BytesIO()
            np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(ids))
            blob = b"".join([header.getvalue(), flat])
            return blob if container == "npy" else binascii.b2a_base64(blob, newline=False).decode("ascii")
        case "array":
            return np.array(ids)
        case "list":
            return ids.tolist()
        case "raw":
            return {"data": bytes(flat), "shape": list(ids.shape), "dtype": str(ids.dtype), "start": start}
    raise UserError(f"unknown container {container!r}")


def unpack(payload: Any, form: Form, start: int) -> tuple[Array, int]:
    """The ids as an array, flat where the container says no shape, and the position of the first row."""
    match form.container:
        case "base64" | "base85" | "bytes":
            if form.dtype is None:
                raise UserError(f'flat {form.container} does not say its type: declare it, e.g. dtype="int32"')
            blob = payload if form.container == "bytes" else text_to_bytes(payload, form.container)
            return from_bytes(blob, form.dtype), start
        case "npy" | "npy_base64":
            blob = payload if form.container == "npy" else text_to_bytes(payload, "base64")
            return _from_npy(blob), start
        case "raw":
            keys = ("data", "shape", "dtype")
            if not isinstance(payload, Mapping) or any(key not in payload for key in keys):
                raise UserError(f"raw routes are a mapping with {', '.join(keys)}, got {brief(payload)}")
            said = payload.get("start")
            if said is not None and start not in (0, said):
                raise UserError(f"start {start} was asked for but the payload says that its rows start at {said}")
            ids = from_bytes(payload["data"], str(payload["dtype"]))
            return reshape(ids, payload["shape"]), start if said is None else operator.index(said)
    try:
        ids = np.asarray(payload)
    except ValueError as error:
        raise UserError(f"nested lists must be [tokens][layers][top_k] of equal lengths: {error}") from error
    said = np.dtype(form.dtype or np.int32)
    if ids.size == 0 or (form.container == "list" and said.kind == "u" and _within(ids, said)):
        ids = ids.astype(said)  # a list does not say it, and the largest value of the type is its fill
    if ids.dtype.kind not in "iu":
        raise UserError(f"expert ids must be integers, got an array of {ids.dtype} {list(ids.shape)}")
    return ids, start


def _within(ids: Array, dtype: np.dtype[Any]) -> bool:
    return ids.dtype.kind in "iu" and ids.min() >= 0 and ids.max() <= np.iinfo(dtype).max


def brief(value: Any) -> str:
    """A value of any kind for an error: its type and how its text begins."""
    text = repr(value)
    return f"{type(value).__name__} {text[:60]}{'...' if len(text) > 60 else ''}"


def text_to_bytes(text: Any, container: str) -> bytes:
    """What base64 or base85 text stands for. Raises UserError."""
    if not isinstance(text, (str, bytes)):
        raise UserError(f"routes should be {container} text, got {brief(text)}")
    try:
        return binascii.a2b_base64(text, strict_mode=True) if container == "base64" else base64.b85decode(text)
    except ValueError as error:
        raise UserError(f"routes are not {container}: {error}") from error


def from_bytes(blob: Any, dtype: str) -> Array:
    """A flat view of bytes as integers, little-endian unless `dtype` says otherwise. Raises UserError."""
    try:
        kind = np.dtype(dtype)
    except TypeError as error:
        raise UserError(f"unknown type of ids {dtype!r}") from error
    if kind.kind not in "iu":
        raise UserError(f"ids can not be {dtype!r}: they are integers")
    size_bytes = memoryview(blob).nbytes
    if size_bytes % kind.itemsize:
        raise UserError(f"{size_bytes} bytes are not a whole number of {dtype}")
    return np.frombuffer(blob, kind if kind.byteorder in "<>" else kind.newbyteorder("<"))


def _from_npy(blob: bytes) -> Array:
    """The array of a .npy file, a view of its bytes."""
    file = io.BytesIO(blob)
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran_order, dtype = read(file)
    except (ValueError, EOFError, tokenize.TokenError) as error:  # numpy parses the header as Python
        raise UserError(f"not a .npy file: {error}") from error
    ids = from_bytes(memoryview(blob)[file.tell() :], dtype.str)
    return reshape(ids, shape[::-1]).T if fortran_order else reshape(ids, shape)


def reshape(ids: Array, shape: Any) -> Array:
    """The ids in the shape that came with them. Raises UserError when they do not fill it."""
    lengths = tuple(operator.index(n) for n in shape)
    if min(lengths, default=0) < 0 or math.prod(lengths) != ids.size:
        raise UserError(f"{ids.size} ids do not fill the shape {list(lengths)} that comes with them")
    return ids.reshape(lengths)
