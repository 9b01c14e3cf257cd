"""Triton: what the expert kernels share: the activation and the tile of weights.

N weight rows of a tile, B columns of the reduction.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tracklayer.kernels.experts import ExpertSpec


@triton.jit
def activate_tile(
    gate, up, GATED: tl.constexpr, ACT: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr
):  # fmt: skip
    """float32 gate and up tiles -> the hidden tile. Not gated: `up` is ignored. NaN stays NaN."""
    NAN: tl.constexpr = tl.PropagateNan.ALL
    if BEFORE is not None:
        gate = tl.minimum(gate, BEFORE, propagate_nan=NAN)
        up = tl.maximum(tl.minimum(up, BEFORE, propagate_nan=NAN), -BEFORE, propagate_nan=NAN)
    if ACT == "silu":
        out = gate / (1.0 + tl.exp(-gate))
    elif ACT == "gelu":
        out = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        out = gate - gate / (1.0 + tl.exp(2.0 * inner))  # 0.5 * (1 + tanh(z)) is 1 - 1 / (1 + exp(2 z))
    elif ACT == "relu2":
        positive = tl.maximum(gate, 0.0, propagate_nan=NAN)
        out = positive * positive
    else:
        out = gate / (1.0 + tl.exp(-1.702 * gate))
        up += 1.0
    if AFTER is not None:
        out = tl.minimum(out, AFTER, propagate_nan=NAN)
        up = tl.maximum(tl.minimum(up, AFTER, propagate_nan=NAN), -AFTER, propagate_nan=NAN)
    return out * up if GATED else out


def activation_constants(spec: ExpertSpec) -> dict[str, Any]:
    """The compile-time arguments of `activate_tile`."""
    return {"GATED": spec.gated, "ACT": spec.activation, "BEFORE": spec.clamp_before, "AFTER": spec.clamp_after}
