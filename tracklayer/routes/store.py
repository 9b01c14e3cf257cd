"""Routes of many samples in one safetensors file, opened by memory map. numpy only.

R rows of all samples together, L MoE layers, K chosen, N samples, M tokens of all samples together.

    experts        [R, L, K]   uint8, int16 or int32: the samples' rows one after another, as `Routes` keeps them
    row_offsets    int64 [N + 1]   sample i has rows row_offsets[i] .. row_offsets[i + 1]
    starts         int64 [N]       position of each sample's first row
    token_ids      int32 [M]       optional: the whole token sequences that the routes are of
    token_offsets  int64 [N + 1]

Layers, expert count and what the caller adds stand in the file's metadata. Opening reads the header and the small
arrays; a sample's rows and tokens are read when they are used. Any safetensors reader can open the file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from tracklayer.errors import UserError
from tracklayer.routes.forms import RouteShape
from tracklayer.routes.ids import Array
from tracklayer.routes.record import Routes

FORMAT = "tracklayer.routes/1"
TYPE_NAMES = {"U8": np.uint8, "I16": np.int16, "I32": np.int32, "I64": np.int64}
LARGEST = 1 << 62  # stands for any count or offset when the header's room is reserved
MAX_HEADER_BYTES = 1 << 27


class RouteWriter:
    """Writes samples one by one; the file appears under its name when the `with` block ends without an error.

    shape      of every sample
    metadata   text keys and values of the caller (model, engine, weight version)
    with_tokens: every sample comes with its token ids
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        shape: RouteShape,
        *,
        with_tokens: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.path = Path(path)
        self.shape = shape
        self._partial = self.path.with_name(self.path.name + ".partial")
        self._described = _describe(shape, metadata or {})
        self._row_offsets, self._starts = [0], list[int]()
        self._token_ids: list[Array] | None = [] if with_tokens else None
        self._header_bytes = len(_header(self._tensors(LARGEST, LARGEST, LARGEST), self._described))
        self._file: BinaryIO = self._partial.open("wb")
        self._file.seek(8 + self._header_bytes)

    def add(self, routes: Routes, token_ids: npt.ArrayLike | None = None) -> None:
        """Append one sample; `token_ids` are all tokens of its sequence, of which the rows cover start .. stop."""
        sample = len(self._starts)
        if not self.shape.fits(routes):
            raise UserError(f"sample {sample} is of another model: {routes!r} in a file of {self.shape}")
        if (token_ids is None) != (self._token_ids is None):
            raise UserError(f"sample {sample}: token ids are given for all samples (with_tokens=True) or for none")
        if token_ids is not None and self._token_ids is not None:
            ids = np.asarray(token_ids, np.int32).reshape(-1)
            if len(ids) < routes.stop:
                raise UserError(f"sample {sample}: {len(ids)} token ids, but rows up to position {routes.stop}")
            self._token_ids.append(ids)
        self._file.write(np.ascontiguousarray(routes.experts_TLK).data)
        self._row_offsets.append(self._row_offsets[-1] + len(routes))
        self._starts.append(routes.start)

    def _tensors(self, rows: int, samples: int, tokens: int) -> list[tuple[str, str, tuple[int, ...], int]]:
        """Name, type, shape and bytes of each tensor, in the order in which they lie in the file."""
        type_name = next(name for name, kind in TYPE_NAMES.items() if kind == self.shape.dtype)
        shape = (rows, len(self.shape.layer_ids), self.shape.top_k)
        tensors: list[tuple[str, str, tuple[int, ...]]] = [
            ("experts", type_name, shape),
            ("row_offsets", "I64", (samples + 1,)),
            ("starts", "I64", (samples,)),
        ]
        if self._token_ids is not None:
            tensors += [("token_ids", "I32", (tokens,)), ("token_offsets", "I64", (samples + 1,))]
        return [(name, kind, size, _size_bytes(kind, size)) for name, kind, size in tensors]

    def close(self) -> None:
        """Write the small arrays and the header, and give the file its name."""
        small: list[Array] = [np.asarray(self._row_offsets, "<i8"), np.asarray(self._starts, "<i8")]
        tokens = 0
        if self._token_ids is not None:
            lengths = [len(ids) for ids in self._token_ids]
            tokens = sum(lengths)
            small += [np.concatenate([*self._token_ids, np.empty(0, np.int32)]).astype("<i4")]
            small += [np.concatenate([[0], np.cumsum(lengths)]).astype("<i8")]
        for array in small:
            self._file.write(array.tobytes())
        header = _header(self._tensors(self._row_offsets[-1], len(self._starts), tokens), self._described)
        assert len(header) <= self._header_bytes, (len(header), self._header_bytes)
        self._file.seek(0)
        self._file.write(self._header_bytes.to_bytes(8, "little") + header.ljust(self._header_bytes))
        self._file.close()
        self._partial.replace(self.path)

    def __enter__(self) -> RouteWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()
            self._partial.unlink(missing_ok=True)


