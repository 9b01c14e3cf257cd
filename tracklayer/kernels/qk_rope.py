"""The fused projection's heads: split, norm, rotate and store q, k and v in one launch.

T tokens, N query heads, H key heads, D head width, E value width, S cache slots, P positions, X = N*D + H*D + H*E.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tracklayer.kernels.dispatch import use_triton
from tracklayer.kernels.jit import await_previous, has_pdl, jit, next_power_of_2, tl
from tracklayer.kernels.norm import launch_norm, rms_norm_ref
from tracklayer.kernels.rope import rotate


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Heads:
    """How the projection is cut into heads, and what becomes of q and k. A layer makes one, once.

    q_norm_D, k_norm_D: RMS norm weights, [D] per head, or [N*D] / [H*D] with norm_whole (over the whole projection).
    norm_after_rope: rotate first, then norm. rope_dim: the first dims of a head that turn, 0 for none.
    Raises ValueError for a rope_dim that does not fit the head, or norm weights of q or k alone.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    rope_dim: int
    interleaved: bool = False
    q_norm_D: Tensor | None = None
    k_norm_D: Tensor | None = None
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    norm_whole: bool = False
    norm_after_rope: bool = False

    def __post_init__(self) -> None:
        if self.rope_dim % 2 or self.rope_dim > self.head_dim:
            raise ValueError(f"rope_dim must be even and at most the head width {self.head_dim}, got {self.rope_dim}")
        if (self.q_norm_D is None) != (self.k_norm_D is None):
            raise ValueError("give norm weights for both q and k, or for neither")

    @property
    def widths(self) -> tuple[int, int, int]:
        """Columns of q, k and v in the projection."""
        return self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, self.num_kv_heads * self.value_dim


def qk_rope_store(
    qkv_TX: Tensor,
    cos_sin_PD: Tensor | None,
    positions_T: Tensor,
    slots_T: Tensor,
    k_SHD: Tensor,
    v_SHE: Tensor,
    heads: Heads,
) -> Tensor:
    """Split the fused projection, norm and rotate q and k, store k and v in the caches; returns q [T, N, D].

    In place: qkv_TX holds the finished q and k afterwards, and the result is a view of it (rows X apart).

    qkv_TX [T, N*D + H*D + H*E]; cos_sin_PD from `rope_table` (None with rope_dim 0); positions_T, slots_T int32.
    k and v go to k_SHD[slots_T], v_SHE[slots_T] in the caches' dtype.
    Raises ValueError when the widths do not add up.
    """
    width, rope_dim = sum(heads.widths), heads.rope_dim
    if qkv_TX.shape[-1] != width:
        raise ValueError(f"the projection has width {qkv_TX.shape[-1]}, its heads need {width}")
    if rope_dim and (cos_sin_PD is None or cos_sin_PD.shape[-1] != rope_dim):
        given = None if cos_sin_PD is None else cos_sin_PD.shape
        raise ValueError(f"rope_dim {rope_dim} needs a table of that width, got {given}")
    # Weights over the whole projection and after the rotation: no family does it, torch will do.
    plain = heads.q_norm_D is not None and heads.norm_whole and heads.norm_after_rope
    run = launch_qk_rope_store if use_triton(qkv_TX) and not plain else qk_rope_store_ref
    return run(qkv_TX, cos_sin_PD, positions_T, slots_T, k_SHD, v_SHE, heads)


