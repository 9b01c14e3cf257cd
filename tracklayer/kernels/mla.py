"""What latent attention does around its products: norm, turn and store of latents, and products of each head.

T tokens, N heads, S cache slots, Q width of the queries' latent, C width of the keys' latent, R turned dims, P dims of
a head without position, X = P + R, K inputs and F outputs of a head's product.

latent_store     the queries' latent and the keys' are normed, the keys' R dims turned, latent and R dims stored
absorb_queries   a head's P dims into latent space, its R dims turned, side by side as the cache's keys are
turn_tails       the last R dims of each head turned, in place
head_products    a head's own matrix on its own columns, written where the next product reads
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracklayer.kernels.dispatch import use_triton
from tracklayer.kernels.jit import await_previous, has_pdl, jit, next_power_of_2, tl
from tracklayer.kernels.norm import rms_norm_ref
from tracklayer.kernels.rope import rotate

FEW = 64  # tokens up to which a kernel of ours makes the heads' products; above the BLAS library does


def latent_store(
    down_TX: Tensor,
    cos_sin_PR: Tensor | None,
    positions_T: Tensor,
    slots_T: Tensor,
    k_SHD: Tensor,
    *,
    kv_norm_C: Tensor,
    q_norm_Q: Tensor | None = None,
    rope_dim: int,
    eps: float,
    offset: float = 0.0,
    kv_scale: float = 1.0,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Finish the fused projection [queries | latent C | R] in place; latent and turned dims go to k_SHD[slots_T, 0].

    down_TX [T, any + C + R]; with q_norm_Q the first columns are the queries' latent, Q wide, and normed, else they are
    left alone. kv_scale: factor on the normed latent. cos_sin_PR float32 as from `rope_table`, None: nothing is turned.
    positions_T, slots_T int32. Columns of the cache beyond C + R are left alone.
    Returns views of down_TX: queries [T, any], latent [T, C], turned dims [T, R].
    Raises ValueError when the widths do not fit.
    """
    latent = len(kv_norm_C)
    front = down_TX.shape[1] - latent - rope_dim
    if front < 0 or (q_norm_Q is not None and len(q_norm_Q) != front):
        raise ValueError(
            f"a projection {down_TX.shape[1]} wide does not hold a latent of {latent}, {rope_dim} dims with positions "
            f"and {'the queries' if q_norm_Q is None else f'their latent of {len(q_norm_Q)}'}"
        )
    if k_SHD.shape[1] != 1 or k_SHD.shape[2] < latent + rope_dim:
        raise ValueError(
            f"the cache keeps {tuple(k_SHD.shape[1:])} a slot, a latent key needs (1, {latent + rope_dim})"
        )
    _check_table(cos_sin_PR, rope_dim)
    run = launch_latent_store if use_triton(down_TX) else latent_store_ref
    return run(
        down_TX, cos_sin_PR, positions_T, slots_T, k_SHD, kv_norm_C=kv_norm_C, q_norm_Q=q_norm_Q, rope_dim=rope_dim,
        eps=eps, offset=offset, kv_scale=kv_scale, interleaved=interleaved,
    )  # fmt: skip


def _check_table(cos_sin_PR: Tensor | None, rope_dim: int) -> None:
    if cos_sin_PR is not None and (cos_sin_PR.shape[1] != rope_dim or rope_dim % 2):
        raise ValueError(f"{rope_dim} dims can not be turned by a table {cos_sin_PR.shape[1]} wide")


