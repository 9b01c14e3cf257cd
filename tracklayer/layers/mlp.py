"""The dense MLP. T tokens, D model width, F inner width."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from tracklayer.kernels.activation import act_mul
from tracklayer.kernels.experts import ExpertSpec, activate
from tracklayer.kernels.norm import AddNorm
from tracklayer.layers.batch import Batch
from tracklayer.layers.linear import Linear
from tracklayer.layers.parts import Part
from tracklayer.layers.spec import MLPSpec


class MLP(nn.Module):
    """down(act(gate) * up), or down(act(up)) when not gated."""

    def __init__(self, spec: MLPSpec, hidden_size: int) -> None:
        super().__init__()
        self.spec = spec
        inner = {"gate": spec.width, "up": spec.width} if spec.gated else {"up": spec.width}
        self.gate_up = Linear(hidden_size, inner, bias=spec.bias, fused="gate_up")
        self.clamped = ExpertSpec(
            activation=spec.activation,
            gated=spec.gated,
            clamp_before=spec.clamp_before,
            clamp_after=spec.clamp_after,
        )
        self.down = Linear(spec.width, {"down": hidden_size}, bias=spec.bias)

    def forward(self, x: Tensor | AddNorm, batch: Batch) -> Tensor:
        inner_TF = self.gate_up(x)
        if self.spec.clamp_before is not None or self.spec.clamp_after is not None:
            return self.down(activate(inner_TF, self.clamped))
        return self.down(act_mul(inner_TF, self.spec.activation, gated=self.spec.gated))

    def parts(self) -> Iterator[Part]:
        yield from self.gate_up.parts()
        yield from self.down.parts()
