"""Dense products y = x @ weight.T + bias, with a matrix-vector form for small batches.

T tokens, D input width, F output width. Sums are float32, results have x's dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tracklayer.kernels.dispatch import use_triton
from tracklayer.kernels.jit import await_previous, has_pdl, jit, next_power_of_2, tl
from tracklayer.kernels.norm import AddNorm, as_tensor, summed_token

SMALL = 2  # tokens up to which the matrix-vector kernel beats the BLAS library (at 4 it loses: one pass a token)


def linear(x: Tensor | AddNorm, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """x [T, D] @ weight_FD.T + bias -> [T, F]; matrix-vector kernel for few tokens, the BLAS library for many.

    An AddNorm of one token is made inside the product's own launch.
    """
    if isinstance(x, AddNorm) and x.fusable:
        return launch_linear_norm(x, weight_FD, bias_F)
    x_TD = as_tensor(x)
    if len(x_TD) <= SMALL and x_TD.dim() == 2 and use_triton(x_TD):
        return launch_linear_small(x_TD, weight_FD, bias_F)
    return F.linear(x_TD, weight_FD, bias_F)


def linear_small(x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """`linear` for T <= SMALL by the matrix-vector kernel. Raises ValueError for more tokens."""
    if len(x_TD) > SMALL:
        raise ValueError(f"linear_small takes at most {SMALL} tokens, got {len(x_TD)}; use linear")
    run = launch_linear_small if use_triton(x_TD) else linear_small_ref
    return run(x_TD, weight_FD, bias_F)


def linear_small_ref(x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """The torch reference of `linear_small`."""
    return F.linear(x_TD, weight_FD, bias_F)


@jit
def _linear_small_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, x_stride, weight_stride, F: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
    FB: tl.constexpr, DB: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program owns FB outputs. Its first weights are asked for before the kernel in front has finished."""
    f = tl.program_id(0) * FB + tl.arange(0, FB)
    d = tl.arange(0, DB)
    w_row = weight_ptr + f.to(tl.int64)[:, None] * weight_stride
    w = tl.load(w_row + d[None, :], mask=(f < F)[:, None] & (d < D)[None, :], other=0.0, eviction_policy="evict_first")
    await_previous(PDL)
    for t in tl.static_range(T):
        total = tl.zeros([FB], tl.float32)
        for base in tl.static_range(0, D, DB):
            at = base + d
            if base > 0 or (t > 0 and D > DB):
                w = tl.load(w_row + at[None, :], mask=(f < F)[:, None] & (at < D)[None, :], other=0.0)
            x = tl.load(x_ptr + t * x_stride + at, mask=at < D, other=0.0)
            total += tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], 1)
        if BIAS:
            total += tl.load(bias_ptr + f, mask=f < F, other=0.0).to(tl.float32)
        tl.store(y_ptr + t * F + f, total.to(y_ptr.dtype.element_ty), mask=f < F)


def launch_linear_small(
    x_TD: Tensor,
    weight_FD: Tensor,
    bias_F: Tensor | None = None,
    *,
    rows: int = 8,
    columns: int | None = None,
    warps: int | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """Triton launch of `linear_small`: `rows` outputs a program, `columns` inputs a turn (half of them does best)."""
    tokens, width = x_TD.shape
    outputs = len(weight_FD)
    y = torch.empty(tokens, outputs, dtype=x_TD.dtype, device=x_TD.device)
    if tokens == 0:
        return y
    columns = min(next_power_of_2(width), columns or min(max(next_power_of_2(width) // 2, 256), 2048))
    pdl = has_pdl(x_TD.device) if pdl is None else pdl
    _linear_small_kernel[(-(-outputs // rows),)](
        x_TD, weight_FD, bias_F, y, x_TD.stride(0), weight_FD.stride(0), F=outputs, D=width, T=tokens, FB=rows,
        DB=columns, BIAS=bias_F is not None, PDL=pdl, launch_pdl=pdl, num_warps=warps or (8 if columns >= 2048 else 4),
    )  # fmt: skip
    return y


@jit
def _linear_norm_kernel(
    delta_ptr, residual_ptr, norm_ptr, weight_ptr, bias_ptr, y_ptr, made_ptr, new_residual_ptr, eps, offset, scale,
    weight_stride, F: tl.constexpr, D: tl.constexpr, FB: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As `_linear_small_kernel` for one token, whose residual sum and norm every program makes for itself."""
    f = tl.program_id(0) * FB + tl.arange(0, FB)
    d = tl.arange(0, BLOCK)
    w_at = weight_ptr + f.to(tl.int64)[:, None] * weight_stride + d[None, :]
    w = tl.load(w_at, mask=(f < F)[:, None] & (d < D)[None, :], other=0.0, eviction_policy="evict_first")
    await_previous(PDL)
    x = summed_token(
        delta_ptr, residual_ptr, norm_ptr, eps, offset, scale, made_ptr, new_residual_ptr, tl.program_id(0) == 0, D,
        BLOCK,
    )  # fmt: skip
    total = tl.sum(w.to(tl.float32) * x[None, :], 1)
    if BIAS:
        total += tl.load(bias_ptr + f, mask=f < F, other=0.0).to(tl.float32)
    tl.store(y_ptr + f, total.to(y_ptr.dtype.element_ty), mask=f < F)


def launch_linear_norm(
    x: AddNorm, weight_FD: Tensor, bias_F: Tensor | None = None, *, rows: int | None = None
) -> Tensor:
    """Triton launch of `linear` over an AddNorm of one token, which is made by it. Returns [1, F]."""
    outputs, width = weight_FD.shape
    block = next_power_of_2(width)
    rows = rows or max(1, min(8, 16384 // block))
    y = torch.empty(1, outputs, dtype=x.delta_TD.dtype, device=x.delta_TD.device)
    delta_TD, residual_TD = x.delta_TD, x.residual_TD
    made_TD, new_residual_TD = x.outputs()
    pdl = has_pdl(y.device)
    _linear_norm_kernel[(-(-outputs // rows),)](
        delta_TD, residual_TD, x.weight_D, weight_FD, bias_F, y, made_TD, new_residual_TD, x.eps, x.offset, x.scale,
        weight_FD.stride(0), F=outputs, D=width, FB=rows, BLOCK=block, BIAS=bias_F is not None, PDL=pdl,
        launch_pdl=pdl, num_warps=8 if rows * block >= 8192 else 4,
    )  # fmt: skip
    return y
