"""Are these the weights that they should be? Checksums, and a snapshot to compare with after an update."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tracklayer.errors import UserError

PIECE_BYTES = 64 << 20
ACTIONS = ("checksum", "snapshot", "reset_tensors", "compare")


class WeightsCheck:
    """Checks of one model's parameters, by name. A snapshot lies in host memory until the next one."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._snapshot: dict[str, Tensor] | None = None

    def run(self, action: str, skip: list[str] | None) -> dict[str, Any]:
        """One of ACTIONS; `skip`: leave out tensors whose names hold one of these texts.

        checksum: {checksums: {name: SHA-256 hex}, per_gpu_checksum}; compare: {different: names}; else {}. Raises
        UserError for an unknown action, for `skip` of another kind, and for compare without a snapshot.
        """
        if action not in ACTIONS:
            raise UserError(f"action must be one of {', '.join(ACTIONS)}, got {action!r:.80}")
        if skip is not None and not (isinstance(skip, (list, tuple)) and all(isinstance(s, str) for s in skip)):
            raise UserError(f"skip_tensor_list must be a list of strings, got {skip!r:.80}")
        tensors = {
            name: tensor.detach()
            for name, tensor in self._model.named_parameters()
            if not any(text in name for text in skip or ())
        }
        if action == "checksum":
            return checksums(tensors)
        if action == "compare":
            return {"different": self._different(tensors)}
        if action == "snapshot":
            self._snapshot = copies(tensors)
        else:
            spoil(tensors)
        return {}

    def _different(self, tensors: dict[str, Tensor]) -> list[str]:
        if self._snapshot is None:
            raise UserError("there is no snapshot to compare with: ask for the action snapshot first")
        kept = self._snapshot
        return [n for n, t in tensors.items() if n not in kept or not _same(t, kept[n])]


def checksums(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """SHA-256 of each tensor's bytes, and of all of them in the order of their names."""
    each = {}
    for name in sorted(tensors):
        digest = hashlib.sha256()
        for piece in pieces(tensors[name]):
            digest.update(piece.to("cpu", copy=True).numpy().data)  # numpy on the weights themselves pins their storage
        each[name] = digest.hexdigest()
    whole = hashlib.sha256("".join(f"{name}{each[name]}" for name in each).encode())
    return {"checksums": each, "per_gpu_checksum": whole.hexdigest()}


def copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory. Raises UserError when it has no room."""
    try:
        return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
    except RuntimeError as error:
        size = sum(tensor.nbytes for tensor in tensors.values())
        raise UserError(f"host memory has no room for a snapshot of {size / 2**30:.1f} GiB: {error}") from error


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The bytes of a tensor, uint8, a piece at a time."""
    yield from tensor.contiguous().reshape(-1).view(torch.uint8).split(PIECE_BYTES)


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit (NaN too), without a second copy of either."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return all(torch.equal(x, y.to(x.device)) for x, y in zip(pieces(a), pieces(b), strict=True))


@torch.inference_mode()
def spoil(tensors: dict[str, Tensor]) -> None:
    """Overwrite everything, so that only an update that brings every tensor makes it right again."""
    for tensor in tensors.values():
        if not tensor.is_floating_point():
            tensor.zero_()
            continue
        for piece in tensor.view(-1).split(PIECE_BYTES // 4):
            piece.copy_(torch.rand(piece.shape, device=piece.device))  # in float32: small types have no random numbers
