"""Dense products y = x @ weight.T + bias, with a matrix-vector form for small batches.

T tokens, D input width, F output width. Sums are float32, results have x's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tracklayer.kernels.dispatch import use_triton
from tracklayer.kernels.jit import await_previous, counters, has_pdl, jit, next_power_of_2, tl
from tracklayer.kernels.norm import add_rms_norm_ref

SMALL = 8  # tokens up to which the matrix-vector kernel is used


@dataclass(frozen=True, slots=True)
class FusedNorm:
    """What `linear_small` does before the product: residual_TD += x in place, x = rms_norm(residual)."""

    residual_TD: Tensor
    weight_D: Tensor
    eps: float
    offset: float = 0.0


def linear(x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """x_TD [T, D] @ weight_FD.T + bias -> [T, F]; matrix-vector kernel for few tokens, the BLAS library for many."""
    if len(x_TD) <= SMALL and x_TD.dim() == 2 and use_triton(x_TD):
        return launch_linear_small(x_TD, weight_FD, bias_F)
    return F.linear(x_TD, weight_FD, bias_F)


def linear_small(
    x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None, *, norm: FusedNorm | None = None
) -> Tensor:
    """`linear` for T <= 8, with the residual sum and RMS norm before it fused in. Returns [T, F] in x's dtype.

    Raises ValueError for more tokens.
    """
    if len(x_TD) > SMALL:
        raise ValueError(f"linear_small takes at most {SMALL} tokens, got {len(x_TD)}; use linear")
    if use_triton(x_TD):
        return launch_linear_small(x_TD, weight_FD, bias_F, norm=norm)
    return linear_small_ref(x_TD, weight_FD, bias_F, norm=norm)


def linear_small_ref(
    x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None, *, norm: FusedNorm | None = None
) -> Tensor:
    """The torch reference of `linear_small`."""
    if norm is not None:
        x_TD = add_rms_norm_ref(x_TD, norm.residual_TD, norm.weight_D, norm.eps, norm.offset)
    return F.linear(x_TD, weight_FD, bias_F)


@jit
def _linear_small_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, norm_ptr, y_ptr, done_ptr, x_stride, weight_stride, residual_stride,
    eps, offset, F: tl.constexpr, D: tl.constexpr, T: tl.constexpr, FB: tl.constexpr, DB: tl.constexpr,
    DP: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program owns FB outputs. Its first weights are asked for before the kernel in front has finished."""
    f = tl.program_id(0) * FB + tl.arange(0, FB)
    d = tl.arange(0, DB)
    w_row = weight_ptr + f.to(tl.int64)[:, None] * weight_stride
    w = tl.load(w_row + d[None, :], mask=(f < F)[:, None] & (d < D)[None, :], other=0.0, eviction_policy="evict_first")
    whole = tl.arange(0, DP)
    await_previous(PDL)
    for t in tl.static_range(T):
        rms = 1.0
        if NORM:
            x = tl.load(x_ptr + t * x_stride + whole, mask=whole < D, other=0.0).to(tl.float32)
            x += tl.load(residual_ptr + t * residual_stride + whole, mask=whole < D, other=0.0).to(tl.float32)
            x = x.to(residual_ptr.dtype.element_ty).to(tl.float32)
            rms = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
        total = tl.zeros([FB], tl.float32)
        for base in tl.static_range(0, D, DB):
            at = base + d
            if base > 0 or (t > 0 and D > DB):
                w = tl.load(w_row + at[None, :], mask=(f < F)[:, None] & (at < D)[None, :], other=0.0)
            x = tl.load(x_ptr + t * x_stride + at, mask=at < D, other=0.0)
            if NORM:
                old = tl.load(residual_ptr + t * residual_stride + at, mask=at < D, other=0.0)
                x = (x.to(tl.float32) + old.to(tl.float32)).to(residual_ptr.dtype.element_ty).to(tl.float32)
                gain = tl.load(norm_ptr + at, mask=at < D, other=0.0).to(tl.float32) + offset
                x = (x * rms * gain).to(x_ptr.dtype.element_ty)
            total += tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], 1)
        if BIAS:
            total += tl.load(bias_ptr + f, mask=f < F, other=0.0).to(tl.float32)
        tl.store(y_ptr + t * F + f, total.to(y_ptr.dtype.element_ty), mask=f < F)
    if NORM:
        # All programs read the residual, so it may change only when the last of them has.
        tl.debug_barrier()
        if tl.atomic_add(done_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1:
            tl.store(done_ptr, 0)
            for token in tl.static_range(T):
                place = residual_ptr + token * residual_stride + whole
                new = tl.load(x_ptr + token * x_stride + whole, mask=whole < D, other=0.0).to(tl.float32)
                new += tl.load(place, mask=whole < D, other=0.0).to(tl.float32)
                tl.store(place, new.to(residual_ptr.dtype.element_ty), mask=whole < D)


def launch_linear_small(
    x_TD: Tensor,
    weight_FD: Tensor,
    bias_F: Tensor | None = None,
    *,
    norm: FusedNorm | None = None,
    rows: int | None = None,
    columns: int | None = None,
    warps: int = 4,
    pdl: bool | None = None,
) -> Tensor:
    """Triton launch of `linear_small`: `rows` outputs a program, `columns` inputs a turn."""
    tokens, width = x_TD.shape
    outputs = len(weight_FD)
    y = torch.empty(tokens, outputs, dtype=x_TD.dtype, device=x_TD.device)
    if tokens == 0:
        return y
    columns = min(next_power_of_2(width), columns or 2048)
    rows = rows or (8 if columns <= 2048 else 4)
    pdl = has_pdl(x_TD.device) if pdl is None else pdl
    residual = norm.residual_TD if norm else None
    _linear_small_kernel[(-(-outputs // rows),)](
        x_TD, weight_FD, bias_F, residual, norm.weight_D if norm else None, y,
        counters(x_TD.device, 1), x_TD.stride(0), weight_FD.stride(0), residual.stride(0) if norm else 0,
        norm.eps if norm else 0.0, norm.offset if norm else 0.0, F=outputs, D=width, T=tokens, FB=rows, DB=columns,
        DP=next_power_of_2(width), BIAS=bias_F is not None, NORM=norm is not None, PDL=pdl, launch_pdl=pdl,
        num_warps=warps,
    )  # fmt: skip
    return y
