"""Rotary embedding: the table of cosines and sines by every rule of checkpoints, and what turns heads by it.

T tokens, H heads, D head width, R dims that turn.
Half layout rotates (i, i + dim/2), interleaved (2i, 2i + 1), both within the first R dims of a head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def rope_table(
    dim: int, theta: float, scaling: dict[str, Any] | None, max_position: int, device: torch.device | str = "cpu"
) -> Tensor:
    """float32 [max_position, dim]: cosines in the first half of the last axis, sines in the second.

    `scaling` is the checkpoint's rope dict (rope_type or type, and its keys); its attention factor is folded in.
    `max_position` also settles what depends on length, once for all positions so that cached keys stay valid:
    longrope takes the long factors when it exceeds original_max_position_embeddings; dynamic stretches theta when it
    exceeds the length the model was made for (original_max_position_embeddings, else max_position_embeddings of the
    dict, else no stretch). Raises ValueError for an unknown rope type or a missing key.
    """
    inv_freq, factor = rope_frequencies(dim, theta, scaling, max_position)
    angle = torch.arange(max_position, dtype=torch.float32)[:, None] * inv_freq[None]
    return torch.cat([angle.cos() * factor, angle.sin() * factor], -1).to(device)


def rope_frequencies(dim: int, theta: float, scaling: dict[str, Any] | None, max_position: int) -> tuple[Tensor, float]:
    """(inverse frequencies float32 [dim / 2], attention factor) of a rope dict; see `rope_table`."""
    if dim % 2 or dim < 2:
        raise ValueError(f"rope width must be a positive even number, got {dim}")
    scaling = dict(scaling or {})
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in _RULES:
        raise ValueError(f"unknown rope type {kind!r}, expected one of {', '.join(_RULES)}")
    try:
        return _RULES[kind](dim, float(theta), scaling, max_position)
    except KeyError as error:
        raise ValueError(f"rope type {kind!r} needs the key {error.args[0]!r}, got {sorted(scaling)}") from error


def _inverse(dim: int, theta: float) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2).float() / dim)


def _default(dim: int, theta: float, scaling: dict[str, Any], max_position: int) -> tuple[Tensor, float]:
    return _inverse(dim, theta), 1.0


def _linear(dim: int, theta: float, scaling: dict[str, Any], max_position: int) -> tuple[Tensor, float]:
    return _inverse(dim, theta) / scaling["factor"], 1.0


def _dynamic(dim: int, theta: float, scaling: dict[str, Any], max_position: int) -> tuple[Tensor, float]:
    """NTK-aware: theta grows by alpha^(dim / (dim - 2)), alpha given (Hunyuan) or from the served length."""
    trained = scaling.get("original_max_position_embeddings") or scaling.get("max_position_embeddings") or max_position
    if scaling.get("alpha"):
        alpha = scaling["alpha"]
    else:
        alpha = scaling["factor"] * max(max_position / trained, 1.0) - (scaling["factor"] - 1)
    return _inverse(dim, theta * alpha ** (dim / (dim - 2))), 1.0


def _yarn(dim: int, theta: float, scaling: dict[str, Any], max_position: int) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): high frequencies stay, low ones are divided by factor, a ramp between."""
    trained = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or max_position / trained
    ends = []
    for rotations in (scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1):
        ends.append(dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta)))
    if scaling.get("truncate", True):
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    low, high = max(ends[0], 0), min(ends[1], dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / ((high - low) or 0.001)).clamp(0, 1)
    inv_freq = _inverse(dim, theta)
    mscale, all_dim, attention = (scaling.get(k) for k in ("mscale", "mscale_all_dim", "attention_factor"))
    if attention is None and mscale and all_dim:
        attention = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    elif attention is None:
        attention = yarn_mscale(factor)
    return inv_freq / factor * ramp + inv_freq * (1 - ramp), attention


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's growth of attention with the stretch factor: 0.1 * mscale * ln(factor) + 1, 1 when not stretched."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(dim: int, theta: float, scaling: dict[str, Any], max_position: int) -> tuple[Tensor, float]:
    """Wavelengths beyond trained / low_freq_factor are stretched by factor, with a smooth passage to the short ones."""
    trained, low, high = (
        scaling[k] for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    inv_freq = _inverse(dim, theta)
    turns = trained * inv_freq / (2 * math.pi)  # rotations within the trained length
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inv_freq / scaling["factor"] + smooth * inv_freq, 1.0


def _longrope(dim: int, theta: float, scaling: dict[str, Any], max_position: int) -> tuple[Tensor, float]:
    trained = scaling["original_max_position_embeddings"]
    span = "long" if max_position > trained else "short"
    stretch = scaling[f"{span}_factor"]
    if len(stretch) != dim // 2:
        raise ValueError(f"longrope factors must have {dim // 2} entries, got {len(stretch)}")
    factor = scaling.get("factor") or scaling.get("max_position_embeddings", max_position) / trained
    attention = scaling.get(f"{span}_mscale", scaling.get("attention_factor"))  # PhiMoE has one for each span
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return _inverse(dim, theta) / torch.tensor(stretch, dtype=torch.float32), attention


def _proportional(dim: int, theta: float, scaling: dict[str, Any], max_position: int) -> tuple[Tensor, float]:
    """Gemma 4: the table spans the whole head, only the first partial_rotary_factor of the pairs turns."""
    turning = int(scaling.get("partial_rotary_factor", 1.0) * dim // 2)
    inv_freq = _inverse(dim, theta) / scaling.get("factor", 1.0)
    return torch.where(torch.arange(dim // 2) < turning, inv_freq, 0.0), 1.0


_RULES = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
}


def rotate(x_THD: Tensor, cos_sin_TR: Tensor, interleaved: bool) -> Tensor:
    """Turn the first R dims of each head of x [T, H, D] by cos_sin_TR float32 [T, R]; same shape and dtype."""
    rope_dim = cos_sin_TR.shape[-1]
    cos, sin = cos_sin_TR[:, None].chunk(2, -1)
    turned = x_THD[..., :rope_dim].float()
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    turned = (torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)).to(x_THD.dtype)
    return torch.cat([turned, x_THD[..., rope_dim:]], -1) if rope_dim < x_THD.shape[-1] else turned
