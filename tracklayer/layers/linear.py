"""Linear projections. T tokens, D input width, F output width."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from tracklayer.kernels.linear import linear
from tracklayer.kernels.norm import AddNorm
from tracklayer.layers.parts import Part, parameter


class Linear(nn.Module):
    """y = x W^T (+ b), whose output rows may be several named projections in one matrix.

    `outputs` maps a name to its rows, e.g. {"q": 4096, "k": 512, "v": 512}; the whole is the part `fused`.
    """

    def __init__(self, in_features: int, outputs: dict[str, int], *, bias: bool = False, fused: str = "") -> None:
        super().__init__()
        self.outputs = outputs
        self.fused = fused
        total = sum(outputs.values())
        self.weight = parameter(total, in_features)
        self.bias = parameter(total) if bias else None

    def forward(self, x: Tensor | AddNorm) -> Tensor:
        return linear(x, self.weight, self.bias)

    def parts(self) -> Iterator[Part]:
        for kind, owner in (("weight", self.weight), ("bias", self.bias)):
            if owner is None:
                continue
            for name, view in zip(self.outputs, owner.split(list(self.outputs.values())), strict=True):
                yield f"{name}.{kind}", view, owner
            if self.fused and len(self.outputs) > 1:
                yield f"{self.fused}.{kind}", owner.data, owner