def _size_bytes(kind: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * np.dtype(TYPE_NAMES[kind]).itemsize


def _describe(shape: RouteShape, metadata: Mapping[str, str]) -> dict[str, str]:
    """The file's metadata; safetensors allows text only."""
    described = {
        "format": FORMAT,
        "layer_ids": json.dumps(list(shape.layer_ids)),
        "num_experts": str(shape.num_experts),
        "top_k": str(shape.top_k),
        "num_hidden_layers": json.dumps(shape.num_hidden_layers),
        **({"layer_top_k": json.dumps(list(shape.layer_top_k))} if shape.layer_top_k else {}),
    }
    for key, value in metadata.items():
        if key in described or not isinstance(value, str):
            raise UserError(f"metadata {key!r}: {value!r} must be text under a name other than {', '.join(described)}")
    return {**described, **metadata}


def _header(tensors: list[tuple[str, str, tuple[int, ...], int]], metadata: dict[str, str]) -> bytes:
    """The safetensors header, padded with spaces to 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, kind, shape, size_bytes in tensors:
        entries[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + size_bytes]}
        at += size_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text.ljust(-(-len(text) // 8) * 8)


class RouteFile(Sequence[Routes]):
    """The samples of a file. `file[i]` reads and checks that sample's rows alone; slices give a list.

    Raises UserError for a file of another kind, a damaged one, and for rows that `Routes` refuses.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        entries, data_at = self._read_header()
        described = entries.pop("__metadata__", {})
        if not isinstance(described, dict):
            raise self._damaged("its metadata is not an object")
        if described.get("format") != FORMAT:
            raise self._damaged(f"its format is {described.get('format')!r}, not {FORMAT!r}")
        self._map = np.memmap(self.path, np.uint8, "r")
        try:
            self._arrays = {name: self._array(name, entry, data_at) for name, entry in entries.items()}
            hidden = json.loads(described.pop("num_hidden_layers"))
            self.shape = RouteShape(
                layer_ids=tuple(json.loads(described.pop("layer_ids"))),
                top_k=int(described.pop("top_k")),
                num_experts=int(described.pop("num_experts")),
                num_hidden_layers=hidden,
                layer_top_k=tuple(top_k_L) if (top_k_L := json.loads(described.pop("layer_top_k", "null"))) else None,
            )
            samples = len(self._arrays["starts"])
            owned = [("rows", self._arrays["experts"], self._arrays["row_offsets"])]
            if self.has_tokens:
                owned.append(("tokens", self._arrays["token_ids"], self._arrays["token_offsets"]))
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise self._damaged(f"its header lacks or garbles {error}") from error
        for what, array, offsets in owned:
            ends = (0, len(array))
            if len(offsets) != samples + 1 or (offsets[0], offsets[-1]) != ends or (np.diff(offsets) < 0).any():
                raise self._damaged(f"the offsets of {samples} samples do not fit its {len(array)} {what}")
        self.metadata: dict[str, str] = {key: text for key, text in described.items() if key != "format"}

    def _damaged(self, why: str) -> UserError:
        return UserError(f"{self.path} is not a whole route file: {why}")

    def _read_header(self) -> tuple[dict[str, Any], int]:
        try:
            with self.path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if length > min(MAX_HEADER_BYTES, self.path.stat().st_size - 8):
                    raise self._damaged(f"a header of {length} bytes can not be")
                entries = json.loads(file.read(length))
        except OSError as error:
            raise UserError(f"{self.path} can not be read: {error}") from error
        except (ValueError, RecursionError) as error:
            raise self._damaged(f"its header is not JSON: {error}") from error
        if not isinstance(entries, dict):
            raise self._damaged("its header is not an object")
        return entries, 8 + length

    def _array(self, name: str, entry: dict[str, Any], data_at: int) -> Array:
        """One tensor; the large ones as views of the map, the small ones copied (they may lie unaligned)."""
        begin, end = entry["data_offsets"]
        kind = np.dtype(TYPE_NAMES[entry["dtype"]]).newbyteorder("<")
        if begin < 0 or data_at + end > len(self._map) or end - begin != _size_bytes(entry["dtype"], entry["shape"]):
            raise self._damaged(f"{name} should lie at bytes {begin}..{end} of {len(self._map) - data_at}")
        array = self._map[data_at + begin : data_at + end].view(kind).reshape(entry["shape"])
        return array if name in ("experts", "token_ids") else np.array(array)

    def __len__(self) -> int:
        return len(self._arrays["starts"])

    def _sample(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return index % len(self)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = self._sample(index)
        first, end = self._arrays["row_offsets"][i : i + 2]
        rows = self._arrays["experts"][first:end]
        shape, start = self.shape, int(self._arrays["starts"][i])
        return Routes(rows, shape.layer_ids, shape.num_experts, start, layer_top_k=shape.layer_top_k)

    def __iter__(self) -> Iterator[Routes]:
        return (self[i] for i in range(len(self)))

    @property
    def has_tokens(self) -> bool:
        return "token_ids" in self._arrays

    def token_ids(self, index: int) -> Array:
        """int32: the token sequence of a sample. Raises UserError when the file holds none."""
        if not self.has_tokens:
            raise UserError(f"{self.path} holds no token ids")
        i = self._sample(index)
        first, end = self._arrays["token_offsets"][i : i + 2]
        return np.array(self._arrays["token_ids"][first:end])


def save_routes(
    path: str | os.PathLike[str],
    samples: Routes | Sequence[Routes],
    *,
    token_ids: Iterable[npt.ArrayLike] | None = None,
    num_hidden_layers: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write one sample or several, with their token sequences if given, into one file (see `RouteWriter`)."""
    samples = [samples] if isinstance(samples, Routes) else list(samples)
    if not samples:
        raise UserError("there are no routes to write")
    shape = RouteShape.of(samples[0], num_hidden_layers)
    tokens: list[npt.ArrayLike | None] = [None] * len(samples) if token_ids is None else list(token_ids)
    if len(tokens) != len(samples):
        raise UserError(f"{len(samples)} samples but {len(tokens)} token sequences")
    with RouteWriter(path, shape, with_tokens=token_ids is not None, metadata=metadata) as writer:
        for routes, ids in zip(samples, tokens, strict=True):
            writer.add(routes, ids)
