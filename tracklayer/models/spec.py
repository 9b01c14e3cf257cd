"""A model as data: what a family file makes from a Hugging Face config, and the one decoder reads.

A model is a list of layers, a layer a list of sublayers (mixer, MLP or MoE), each with its norms and factors.
A need that this can not say gains a field here, never an `if family ==` in the decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
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
    """Routed experts and, beside them, an optional shared MLP (`shared_gate`: times sigmoid of one learned logit)."""

    router: RouterSpec
    width: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    shared: MLPSpec | None = None
    shared_gate: bool = False


@dataclass(frozen=True, kw_only=True)
class Sublayer:
    """x + residual_scale * post_norm(body(pre_norm(x))). `name` is its key among the layer's tensors."""

    name: str
    body: AttentionSpec | MLPSpec | MoESpec
    pre_norm: NormSpec | None = NormSpec()
    post_norm: NormSpec | None = None
    residual_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A whole decoder. layers[i] is the i-th decoder layer's sublayers, in order."""

    vocab_size: int
    hidden_size: int
    layers: tuple[tuple[Sublayer, ...], ...]
    final_norm: NormSpec
    context_length: int
    tie_embeddings: bool = False
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    head_bias: bool = False

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers that hold a MoE sublayer: the layer axis of routes."""
        return tuple(i for i, subs in enumerate(self.layers) for s in subs if isinstance(s.body, MoESpec))

    @property
    def routers(self) -> tuple[RouterSpec, ...]:
        return tuple(s.body.router for subs in self.layers for s in subs if isinstance(s.body, MoESpec))


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family: which checkpoints it serves, how a config becomes a ModelSpec, and what its tensors are called.

    names     checkpoint name template -> our part name, with {i} for the layer, {j} for the expert
              (our names: embed, head, norm, layers.{i}.<sublayer>.<part>; see docs/add_a_family.md)
    transforms our part name template -> function applied to the checkpoint tensor before it is copied
    ignored   regular expressions of checkpoint tensors that are skipped on purpose (other towers, MTP layers)
    """

    name: str
    architectures: tuple[str, ...]
    spec: Callable[[dict[str, Any]], ModelSpec]
    names: dict[str, str]
    transforms: dict[str, Callable[[Any], Any]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    note: str = ""
