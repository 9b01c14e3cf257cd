"""Dense products y = x @ weight.T + bias, with a matrix-vector form for small batches.

T tokens, D input width, F output width. Sums are float32, results have x's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from tracklayer.kernels.norm import add_rms_norm_ref


@dataclass(frozen=True, slots=True)
class FusedNorm:
    """What `linear_small` does before the product: residual_TD += x in place, x = rms_norm(residual)."""

    residual_TD: Tensor
    weight_D: Tensor
    eps: float
    offset: float = 0.0


def linear(x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """x_TD [T, D] @ weight_FD.T + bias -> [T, F]; matrix-vector kernel for few tokens, the BLAS library for many."""
    return F.linear(x_TD, weight_FD, bias_F)


def linear_small(
    x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None, *, norm: FusedNorm | None = None
) -> Tensor:
    """`linear` for T <= 8, with the residual sum and RMS norm before it fused in. Returns [T, F] in x's dtype."""
    return linear_small_ref(x_TD, weight_FD, bias_F, norm=norm)


def linear_small_ref(
    x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None, *, norm: FusedNorm | None = None
) -> Tensor:
    """The torch reference of `linear_small`."""
    if norm is not None:
        x_TD = add_rms_norm_ref(x_TD, norm.residual_TD, norm.weight_D, norm.eps, norm.offset)
    return F.linear(x_TD, weight_FD, bias_F)
