"""The routed experts of one layer: their weights, stacked, and the call of the expert kernel.

E experts, D model width, F expert width. Accepts a Routing and nothing else: it can not choose experts itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from tracklayer.kernels.combine import WeightedSum
from tracklayer.kernels.experts import ExpertSpec, fused_experts
from tracklayer.kernels.topk import Routing
from tracklayer.layers.parts import Part, parameter
from tracklayer.layers.spec import MoESpec


def kernel_spec(spec: MoESpec) -> ExpertSpec:
    """What the expert kernels are told of a MoE block."""
    router = spec.router
    return ExpertSpec(
        activation=spec.activation,
        gated=spec.gated,
        clamp_before=spec.clamp_before,
        clamp_after=spec.clamp_after,
        weight_on_input=router.weight_on_input,
        num_zero_experts=router.num_zero_experts,
        scale=router.scale if router.scale_output else 1.0,
    )


class Experts(nn.Module):
    """w13_EFD [E, 2F, D] (gate rows, then up rows; [E, F, D] when not gated) and w2_EDF [E, D, F]."""

    def __init__(self, spec: MoESpec, hidden_size: int) -> None:
        super().__init__()
        router = spec.router
        self.kernel = kernel_spec(spec)
        self.inner = ("gate", "up") if spec.gated else ("up",)
        self.width = spec.width
        num, inner = router.num_experts, spec.width * len(self.inner)
        self.w13_EFD = parameter(num, inner, hidden_size)
        self.w2_EDF = parameter(num, hidden_size, spec.width)
        self.b13_EF = parameter(num, inner) if spec.bias else None
        self.b2_ED = parameter(num, hidden_size) if spec.bias else None

    def forward(self, x_TD: Tensor, routing: Routing, add_TD: Tensor | None = None) -> Tensor | WeightedSum:
        return fused_experts(
            x_TD,
            routing,
            self.w13_EFD,
            self.w2_EDF,
            self.kernel,
            bias13=self.b13_EF,
            bias2=self.b2_ED,
            add_TD=add_TD,
        )

    def parts(self) -> Iterator[Part]:
        """Expert by expert (`3.gate.weight`), per projection (`gate.weight` [E, F, D]) and fused (`gate_up.weight`)."""
        for kind, first, second in (("weight", self.w13_EFD, self.w2_EDF), ("bias", self.b13_EF, self.b2_ED)):
            if first is None or second is None:
                continue
            if len(self.inner) > 1:
                yield f"gate_up.{kind}", first.data, first
            yield f"down.{kind}", second.data, second
            for at, name in enumerate(self.inner):
                stacked = first.data.narrow(1, at * self.width, self.width)
                yield f"{name}.{kind}", stacked, first
                for j, view in enumerate(stacked):
                    yield f"{j}.{name}.{kind}", view, first
            for j, view in enumerate(second.data):
                yield f"{j}.down.{kind}", view, second
