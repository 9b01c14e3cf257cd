"""Records between processes: msgpack, no pickle. Large arrays travel as files in shared memory, not through the socket.

The writer fills a fresh file in the exchange folder; the reader maps it and unlinks its name at once, so that the
memory lives exactly as long as the array made from it.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import operator
import os
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from tracklayer.config import EngineConfig
from tracklayer.engine.client import EngineInfo
from tracklayer.errors import UserError
from tracklayer.types import EngineRequest, FinishReason, RequestOutput, SamplingParams, TokenLogprobs

log = logging.getLogger(__name__)
SHARED_BYTES = 1 << 16  # arrays of this size and more go through shared memory
ARRAY, SHARED, RECORD, SET = 1, 2, 3, 4
RECORDS = (EngineConfig, EngineInfo, EngineRequest, FinishReason, RequestOutput, SamplingParams, TokenLogprobs)
_CODES = {kind: code for code, kind in enumerate(RECORDS)}
_NAMES = [tuple(f.name for f in fields(kind)) for kind in RECORDS]
# sequences come back as tuples; these fields are lists
_LISTS = [tuple(f.name for f in fields(kind) if str(f.type).startswith("list")) for kind in RECORDS]


# What an output of a step holds when its request goes on and asked for nothing but tokens.
_PLAIN = ("rid", "new_token_ids", "prompt_tokens", "cached_tokens", "weight_spans", "num_retractions", "queue_s")
_OTHERS = tuple(f.name for f in fields(RequestOutput) if f.name not in _PLAIN)
_NOTHING = tuple(getattr(RequestOutput("", [], 0, 0), name) for name in _OTHERS)
_plain, _others = operator.attrgetter(*_PLAIN), operator.attrgetter(*_OTHERS)


def news_of(outputs: list[RequestOutput]) -> tuple[list[tuple[Any, ...]], list[RequestOutput]]:
    """A step's news: rows of what plain outputs hold (a record costs several times as much), and the other outputs."""
    rows: list[tuple[Any, ...]] = []
    whole: list[RequestOutput] = []
    for output in outputs:
        rest = _others(output)
        if all(a is b for a, b in zip(rest, _NOTHING, strict=True)):
            rows.append(_plain(output))
        else:
            whole.append(output)
    return rows, whole


def outputs_of(rows: Iterable[tuple[Any, ...]], whole: Iterable[RequestOutput]) -> list[RequestOutput]:
    """The outputs again; those of one request keep their order, for what holds more comes last."""
    outputs = [
        RequestOutput(
            rid, list(ids), prompt, cached, weight_spans=list(spans), num_retractions=retracted, queue_s=queue
        )
        for rid, ids, prompt, cached, spans, retracted, queue in rows
    ]
    return outputs + list(whole)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class Wire:
    """Packs and unpacks messages; `folder` is where large arrays are exchanged (None: always inline)."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._numbers = itertools.count()

    def pack(self, message: Any) -> bytes:
        """Bytes of a message of plain values, numpy arrays and RECORDS.

        Raises UserError for whole numbers of more than 64 bits, TypeError for anything else.
        """
        return bytes(msgpack.packb(message, default=self._default))

    def unpack(self, raw: bytes) -> Any:
        """The message again; sequences that are not fields of lists come back as tuples."""
        return msgpack.unpackb(raw, ext_hook=self._restore, use_list=False, strict_map_key=False)

    def _default(self, value: Any) -> Any:
        code = _CODES.get(type(value))
        if code is not None:
            return msgpack.ExtType(RECORD, self.pack([code, *(getattr(value, name) for name in _NAMES[code])]))
        if isinstance(value, np.ndarray):
            return self._array(np.ascontiguousarray(value))
        if isinstance(value, (set, frozenset)):
            return msgpack.ExtType(SET, self.pack(sorted(value)))
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, int):
            raise UserError(f"a whole number of {value.bit_length()} bits is too large: 64 bits at most")
        raise TypeError(f"{type(value).__name__} can not be sent between processes")

    def _array(self, array: np.ndarray) -> msgpack.ExtType:
        head = (array.dtype.str, array.shape)
        if self._folder is None or array.nbytes < SHARED_BYTES:
            return msgpack.ExtType(ARRAY, msgpack.packb((*head, array.tobytes())))
        path = self._folder / f"{os.getpid()}-{next(self._numbers)}"
        try:  # written, not mapped: a full folder is then an error and not the end of the process
            with open(path, "xb", opener=_private) as file:
                file.write(array.reshape(-1).view(np.uint8).data)
        except OSError as error:
            log.warning("an array of %d bytes goes through the socket: %s", array.nbytes, error)
            path.unlink(missing_ok=True)
            return msgpack.ExtType(ARRAY, msgpack.packb((*head, array.tobytes())))
        return msgpack.ExtType(SHARED, msgpack.packb((*head, path.name)))

    def _restore(self, code: int, data: bytes) -> Any:
        if code == RECORD:
            index, *values = self.unpack(data)
            named = dict(zip(_NAMES[index], values, strict=True))
            for name in _LISTS[index]:
                named[name] = list(named[name])
            return RECORDS[index](**named)
        if code == SET:
            return frozenset(self.unpack(data))
        dtype, shape, content = msgpack.unpackb(data, use_list=False)
        if code == SHARED:
            content = self._mapped(content)
        return np.frombuffer(content, dtype).reshape(shape)

    def _mapped(self, name: str) -> mmap.mmap:
        assert self._folder is not None and "/" not in name, name
        path = self._folder / name
        file = os.open(path, os.O_RDONLY)
        try:
            return mmap.mmap(file, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(file)
            path.unlink()
