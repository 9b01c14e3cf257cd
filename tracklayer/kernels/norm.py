"""Root-mean-square and layer normalisation, alone and fused with the residual sum.

T tokens, D width. All arithmetic is float32; results have x's dtype.
    rms_norm      x / sqrt(mean(x^2) + eps) * (weight + offset)
    add_rms_norm  residual += scale * delta (rounded to the residual's dtype), then rms_norm of the residual
    layer_norm    (x - mean) / sqrt(var + eps) * weight + bias
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tracklayer.kernels.combine import WeightedSum
from tracklayer.kernels.dispatch import use_triton
from tracklayer.kernels.jit import await_previous, has_pdl, jit, next_power_of_2, tl


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Normalise the last axis of x [..., D] by its root mean square. Returns the same shape and dtype."""
    if use_triton(x_TD):
        return launch_norm(x_TD, weight_D, eps, offset)
    return rms_norm_ref(x_TD, weight_D, eps, offset)


def rms_norm_ref(x_TD: Tensor, weight_D: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """The torch reference of `rms_norm`."""
    weight_D = weight_D.float() + offset if offset else weight_D.float()
    return F.rms_norm(x_TD.float(), weight_D.shape, weight_D, eps).to(x_TD.dtype)


def add_rms_norm(
    delta_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, offset: float = 0.0, scale: float = 1.0
) -> Tensor:
    """residual_TD += scale * delta_TD in place; returns the RMS norm of the new residual, [T, D] in delta's dtype."""
    if use_triton(delta_TD):
        return launch_norm(delta_TD, weight_D, eps, offset, residual=residual_TD, scale=scale)
    return add_rms_norm_ref(delta_TD, residual_TD, weight_D, eps, offset, scale)


def add_rms_norm_ref(
    delta_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, offset: float = 0.0, scale: float = 1.0
) -> Tensor:
    """The torch reference of `add_rms_norm`."""
    residual_TD.copy_(torch.add(residual_TD.float(), delta_TD.float(), alpha=scale))
    return rms_norm_ref(residual_TD, weight_D, eps, offset).to(delta_TD.dtype)


@dataclass(slots=True)
class AddNorm:
    """An `add_rms_norm` that is not made yet: whoever reads it first makes it, alone or in front of its own work.

    Once it is made, residual_TD is the new residual stream and made_TD the normed tokens.
    """

    delta_TD: Tensor | WeightedSum
    residual_TD: Tensor
    weight_D: Tensor
    eps: float
    offset: float = 0.0
    scale: float = 1.0
    made_TD: Tensor | None = None

    def tensor(self) -> Tensor:
        """The normed tokens [T, D]."""
        if self.made_TD is None:
            how = (self.residual_TD, self.weight_D, self.eps, self.offset, self.scale)
            delta_TD = self.delta_TD
            self.made_TD = (
                delta_TD.add_rms_norm(*how) if isinstance(delta_TD, WeightedSum) else add_rms_norm(delta_TD, *how)
            )
        return self.made_TD

    @property
    def fusable(self) -> bool:
        """Whether a kernel may make it in front of its own work: one token, so that each program can do it anew."""
        delta_TD = self.delta_TD
        if self.made_TD is not None or isinstance(delta_TD, WeightedSum):
            return False
        return len(delta_TD) == 1 and delta_TD.shape[1] <= 8192 and use_triton(delta_TD)

    def outputs(self) -> tuple[Tensor, Tensor]:
        """Fresh tensors for the normed token and the new residual; becomes `made` with them.

        The residual is not updated in place: all programs of a launch read the old one.
        """
        assert isinstance(self.delta_TD, Tensor) and self.delta_TD.is_contiguous()
        self.made_TD = torch.empty_like(self.delta_TD)
        old, self.residual_TD = self.residual_TD, torch.empty_like(self.residual_TD)
        assert old.is_contiguous()
        return self.made_TD, self.residual_TD


def as_tensor(x: Tensor | AddNorm | WeightedSum) -> Tensor:
    """The tokens, made now if they were not."""
    return x if isinstance(x, Tensor) else x.tensor()


def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
    """Layer norm over the last axis of x [..., D]. Returns the same shape and dtype."""
    if use_triton(x_TD):
        return launch_norm(x_TD, weight_D, eps, bias_D=bias_D, centre=True)
    return layer_norm_ref(x_TD, weight_D, bias_D, eps)


def layer_norm_ref(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
    """The torch reference of `layer_norm`."""
    bias_D = None if bias_D is None else bias_D.float()
    return F.layer_norm(x_TD.float(), weight_D.shape, weight_D.float(), bias_D, eps).to(x_TD.dtype)


@jit
def summed_token(
    delta_ptr, residual_ptr, weight_ptr, eps, offset, scale, made_ptr, new_residual_ptr, writes, D: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One token's add_rms_norm inside another kernel: float32 [BLOCK], rounded as the tensor would be.

    Programs with `writes` also store the normed token and the new residual.
    """
    d = tl.arange(0, BLOCK)
    ok = d < D
    delta = tl.load(delta_ptr + d, mask=ok, other=0.0).to(tl.float32)
    x = (tl.load(residual_ptr + d, mask=ok, other=0.0).to(tl.float32) + delta * scale).to(residual_ptr.dtype.element_ty)
    tl.store(new_residual_ptr + d, x, mask=ok & writes)
    x = x.to(tl.float32)
    weight = tl.load(weight_ptr + d, mask=ok, other=0.0).to(tl.float32) + offset
    y = (x * tl.rsqrt(tl.sum(x * x, 0) / D + eps) * weight).to(made_ptr.dtype.element_ty)
    tl.store(made_ptr + d, y, mask=ok & writes)
    return y.to(tl.float32)


@jit
def _norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, x_stride, residual_stride, out_stride, eps, offset, scale,
    D: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, CENTRE: tl.constexpr, BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    ok = d < D
    weight = tl.load(weight_ptr + d, mask=ok, other=0.0).to(tl.float32) + offset
    await_previous(PDL)
    x = tl.load(x_ptr + t * x_stride + d, mask=ok, other=0.0).to(tl.float32)
    if ADD:
        at = residual_ptr + t * residual_stride + d
        x = (tl.load(at, mask=ok, other=0.0).to(tl.float32) + x * scale).to(residual_ptr.dtype.element_ty)
        tl.store(at, x, mask=ok)
        x = x.to(tl.float32)
    if CENTRE:
        x = tl.where(ok, x - tl.sum(x, 0) / D, 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / D + eps) * weight
    if BIAS:
        y += tl.load(bias_ptr + d, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * out_stride + d, y.to(out_ptr.dtype.element_ty), mask=ok)


def launch_norm(
    x_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    offset: float = 0.0,
    *,
    residual: Tensor | None = None,
    scale: float = 1.0,
    bias_D: Tensor | None = None,
    centre: bool = False,
    out_TD: Tensor | None = None,
) -> Tensor:
    """One program a row; out_TD may be x_TD itself. The last axis of every tensor must be contiguous."""
    width = weight_D.shape[-1]
    rows_TD = x_TD.reshape(-1, width)
    out = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device) if out_TD is None else out_TD
    if rows_TD.numel() == 0:
        return out
    out_rows_TD = out.view(-1, width)
    block = next_power_of_2(width)
    pdl = has_pdl(x_TD.device)
    _norm_kernel[(len(rows_TD),)](
        rows_TD, residual, weight_D, bias_D, out_rows_TD, rows_TD.stride(0),
        residual.stride(0) if residual is not None else 0, out_rows_TD.stride(0), eps, offset, scale, D=width,
        BLOCK=block, ADD=residual is not None, CENTRE=centre, BIAS=bias_D is not None, PDL=pdl, launch_pdl=pdl,
        num_warps=min(max(block // 512, 1), 8),
    )  # fmt: skip
    return out
