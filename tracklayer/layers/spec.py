"""What one sublayer is, as data: norms, rotary embedding, attention, MLP, MoE. Family files make these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tracklayer.kernels.topk import RouterSpec

Activation = Literal["silu", "gelu_tanh", "gelu", "relu2", "swiglu_oai"]


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """rms: x / rms(x) * (w + offset); layer: mean-centred, with bias if `bias`. eps inside the root."""

    eps: float = 1e-6
    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embedding of the first `dim` dims of a head. `scaling` is the config's own dict (rope_type and keys)."""

    dim: int
    theta: float = 10000.0
    interleaved: bool = False
    scaling: dict[str, Any] | None = None
    max_position: int = 4096


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention of one layer. qk_norm: per head, over the whole projection, or none."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    rope: RopeSpec | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["head", "whole"] | None = None
    qk_norm_after_rope: bool = False
    norm: NormSpec = NormSpec()
    scale: float | None = None
    window: int | None = None
    sinks: bool = False
    softcap: float | None = None
    clip_qkv: float | None = None

    @property
    def value_dim(self) -> int:
        return self.v_head_dim or self.head_dim


@dataclass(frozen=True, kw_only=True)
class MLPSpec:
    """A dense MLP: down(act(gate) * up), or down(act(up)) when not gated."""

    width: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """Routed experts and, beside them, an optional shared MLP (`shared_gate`: times sigmoid of one learned logit).

    clamp_before / clamp_after: limit of gate and up before the activation / of its result and up (see ExpertSpec).
    """

    router: RouterSpec
    width: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    clamp_before: float | None = None
    clamp_after: float | None = None
    shared: MLPSpec | None = None
    shared_gate: bool = False
