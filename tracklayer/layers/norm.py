"""Normalisation layers over the residual stream."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tracklayer.kernels.combine import WeightedSum
from tracklayer.kernels.norm import AddNorm, as_tensor, layer_norm, rms_norm
from tracklayer.layers.parts import Part, parameter
from tracklayer.layers.spec import NormSpec


class Norm(nn.Module):
    """RMS or layer norm of width D by a NormSpec; `add` also folds a sublayer's output into the residual stream."""

    def __init__(self, spec: NormSpec, width: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.weight = parameter(width, dtype=dtype)
        self.bias = parameter(width) if spec.bias else None

    def forward(self, x_TD: Tensor) -> Tensor:
        if self.spec.kind == "layer":
            return layer_norm(x_TD, self.weight, self.bias, self.spec.eps)
        return rms_norm(x_TD, self.weight, self.spec.eps, self.spec.offset)

    def add(self, delta_TD: Tensor | WeightedSum, residual_TD: Tensor, scale: float) -> Tensor:
        """residual_TD += scale * delta_TD in place; returns the normed residual."""
        return as_tensor(self.later(delta_TD, residual_TD, scale))

    def later(self, delta_TD: Tensor | WeightedSum, residual_TD: Tensor, scale: float) -> Tensor | AddNorm:
        """As `add`, but whoever reads an RMS norm first may make it in front of its own work."""
        if self.spec.kind == "layer":
            residual_TD.add_(as_tensor(delta_TD), alpha=scale)
            return self(residual_TD)
        return AddNorm(delta_TD, residual_TD, self.weight, self.spec.eps, self.spec.offset, scale)

    def parts(self) -> Iterator[Part]:
        yield "weight", self.weight.data, self.weight
        if self.bias is not None:
            yield "bias", self.bias.data, self.bias
