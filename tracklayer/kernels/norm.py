"""Root-mean-square and layer normalisation, alone and fused with the residual sum.

T tokens, D width. All arithmetic is float32; results have x's dtype.
    rms_norm      x / sqrt(mean(x^2) + eps) * (weight + offset)
    add_rms_norm  residual += scale * delta (rounded to the residual's dtype), then rms_norm of the residual
    layer_norm    (x - mean) / sqrt(var + eps) * weight + bias
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Normalise the last axis of x [..., D] by its root mean square. Returns the same shape and dtype."""
    return rms_norm_ref(x_TD, weight_D, eps, offset)


def rms_norm_ref(x_TD: Tensor, weight_D: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """The torch reference of `rms_norm`."""
    weight_D = weight_D.float() + offset if offset else weight_D.float()
    return F.rms_norm(x_TD.float(), weight_D.shape, weight_D, eps).to(x_TD.dtype)


def add_rms_norm(
    delta_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, offset: float = 0.0, scale: float = 1.0
) -> Tensor:
    """residual_TD += scale * delta_TD in place; returns the RMS norm of the new residual, [T, D] in delta's dtype."""
    return add_rms_norm_ref(delta_TD, residual_TD, weight_D, eps, offset, scale)


def add_rms_norm_ref(
    delta_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, offset: float = 0.0, scale: float = 1.0
) -> Tensor:
    """The torch reference of `add_rms_norm`."""
    residual_TD.copy_(torch.add(residual_TD.float(), delta_TD.float(), alpha=scale))
    return rms_norm_ref(residual_TD, weight_D, eps, offset).to(delta_TD.dtype)


def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
    """Layer norm over the last axis of x [..., D]. Returns the same shape and dtype."""
    return layer_norm_ref(x_TD, weight_D, bias_D, eps)


def layer_norm_ref(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
    """The torch reference of `layer_norm`."""
    bias_D = None if bias_D is None else bias_D.float()
    return F.layer_norm(x_TD.float(), weight_D.shape, weight_D.float(), bias_D, eps).to(x_TD.dtype)
