"""Quantised checkpoints into plain tensors as they stream in: FP8 with scales, MXFP4, compressed-tensors INT4.

A quantised weight arrives as several tensors, in any order and from any file: each is held until its companions are
there, then the weight goes on under its plain name. The arithmetic is float32. Kinds, by `quantization_config`:
    fp8                  X float8 and X_scale_inv (one scale per block, row or tensor): X * scale. DeepSeek-V4:
                         Y.scale is Y.weight's, experts in MXFP4 (int8 [N, K / 2], powers of two [N, K / 32])
    mxfp4                X_blocks uint8 [..., G, 16], X_scales uint8 [..., G]: 32 four-bit floats a group times a power
                         of two; experts come out transposed, [E, in, out], as GPT-OSS stores its plain ones
    compressed-tensors   X_packed int32 (eight four-bit integers, lowest first, offset 8), X_scale per group and row,
                         X_shape; or X float8 and X_scale
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from tracklayer.errors import CheckpointError

METHODS = ("fp8", "mxfp4", "compressed-tensors")
# Scales of activations and of the key-value cache: nothing here is computed in those formats.
UNUSED = (".input_scale", ".activation_scale", ".k_scale", ".v_scale")
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP = 32  # values that share a scale in MXFP4


def dequantised(tensors: Iterable[tuple[str, Tensor]], settings: dict[str, Any] | None) -> Iterator[tuple[str, Tensor]]:
    """The stream with quantised weights replaced by plain ones; `settings` is config.json's quantization_config.

    Raises CheckpointError for a method that is not known, and for a weight whose companions never came.
    """
    if not settings:
        yield from tensors
        return
    method = settings.get("quant_method")
    if method not in METHODS:
        raise CheckpointError(
            f"checkpoints quantised by {method!r} can not be loaded, only {', '.join(METHODS)}; use a bf16 checkpoint"
        )
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        if name.endswith(UNUSED):
            continue
        base, role = _role(name, tensor, method)
        if role is None:
            yield name, tensor
            continue
        parts = waiting.setdefault(base, {})
        parts[role] = tensor
        if _needed(parts, method) <= parts.keys():
            del waiting[base]
            yield base, _build(base, parts, settings)
    if waiting:
        base, parts = next(iter(waiting.items()))
        missing = ", ".join(sorted(_needed(parts, method) - parts.keys()))
        raise CheckpointError(f"the quantised weight {base!r} has no {missing} ({len(waiting)} such weights)")


SUFFIXES = {
    "fp8": {"_scale_inv": "scale", "_scale": "scale"},
    "mxfp4": {"_blocks": "blocks", "_scales": "scales"},
    "compressed-tensors": {
        "_packed": "packed",
        "_scale": "scale",
        "_shape": "shape",
        "_zero_point": "zero_point",
        "_g_idx": "group_index",
    },
}


def _role(name: str, tensor: Tensor, method: str) -> tuple[str, str | None]:
    """(plain name, what the tensor is of it); None: the tensor is plain itself."""
    if tensor.dtype in FLOAT8:
        return name, "values"
    if method == "fp8" and tensor.dtype == torch.int8:
        return name, "packed fours"
    if method == "fp8" and name.endswith(".scale") and tensor.dim() == 2:
        return name.removesuffix("scale") + "weight", "scale"
    for suffix, role in SUFFIXES[method].items():
        # per_expert_scale and the like are weights of their own: companions hang on a weight or on stacked experts
        if name.endswith(suffix) and name.removesuffix(suffix).endswith(("weight", "_proj")):
            return name.removesuffix(suffix), role
    return name, None


def _needed(parts: dict[str, Tensor], method: str) -> set[str]:
    if method == "mxfp4":
        return {"blocks", "scales"}
    if method == "compressed-tensors" and "values" not in parts:
        return {"packed", "scale", "shape"}
    return {"packed fours" if "packed fours" in parts else "values", "scale"}


def _build(base: str, parts: dict[str, Tensor], settings: dict[str, Any]) -> Tensor:
    if "blocks" in parts:
        return from_mxfp4(parts["blocks"], parts["scales"]).transpose(-1, -2)
    if "packed fours" in parts:
        blocks, scales = parts["packed fours"].view(torch.uint8), parts["scale"]
        if scales.element_size() != 1 or 16 * scales.shape[-1] != blocks.shape[-1]:
            raise CheckpointError(
                f"{base!r}: {list(blocks.shape)} bytes of four-bit floats need one-byte scales of 32 values each, "
                f"got {scales.dtype} {list(scales.shape)}"
            )
        return from_mxfp4(blocks.unflatten(-1, (-1, 16)), scales.view(torch.uint8))
    if "packed" in parts:
        return from_int4(base, parts, settings)
    return from_float8(parts["values"], parts["scale"], settings.get("weight_block_size"))


def from_float8(values: Tensor, scale: Tensor, block: list[int] | None = None) -> Tensor:
    """values float8 [..., N, K] times scale: one, one a row [..., N, 1], or one a block [..., N / b0, K / b1]."""
    scale = scale.float()
    rows, columns = values.shape[-2:]
    if block and scale.shape[-2:] == (-(-rows // block[0]), -(-columns // block[1])):
        scale = scale.repeat_interleave(block[0], -2)[..., :rows, :]
        scale = scale.repeat_interleave(block[1], -1)[..., :columns]
    elif scale.numel() == 1:
        scale = scale.reshape(())
    elif scale.dim() < values.dim():
        scale = scale.unsqueeze(-1)
    return values.float() * scale


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks uint8 [..., G, 16], scales uint8 [..., G] -> float32 [..., G * 32]; the low half of a byte comes first."""
    signed = torch.tensor([*FP4, *(-value for value in FP4)], device=blocks.device)
    halves = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    values = signed[halves.int()]
    return torch.ldexp(values, scales.int()[..., None] - 127).flatten(-2)


def from_int4(base: str, parts: dict[str, Tensor], settings: dict[str, Any]) -> Tensor:
    """Packed int32 [N, ceil(K / 8)] with one scale per row and group of columns [N, K / group] -> float32 [N, K]."""
    if "group_index" in parts or "zero_point" in parts:
        raise CheckpointError(f"{base!r}: INT4 with zero points or reordered groups can not be loaded; use bf16")
    for group in (settings.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        if weights.get("num_bits", 4) != 4 or not weights.get("symmetric", True):
            raise CheckpointError(f"{base!r}: only symmetric 4-bit integers can be loaded, the config says {weights}")
    rows, columns = (int(n) for n in parts["shape"].tolist())
    shifts = torch.arange(0, 32, 4, device=parts["packed"].device, dtype=torch.int32)
    values = (((parts["packed"][..., None] >> shifts) & 15) - 8).flatten(-2)[:rows, :columns]
    scale = parts["scale"].float()
    return values.float() * scale.repeat_interleave(-(-columns // scale.shape[-1]), -1)[:, :columns]