def latent_store_ref(
    down_TX: Tensor,
    cos_sin_PR: Tensor | None,
    positions_T: Tensor,
    slots_T: Tensor,
    k_SHD: Tensor,
    *,
    kv_norm_C: Tensor,
    q_norm_Q: Tensor | None = None,
    rope_dim: int,
    eps: float,
    offset: float = 0.0,
    kv_scale: float = 1.0,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The torch reference of `latent_store`."""
    q_TX, latent_TC, turned_TR = _parts(down_TX, len(kv_norm_C), rope_dim)
    if q_norm_Q is not None:
        q_TX.copy_(rms_norm_ref(q_TX, q_norm_Q, eps, offset))
    normed_TC = rms_norm_ref(latent_TC, kv_norm_C, eps, offset)
    latent_TC.copy_(normed_TC * kv_scale if kv_scale != 1.0 else normed_TC)
    if cos_sin_PR is not None:
        turned_TR.copy_(rotate(turned_TR[:, None], cos_sin_PR[positions_T.long()], interleaved)[:, 0])
    width = len(kv_norm_C) + rope_dim
    k_SHD[slots_T.long(), 0, :width] = down_TX[:, -width:].to(k_SHD.dtype)
    return q_TX, latent_TC, turned_TR


def _parts(down_TX: Tensor, latent: int, rope_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    q_TX, latent_TC, turned_TR = down_TX.split([down_TX.shape[1] - latent - rope_dim, latent, rope_dim], -1)
    return q_TX, latent_TC, turned_TR


@jit
def _pairs(at, i, ok, cos_sin_row, R: tl.constexpr, INTERLEAVED: tl.constexpr, ROPE: tl.constexpr):
    """Both halves of the pairs `i` of R dims at `at` [.., H], turned if ROPE, and their columns."""
    if INTERLEAVED:
        first = 2 * i
        second = 2 * i + 1
    else:
        first = i
        second = i + R // 2
    x = tl.load(at + first, mask=ok, other=0.0)
    y = tl.load(at + second, mask=ok, other=0.0)
    if ROPE:
        cos = tl.load(cos_sin_row + i, mask=ok, other=1.0)
        sin = tl.load(cos_sin_row + R // 2 + i, mask=ok, other=0.0)
        xf = x.to(tl.float32)
        yf = y.to(tl.float32)
        x = (xf * cos - yf * sin).to(x.dtype)
        y = (yf * cos + xf * sin).to(y.dtype)
    return x, y, first, second


@jit
def _latent_store_kernel(
    down_ptr, cos_sin_ptr, positions_ptr, slots_ptr, k_ptr, kv_norm_ptr, q_norm_ptr, down_stride, k_stride, eps, offset,
    kv_scale, FRONT: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr,
    SCALED: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (t, 0): the keys' latent and turned dims of a token; (t, 1): its queries' latent."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    row = down_ptr + t * down_stride
    if tl.program_id(1) == 1:
        weight = tl.load(q_norm_ptr + d, mask=d < FRONT, other=0.0).to(tl.float32) + offset
        await_previous(PDL)
        x = tl.load(row + d, mask=d < FRONT, other=0.0).to(tl.float32)
        y = (x * tl.rsqrt(tl.sum(x * x, 0) / FRONT + eps) * weight).to(down_ptr.dtype.element_ty)
        tl.store(row + d, y, mask=d < FRONT)
    else:
        weight = tl.load(kv_norm_ptr + d, mask=d < C, other=0.0).to(tl.float32) + offset
        await_previous(PDL)
        cache = k_ptr + tl.load(slots_ptr + t).to(tl.int64) * k_stride
        x = tl.load(row + FRONT + d, mask=d < C, other=0.0).to(tl.float32)
        y = (x * tl.rsqrt(tl.sum(x * x, 0) / C + eps) * weight).to(down_ptr.dtype.element_ty)
        if SCALED:
            y = (y.to(tl.float32) * kv_scale).to(y.dtype)
        tl.store(row + FRONT + d, y, mask=d < C)
        tl.store(cache + d, y.to(k_ptr.dtype.element_ty), mask=d < C)
        i = tl.arange(0, HALF)
        ok = i < R // 2
        cos_sin_row = cos_sin_ptr
        if ROPE:
            cos_sin_row += tl.load(positions_ptr + t).to(tl.int64) * R
        a, b, first, second = _pairs(row + FRONT + C, i, ok, cos_sin_row, R, INTERLEAVED, ROPE)
        if ROPE:
            tl.store(row + FRONT + C + first, a, mask=ok)
            tl.store(row + FRONT + C + second, b, mask=ok)
        tl.store(cache + C + first, a.to(k_ptr.dtype.element_ty), mask=ok)
        tl.store(cache + C + second, b.to(k_ptr.dtype.element_ty), mask=ok)


def launch_latent_store(
    down_TX: Tensor,
    cos_sin_PR: Tensor | None,
    positions_T: Tensor,
    slots_T: Tensor,
    k_SHD: Tensor,
    *,
    kv_norm_C: Tensor,
    q_norm_Q: Tensor | None = None,
    rope_dim: int,
    eps: float,
    offset: float = 0.0,
    kv_scale: float = 1.0,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Triton launch of `latent_store`: one program for a token's key, one for its queries' latent."""
    latent = len(kv_norm_C)
    parts = _parts(down_TX, latent, rope_dim)
    if len(down_TX) == 0:
        return parts
    programs = 1 if q_norm_Q is None else 2
    q_norm_Q = kv_norm_C if q_norm_Q is None else q_norm_Q  # the kernel needs an address, if only to compile
    block = next_power_of_2(max(latent, len(q_norm_Q)))
    pdl = has_pdl(down_TX.device)
    _latent_store_kernel[(len(down_TX), programs)](
        down_TX, cos_sin_PR, positions_T, slots_T, k_SHD, kv_norm_C, q_norm_Q, down_TX.stride(0), k_SHD.stride(0), eps,
        offset, kv_scale, FRONT=parts[0].shape[1], C=latent, R=rope_dim, BLOCK=block,
        HALF=next_power_of_2(rope_dim // 2), SCALED=kv_scale != 1.0, ROPE=cos_sin_PR is not None,
        INTERLEAVED=interleaved, PDL=pdl, launch_pdl=pdl, num_warps=4,
    )  # fmt: skip
    return parts


def absorb_queries(
    q_TNX: Tensor, to_key_NPC: Tensor, cos_sin_PR: Tensor | None, positions_T: Tensor, *, interleaved: bool = False
) -> Tensor:
    """[T, N, C + R]: each head's first P dims times its to_key_NPC, then its other R dims, turned.

    q_TNX [T, N, P + R] is left alone, its rows and heads may be strided. cos_sin_PR as in `latent_store`.
    Raises ValueError when the widths do not fit.
    """
    heads, nope, latent = to_key_NPC.shape
    rope_dim = q_TNX.shape[2] - nope
    if q_TNX.shape[1] != heads or rope_dim < 0:
        raise ValueError(f"queries {tuple(q_TNX.shape[1:])} do not fit {heads} heads of {nope} dims without position")
    _check_table(cos_sin_PR, rope_dim)
    q_TND = q_TNX.new_empty(len(q_TNX), heads, latent + rope_dim)
    out_TNC, tails_TNR = q_TND[..., :latent], q_TND[..., latent:]
    if use_triton(q_TNX) and len(q_TNX) <= FEW:
        launch_head_products(
            q_TNX, to_key_NPC, q_TND, by_rows=True, cos_sin_PR=cos_sin_PR, positions_T=positions_T, rope_dim=rope_dim,
            interleaved=interleaved,
        )  # fmt: skip
        return q_TND
    torch.bmm(q_TNX[..., :nope].transpose(0, 1), to_key_NPC, out=out_TNC.transpose(0, 1))
    if use_triton(q_TNX) and cos_sin_PR is not None:
        launch_turn(q_TNX[..., nope:], tails_TNR, cos_sin_PR, positions_T, interleaved)
    else:
        tails_TNR.copy_(_turned(q_TNX[..., nope:], cos_sin_PR, positions_T, interleaved))
    return q_TND


def absorb_queries_ref(
    q_TNX: Tensor, to_key_NPC: Tensor, cos_sin_PR: Tensor | None, positions_T: Tensor, *, interleaved: bool = False
) -> Tensor:
    """The torch reference of `absorb_queries`."""
    nope = to_key_NPC.shape[1]
    nope_TNC = torch.einsum("tnp,npc->tnc", q_TNX[..., :nope], to_key_NPC)
    return torch.cat([nope_TNC, _turned(q_TNX[..., nope:], cos_sin_PR, positions_T, interleaved)], -1)


def _turned(x_TNR: Tensor, cos_sin_PR: Tensor | None, positions_T: Tensor, interleaved: bool) -> Tensor:
    return x_TNR if cos_sin_PR is None else rotate(x_TNR, cos_sin_PR[positions_T.long()], interleaved)


def turn_tails(
    q_TNX: Tensor, cos_sin_PR: Tensor, positions_T: Tensor, *, rope_dim: int, interleaved: bool = False
) -> None:
    """Turn the last rope_dim dims of each head of q_TNX [T, N, X] in place."""
    _check_table(cos_sin_PR, rope_dim)
    if use_triton(q_TNX):
        tails_TNR = q_TNX[..., q_TNX.shape[2] - rope_dim :]
        launch_turn(tails_TNR, tails_TNR, cos_sin_PR, positions_T, interleaved)
    else:
        turn_tails_ref(q_TNX, cos_sin_PR, positions_T, rope_dim=rope_dim, interleaved=interleaved)


def turn_tails_ref(
    q_TNX: Tensor, cos_sin_PR: Tensor, positions_T: Tensor, *, rope_dim: int, interleaved: bool = False
) -> None:
    """The torch reference of `turn_tails`."""
    tails_TNR = q_TNX[..., q_TNX.shape[2] - rope_dim :]
    tails_TNR.copy_(_turned(tails_TNR, cos_sin_PR, positions_T, interleaved))


@jit
def _turn_kernel(
    x_ptr, y_ptr, cos_sin_ptr, positions_ptr, x_stride_t, x_stride_n, y_stride_t, y_stride_n, N: tl.constexpr,
    NB: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * NB + tl.arange(0, NB)
    i = tl.arange(0, HALF)[None, :]
    ok = (n < N)[:, None] & (i < R // 2)
    await_previous(PDL)
    cos_sin_row = cos_sin_ptr + tl.load(positions_ptr + t).to(tl.int64) * R
    x_at = x_ptr + t * x_stride_t + n[:, None] * x_stride_n
    y_at = y_ptr + t * y_stride_t + n[:, None] * y_stride_n
    x, y, first, second = _pairs(x_at, i, ok, cos_sin_row, R, INTERLEAVED, True)
    tl.store(y_at + first, x, mask=ok)
    tl.store(y_at + second, y, mask=ok)


def launch_turn(x_TNR: Tensor, out_TNR: Tensor, cos_sin_PR: Tensor, positions_T: Tensor, interleaved: bool) -> None:
    """Triton launch: out_TNR, which may be x_TNR itself, gets its R dims turned. Only the last axis is contiguous."""
    tokens, heads, rope_dim = x_TNR.shape
    if x_TNR.numel() == 0:
        return
    block = min(next_power_of_2(heads), 32)
    pdl = has_pdl(x_TNR.device)
    _turn_kernel[(tokens, -(-heads // block))](
        x_TNR, out_TNR, cos_sin_PR, positions_T, x_TNR.stride(0), x_TNR.stride(1), out_TNR.stride(0), out_TNR.stride(1),
        N=heads, NB=block, R=rope_dim, HALF=next_power_of_2(rope_dim // 2), INTERLEAVED=interleaved, PDL=pdl,
        launch_pdl=pdl, num_warps=2,
    )  # fmt: skip


def head_products(x_TNK: Tensor, weight_NFK: Tensor, out_TNF: Tensor) -> Tensor:
    """out_TNF[t, n] = weight_NFK[n] @ x_TNK[t, n]; heads and rows of all three may be strided. Returns out_TNF."""
    if use_triton(x_TNK) and len(x_TNK) <= FEW:
        launch_head_products(x_TNK, weight_NFK, out_TNF, by_rows=False)
    else:
        torch.bmm(x_TNK.transpose(0, 1), weight_NFK.transpose(1, 2), out=out_TNF.transpose(0, 1))
    return out_TNF


def head_products_ref(x_TNK: Tensor, weight_NFK: Tensor, out_TNF: Tensor) -> Tensor:
    """The torch reference of `head_products`."""
    return out_TNF.copy_(torch.einsum("tnk,nfk->tnf", x_TNK, weight_NFK))


@jit(do_not_specialize=["tokens"])
def _head_products_kernel(
    x_ptr, weight_ptr, y_ptr, cos_sin_ptr, positions_ptr, tokens, x_stride_t, x_stride_n, weight_stride_n,
    weight_stride, y_stride_t, y_stride_n, K: tl.constexpr, KP: tl.constexpr, F: tl.constexpr, FB: tl.constexpr,
    M: tl.constexpr, BY_ROWS: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr, ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program owns FB outputs of a head for M tokens; the first of a head also carries its R dims over.

    BY_ROWS: weights [K, F] a head, else [F, K]; they are asked for before the kernel in front has finished.
    """
    n = tl.program_id(0).to(tl.int64)
    t = tl.program_id(2) * M + tl.arange(0, M)
    f = tl.program_id(1) * FB + tl.arange(0, FB)
    k = tl.arange(0, KP)
    t_ok = t < tokens
    w_row = weight_ptr + n * weight_stride_n
    if BY_ROWS:
        w = tl.load(w_row + k[:, None] * weight_stride + f[None, :], mask=(k < K)[:, None] & (f < F)[None, :],
                    other=0.0)  # fmt: skip
    else:
        w = tl.load(w_row + f[:, None] * weight_stride + k[None, :], mask=(f < F)[:, None] & (k < K)[None, :],
                    other=0.0)  # fmt: skip
        w = tl.trans(w)
    await_previous(PDL)
    x_at = x_ptr + t.to(tl.int64)[:, None] * x_stride_t + n * x_stride_n
    y_at = y_ptr + t.to(tl.int64)[:, None] * y_stride_t + n * y_stride_n
    x = tl.load(x_at + k[None, :], mask=t_ok[:, None] & (k < K)[None, :], other=0.0)
    y = tl.dot(x, w, input_precision=PRECISION)
    tl.store(y_at + f[None, :], y.to(y_ptr.dtype.element_ty), mask=t_ok[:, None] & (f < F)[None, :])
    if (R > 0) & (tl.program_id(1) == 0):
        i = tl.arange(0, HALF)[None, :]
        ok = t_ok[:, None] & (i < R // 2)
        cos_sin_row = cos_sin_ptr
        if ROPE:
            cos_sin_row += tl.load(positions_ptr + t, mask=t_ok, other=0).to(tl.int64)[:, None] * R
        a, b, first, second = _pairs(x_at + K, i, ok, cos_sin_row, R, INTERLEAVED, ROPE)
        tl.store(y_at + F + first, a, mask=ok)
        tl.store(y_at + F + second, b, mask=ok)


def launch_head_products(
    x_TNX: Tensor,
    weight_NAB: Tensor,
    out_TNY: Tensor,
    *,
    by_rows: bool,
    cos_sin_PR: Tensor | None = None,
    positions_T: Tensor | None = None,
    rope_dim: int = 0,
    interleaved: bool = False,
    outputs: int | None = None,
    warps: int = 4,
) -> None:
    """Triton launch: weights [N, K, F] if by_rows else [N, F, K] on the first K columns of x into the first F of out.

    rope_dim: that many columns behind them are carried over, turned by cos_sin_PR. outputs: of a program (schedule).
    """
    tokens = len(x_TNX)
    heads, inputs, width = weight_NAB.shape if by_rows else weight_NAB.transpose(1, 2).shape
    if tokens == 0:
        return
    assert rope_dim % 2 == 0, "pairs are carried over"
    inputs_padded, rows = max(next_power_of_2(inputs), 16), min(max(next_power_of_2(tokens), 16), 64)
    outputs = outputs or max(min(16384 // inputs_padded, next_power_of_2(width)), 16)
    pdl = has_pdl(x_TNX.device)
    _head_products_kernel[(heads, -(-width // outputs), -(-tokens // rows))](
        x_TNX, weight_NAB, out_TNY, cos_sin_PR, positions_T, tokens, x_TNX.stride(0), x_TNX.stride(1),
        weight_NAB.stride(0), weight_NAB.stride(1), out_TNY.stride(0), out_TNY.stride(1), K=inputs, KP=inputs_padded,
        F=width, FB=outputs, M=rows, BY_ROWS=by_rows, R=rope_dim, HALF=next_power_of_2(max(rope_dim // 2, 1)),
        ROPE=cos_sin_PR is not None, INTERLEAVED=interleaved,
        PRECISION="ieee" if x_TNX.dtype == torch.float32 else "tf32", PDL=pdl, launch_pdl=pdl, num_warps=warps,
    )  # fmt: skip
