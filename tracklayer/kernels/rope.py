"""Rotary embedding: the table of cosines and sines, and the fused split, norm, rotate and store of q, k and v.

P positions, T tokens, N query heads, H key heads, D head width, E value width, S cache slots, X = N*D + H*D + H*E.
Half layout rotates (i, i + dim/2), interleaved (2i, 2i + 1), both within the first `rope_dim` dims of a head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tracklayer.kernels.dispatch import use_triton
from tracklayer.kernels.jit import await_previous, has_pdl, jit, next_power_of_2, tl
from tracklayer.kernels.norm import launch_norm, rms_norm_ref


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


def qk_rope_store(
    qkv_TX: Tensor,
    cos_sin_PD: Tensor | None,
    positions_T: Tensor,
    slots_T: Tensor,
    k_SHD: Tensor,
    v_SHE: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    q_norm_D: Tensor | None = None,
    k_norm_D: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    norm_whole: bool = False,
    norm_after_rope: bool = False,
    rope_dim: int,
    interleaved: bool = False,
) -> Tensor:
    """Split the fused projection, norm and rotate q and k, store k and v in the caches; returns q [T, N, D].

    In place: qkv_TX holds the finished q and k afterwards, and the result is a view of it (rows X apart).

    qkv_TX [T, N*D + H*D + H*E]; cos_sin_PD from `rope_table` (None with rope_dim 0); positions_T, slots_T int32.
    q_norm_D / k_norm_D: RMS norm weights, [D] per head, or [N*D] / [H*D] with norm_whole (over the whole projection).
    norm_after_rope: rotate first, then norm. k and v go to k_SHD[slots_T], v_SHE[slots_T] in the caches' dtype.
    Raises ValueError when the widths do not add up.
    """
    _check(qkv_TX, num_heads, num_kv_heads, head_dim, value_dim, rope_dim, cos_sin_PD)
    if (q_norm_D is None) != (k_norm_D is None):
        raise ValueError("give norm weights for both q and k, or for neither")
    # Weights over the whole projection and after the rotation: no family does it, torch will do.
    plain = q_norm_D is not None and norm_whole and norm_after_rope
    run = launch_qk_rope_store if use_triton(qkv_TX) and not plain else qk_rope_store_ref
    return run(
        qkv_TX, cos_sin_PD, positions_T, slots_T, k_SHD, v_SHE, num_heads=num_heads, num_kv_heads=num_kv_heads,
        head_dim=head_dim, value_dim=value_dim, q_norm_D=q_norm_D, k_norm_D=k_norm_D, norm_eps=norm_eps,
        norm_offset=norm_offset, norm_whole=norm_whole, norm_after_rope=norm_after_rope, rope_dim=rope_dim,
        interleaved=interleaved,
    )  # fmt: skip


def _check(
    qkv_TX: Tensor, heads: int, kv_heads: int, head_dim: int, value_dim: int, rope_dim: int, table: Tensor | None
) -> None:
    width = heads * head_dim + kv_heads * (head_dim + value_dim)
    if qkv_TX.shape[-1] != width:
        raise ValueError(f"the projection has width {qkv_TX.shape[-1]}, its heads need {width}")
    if rope_dim % 2 or rope_dim > head_dim:
        raise ValueError(f"rope_dim must be even and at most the head width {head_dim}, got {rope_dim}")
    if rope_dim and (table is None or table.shape[-1] != rope_dim):
        raise ValueError(
            f"rope_dim {rope_dim} needs a table of that width, got {None if table is None else table.shape}"
        )


def qk_rope_store_ref(
    qkv_TX: Tensor,
    cos_sin_PD: Tensor | None,
    positions_T: Tensor,
    slots_T: Tensor,
    k_SHD: Tensor,
    v_SHE: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    q_norm_D: Tensor | None = None,
    k_norm_D: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    norm_whole: bool = False,
    norm_after_rope: bool = False,
    rope_dim: int,
    interleaved: bool = False,
) -> Tensor:
    """The torch reference of `qk_rope_store`."""
    q_width, k_width = num_heads * head_dim, num_kv_heads * head_dim
    q_TX, k_TX, v_TX = qkv_TX.split([q_width, k_width, num_kv_heads * value_dim], -1)
    slots_T = slots_T.long()
    cos_sin_TR = None if cos_sin_PD is None or rope_dim == 0 else cos_sin_PD[positions_T.long()]

    def finish(x_TX: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None and norm_whole and not norm_after_rope:
            x_TX = rms_norm_ref(x_TX, weight, norm_eps, norm_offset)
        x_THD = x_TX.unflatten(-1, (-1, head_dim))
        if weight is not None and not norm_whole and not norm_after_rope:
            x_THD = rms_norm_ref(x_THD, weight, norm_eps, norm_offset)
        if cos_sin_TR is not None:
            x_THD = rotate(x_THD, cos_sin_TR, interleaved)
        if weight is not None and norm_after_rope:
            shape = x_THD.shape
            x_THD = x_THD.flatten(1) if norm_whole else x_THD
            x_THD = rms_norm_ref(x_THD, weight, norm_eps, norm_offset).view(shape)
        return x_THD

    # Without norms q and k are turned alike: at once, which is felt where every operation costs microseconds.
    alike = q_norm_D is None and k_norm_D is None
    parts = [(qkv_TX[..., : q_width + k_width], None)] if alike else [(k_TX, k_norm_D), (q_TX, q_norm_D)]
    for part_TX, weight in parts:
        if weight is not None or cos_sin_TR is not None:
            part_TX.copy_(finish(part_TX, weight).flatten(1))
    k_SHD[slots_T] = k_TX.unflatten(-1, (num_kv_heads, head_dim)).to(k_SHD.dtype)
    v_SHE[slots_T] = v_TX.unflatten(-1, (num_kv_heads, value_dim)).to(v_SHE.dtype)
    return q_TX.unflatten(-1, (num_heads, head_dim))


def rotate(x_THD: Tensor, cos_sin_TR: Tensor, interleaved: bool) -> Tensor:
    """Turn the first R dims of each head of x [T, H, D] by cos_sin_TR float32 [T, R]; same shape and dtype."""
    rope_dim = cos_sin_TR.shape[-1]
    cos, sin = cos_sin_TR[:, None].chunk(2, -1)
    turned = x_THD[..., :rope_dim].float()
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    turned = (torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)).to(x_THD.dtype)
    return torch.cat([turned, x_THD[..., rope_dim:]], -1) if rope_dim < x_THD.shape[-1] else turned


@jit
def _finish_heads(
    x_row, weight_ptr, cos_sin_row, heads_HB, heads_ok, eps, offset, D: tl.constexpr, DP: tl.constexpr,
    R: tl.constexpr, NORM: tl.constexpr, AFTER: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Norm and rotate a block of heads: float32 values [HB, DP] rounded as x's dtype."""
    d = tl.arange(0, DP)
    at = x_row + heads_HB[:, None] * D + d[None, :]
    ok = heads_ok[:, None] & (d < D)[None, :]
    x = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    if NORM:
        weight = tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32) + offset
    if NORM and not AFTER:
        factor = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = (x * factor * weight[None, :]).to(x_row.dtype.element_ty).to(tl.float32)
    if R > 0:
        # The other half of each pair is loaded again (from the L1 cache): it lies in another thread.
        if INTERLEAVED:
            pair = d ^ 1
            angle = d // 2
            first = d % 2 == 0
        else:
            first = d < R // 2
            pair = tl.where(first, d + R // 2, d - R // 2)
            angle = tl.where(first, d, d - R // 2)
        turns = d < R
        y = tl.load(x_row + heads_HB[:, None] * D + pair[None, :], mask=ok & turns[None, :], other=0.0).to(tl.float32)
        if NORM and not AFTER:
            weight_pair = tl.load(weight_ptr + pair, mask=turns, other=0.0).to(tl.float32) + offset
            y = (y * factor * weight_pair[None, :]).to(x_row.dtype.element_ty).to(tl.float32)
        cos = tl.load(cos_sin_row + angle, mask=turns, other=1.0)
        sin = tl.load(cos_sin_row + R // 2 + angle, mask=turns, other=0.0)
        sin = tl.where(first, -sin, sin)
        x = x * cos[None, :] + y * sin[None, :]
    if NORM and AFTER:
        x = x.to(x_row.dtype.element_ty).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None] * weight[None, :]
    return x.to(x_row.dtype.element_ty), at, ok


@jit
def _qk_rope_store_kernel(
    qkv_ptr, cos_sin_ptr, positions_ptr, slots_ptr, k_ptr, v_ptr, q_norm_ptr, k_norm_ptr,
    qkv_stride, k_stride_s, k_stride_h, v_stride_s, v_stride_h, eps, offset,
    N: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    R: tl.constexpr, HB: tl.constexpr, NORM: tl.constexpr, AFTER: tl.constexpr, INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    Q_BLOCKS: tl.constexpr = (N + HB - 1) // HB
    K_BLOCKS: tl.constexpr = (H + HB - 1) // HB
    t = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = qkv_ptr + t * qkv_stride
    cos_sin_row = cos_sin_ptr
    await_previous(PDL)
    if R > 0:
        cos_sin_row += tl.load(positions_ptr + t).to(tl.int64) * R
    if part < Q_BLOCKS:
        heads = part * HB + tl.arange(0, HB)
        x, at, ok = _finish_heads(row, q_norm_ptr, cos_sin_row, heads, heads < N, eps, offset, D, DP, R, NORM, AFTER,
                                  INTERLEAVED)  # fmt: skip
        tl.debug_barrier()  # pairs were read by other threads
        tl.store(at, x, mask=ok)
    elif part < Q_BLOCKS + K_BLOCKS:
        slot = tl.load(slots_ptr + t).to(tl.int64)
        heads = (part - Q_BLOCKS) * HB + tl.arange(0, HB)
        x, at, ok = _finish_heads(row + N * D, k_norm_ptr, cos_sin_row, heads, heads < H, eps, offset, D, DP, R, NORM,
                                  AFTER, INTERLEAVED)  # fmt: skip
        tl.debug_barrier()
        tl.store(at, x, mask=ok)
        d = tl.arange(0, DP)
        cache = k_ptr + slot * k_stride_s + heads[:, None] * k_stride_h + d[None, :]
        tl.store(cache, x.to(k_ptr.dtype.element_ty), mask=ok)
    else:
        slot = tl.load(slots_ptr + t).to(tl.int64)
        heads = (part - Q_BLOCKS - K_BLOCKS) * HB + tl.arange(0, HB)
        e = tl.arange(0, EP)
        v_ok = (heads < H)[:, None] & (e < E)[None, :]
        v = tl.load(row + N * D + H * D + heads[:, None] * E + e[None, :], mask=v_ok)
        v_cache = v_ptr + slot * v_stride_s + heads[:, None] * v_stride_h + e[None, :]
        tl.store(v_cache, v.to(v_ptr.dtype.element_ty), mask=v_ok)


def launch_qk_rope_store(
    qkv_TX: Tensor,
    cos_sin_PD: Tensor | None,
    positions_T: Tensor,
    slots_T: Tensor,
    k_SHD: Tensor,
    v_SHE: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    q_norm_D: Tensor | None = None,
    k_norm_D: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    norm_whole: bool = False,
    norm_after_rope: bool = False,
    rope_dim: int,
    interleaved: bool = False,
) -> Tensor:
    """Triton launch of `qk_rope_store`: one launch, two more for norms over the whole projection."""
    q_width, k_width = num_heads * head_dim, num_kv_heads * head_dim
    q_TX, k_TX = qkv_TX[:, :q_width], qkv_TX[:, q_width : q_width + k_width]
    q_TND = q_TX.unflatten(-1, (num_heads, head_dim))
    if len(qkv_TX) == 0:
        return q_TND
    norm = q_norm_D is not None and k_norm_D is not None
    if norm and norm_whole:
        launch_norm(q_TX, q_norm_D, norm_eps, norm_offset, out_TD=q_TX)
        launch_norm(k_TX, k_norm_D, norm_eps, norm_offset, out_TD=k_TX)
        norm = False
    heads = 4 if len(qkv_TX) <= 64 else 8
    blocks = -(-num_heads // heads) + 2 * -(-num_kv_heads // heads)
    pdl = has_pdl(qkv_TX.device)
    _qk_rope_store_kernel[(len(qkv_TX), blocks)](
        qkv_TX, cos_sin_PD, positions_T, slots_T, k_SHD, v_SHE, q_norm_D, k_norm_D, qkv_TX.stride(0),
        k_SHD.stride(0), k_SHD.stride(1), v_SHE.stride(0), v_SHE.stride(1), norm_eps, norm_offset, N=num_heads,
        H=num_kv_heads, D=head_dim, DP=next_power_of_2(head_dim), E=value_dim, EP=next_power_of_2(value_dim),
        R=rope_dim, HB=heads, NORM=norm, AFTER=norm_after_rope, INTERLEAVED=interleaved, PDL=pdl, launch_pdl=pdl,
        num_warps=2,
    )  # fmt: skip
    return q_TND