def qk_rope_store_ref(
    qkv_TX: Tensor,
    cos_sin_PD: Tensor | None,
    positions_T: Tensor,
    slots_T: Tensor,
    k_SHD: Tensor,
    v_SHE: Tensor,
    heads: Heads,
) -> Tensor:
    """The torch reference of `qk_rope_store`."""
    q_width, k_width, _ = heads.widths
    q_TX, k_TX, v_TX = qkv_TX.split(heads.widths, -1)
    slots_T = slots_T.long()
    cos_sin_TR = None if cos_sin_PD is None or heads.rope_dim == 0 else cos_sin_PD[positions_T.long()]

    def finish(x_TX: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None and heads.norm_whole and not heads.norm_after_rope:
            x_TX = rms_norm_ref(x_TX, weight, heads.norm_eps, heads.norm_offset)
        x_THD = x_TX.unflatten(-1, (-1, heads.head_dim))
        if weight is not None and not heads.norm_whole and not heads.norm_after_rope:
            x_THD = rms_norm_ref(x_THD, weight, heads.norm_eps, heads.norm_offset)
        if cos_sin_TR is not None:
            x_THD = rotate(x_THD, cos_sin_TR, heads.interleaved)
        if weight is not None and heads.norm_after_rope:
            shape = x_THD.shape
            x_THD = x_THD.flatten(1) if heads.norm_whole else x_THD
            x_THD = rms_norm_ref(x_THD, weight, heads.norm_eps, heads.norm_offset).view(shape)
        return x_THD

    # Without norms q and k are turned alike: at once, which is felt where every operation costs microseconds.
    alike = heads.q_norm_D is None
    parts = [(qkv_TX[..., : q_width + k_width], None)] if alike else [(k_TX, heads.k_norm_D), (q_TX, heads.q_norm_D)]
    for part_TX, weight in parts:
        if weight is not None or cos_sin_TR is not None:
            part_TX.copy_(finish(part_TX, weight).flatten(1))
    k_SHD[slots_T] = k_TX.unflatten(-1, (heads.num_kv_heads, heads.head_dim)).to(k_SHD.dtype)
    v_SHE[slots_T] = v_TX.unflatten(-1, (heads.num_kv_heads, heads.value_dim)).to(v_SHE.dtype)
    return q_TX.unflatten(-1, (heads.num_heads, heads.head_dim))


@jit
def _normed(x, factor, weight_ptr, at, ok, offset):
    weight = tl.load(weight_ptr + at, mask=ok, other=0.0).to(tl.float32) + offset
    return x * factor * weight[None, :]


@jit
def _finish_heads(
    x_row, weight_ptr, cos_sin_row, cache_row, cache_stride, heads_HB, heads_ok, eps, offset, D: tl.constexpr,
    R: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, NORM: tl.constexpr, AFTER: tl.constexpr,
    INTERLEAVED: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Norm and rotate a block of heads in place, and store them in the cache too.

    Each pair that turns lies in one thread: a its first dims, b its second, c the dims that do not turn.
    """
    head = x_row + heads_HB[:, None] * D
    kept = cache_row + heads_HB[:, None] * cache_stride
    dtype = x_row.dtype.element_ty
    j = tl.arange(0, HALF)
    rest = R + tl.arange(0, REST)
    turns = j < R // 2
    still = rest < D
    if INTERLEAVED:
        first = 2 * j
        second = first + 1
    else:
        first = j
        second = first + R // 2
    ab_ok = heads_ok[:, None] & turns[None, :]
    c_ok = heads_ok[:, None] & still[None, :]
    if R > 0:
        a = tl.load(head + first[None, :], mask=ab_ok, other=0.0).to(tl.float32)
        b = tl.load(head + second[None, :], mask=ab_ok, other=0.0).to(tl.float32)
    if D > R:
        c = tl.load(head + rest[None, :], mask=c_ok, other=0.0).to(tl.float32)
    if NORM and not AFTER:
        square = tl.zeros(heads_HB.shape, tl.float32)
        if R > 0:
            square += tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if D > R:
            square += tl.sum(c * c, 1)
        factor = tl.rsqrt(square / D + eps)[:, None]
        if R > 0:
            a = _normed(a, factor, weight_ptr, first, turns, offset).to(dtype).to(tl.float32)
            b = _normed(b, factor, weight_ptr, second, turns, offset).to(dtype).to(tl.float32)
        if D > R:
            c = _normed(c, factor, weight_ptr, rest, still, offset)
    if R > 0:
        cos = tl.load(cos_sin_row + j, mask=turns, other=1.0)[None, :]
        sin = tl.load(cos_sin_row + R // 2 + j, mask=turns, other=0.0)[None, :]
        turned = a * cos - b * sin
        b = b * cos + a * sin
        a = turned
    if NORM and AFTER:
        square = tl.zeros(heads_HB.shape, tl.float32)
        if R > 0:
            a = a.to(dtype).to(tl.float32)
            b = b.to(dtype).to(tl.float32)
            square += tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if D > R:
            square += tl.sum(c * c, 1)
        factor = tl.rsqrt(square / D + eps)[:, None]
        if R > 0:
            a = _normed(a, factor, weight_ptr, first, turns, offset)
            b = _normed(b, factor, weight_ptr, second, turns, offset)
        if D > R:
            c = _normed(c, factor, weight_ptr, rest, still, offset)
    if R > 0:
        tl.store(head + first[None, :], a.to(dtype), mask=ab_ok)
        tl.store(head + second[None, :], b.to(dtype), mask=ab_ok)
    if D > R:
        tl.store(head + rest[None, :], c.to(dtype), mask=c_ok)
    if CACHE:
        stored = cache_row.dtype.element_ty
        if R > 0:
            tl.store(kept + first[None, :], a.to(dtype).to(stored), mask=ab_ok)
            tl.store(kept + second[None, :], b.to(dtype).to(stored), mask=ab_ok)
        if D > R:
            tl.store(kept + rest[None, :], c.to(dtype).to(stored), mask=c_ok)


@jit
def _qk_rope_store_kernel(
    qkv_ptr, cos_sin_ptr, positions_ptr, slots_ptr, k_ptr, v_ptr, q_norm_ptr, k_norm_ptr,
    qkv_stride, k_stride_s, k_stride_h, v_stride_s, v_stride_h, eps, offset,
    N: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, R: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, HB: tl.constexpr, NORM: tl.constexpr, AFTER: tl.constexpr,
    INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
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
        _finish_heads(row, q_norm_ptr, cos_sin_row, k_ptr, k_stride_h, heads, heads < N, eps, offset, D, R, HALF,
                      REST, NORM, AFTER, INTERLEAVED, False)  # fmt: skip
    elif part < Q_BLOCKS + K_BLOCKS:
        slot = tl.load(slots_ptr + t).to(tl.int64)
        heads = (part - Q_BLOCKS) * HB + tl.arange(0, HB)
        _finish_heads(row + N * D, k_norm_ptr, cos_sin_row, k_ptr + slot * k_stride_s, k_stride_h, heads, heads < H,
                      eps, offset, D, R, HALF, REST, NORM, AFTER, INTERLEAVED, True)  # fmt: skip
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
    heads: Heads,
) -> Tensor:
    """Triton launch of `qk_rope_store`: one launch, two more for norms over the whole projection."""
    q_width, k_width, _ = heads.widths
    q_TX, k_TX = qkv_TX[:, :q_width], qkv_TX[:, q_width : q_width + k_width]
    q_TND = q_TX.unflatten(-1, (heads.num_heads, heads.head_dim))
    if len(qkv_TX) == 0:
        return q_TND
    norm = heads.q_norm_D is not None and heads.k_norm_D is not None
    if norm and heads.norm_whole:
        launch_norm(q_TX, heads.q_norm_D, heads.norm_eps, heads.norm_offset, out_TD=q_TX)
        launch_norm(k_TX, heads.k_norm_D, heads.norm_eps, heads.norm_offset, out_TD=k_TX)
        norm = False
    at_once = 4 if len(qkv_TX) <= 64 else 8
    blocks = -(-heads.num_heads // at_once) + 2 * -(-heads.num_kv_heads // at_once)
    pdl = has_pdl(qkv_TX.device)
    _qk_rope_store_kernel[(len(qkv_TX), blocks)](
        qkv_TX, cos_sin_PD, positions_T, slots_T, k_SHD, v_SHE, heads.q_norm_D, heads.k_norm_D, qkv_TX.stride(0),
        k_SHD.stride(0), k_SHD.stride(1), v_SHE.stride(0), v_SHE.stride(1), heads.norm_eps, heads.norm_offset,
        N=heads.num_heads, H=heads.num_kv_heads, D=heads.head_dim, E=heads.value_dim,
        EP=next_power_of_2(heads.value_dim), R=heads.rope_dim, HALF=next_power_of_2(heads.rope_dim // 2),
        REST=next_power_of_2(heads.head_dim - heads.rope_dim), HB=at_once, NORM=norm,
        AFTER=heads.norm_after_rope, INTERLEAVED=heads.interleaved, PDL=pdl, launch_pdl=pdl, num_warps=2,
    )  # fmt: skip
    return q_TND
