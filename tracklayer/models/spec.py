"""A model as data: what a family file makes from a Hugging Face config, and the one decoder reads.

A model is a list of layers, a layer a list of sublayers (mixer, MLP or MoE), each with its norms and factors.
A need that this can not say gains a field here, never an `if family ==` in the decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from tracklayer.kernels.topk import RouterSpec
from tracklayer.layers.recurrent_spec import RecurrentSpec
from tracklayer.layers.spec import AttentionSpec, CompressedSpec, MLASpec, MLPSpec, MoESpec, NormSpec, StreamsSpec

Body = TypeVar("Body")


@dataclass(frozen=True, kw_only=True)
class Sublayer:
    """x + residual_scale * post_norm(body(pre_norm(x))). `name` is its key among the layer's tensors.

    parallel: reads the normed input of the sublayer before it and adds to the same sum (Cohere); has no pre_norm.
    stream_scale: a learned factor on the residual stream after the sum (Gemma 4's layer_scalar).
    deferred: added to the stream at the end of the layer only (LongCat's MoE beside a second attention).
    """

    name: str
    body: AttentionSpec | MLASpec | CompressedSpec | RecurrentSpec | MLPSpec | MoESpec
    pre_norm: NormSpec | None = NormSpec()
    post_norm: NormSpec | None = None
    residual_scale: float = 1.0
    parallel: bool = False
    deferred: bool = False
    stream_scale: bool = False


@dataclass(frozen=True, kw_only=True)
class BlocksSpec:
    """Block diffusion: tokens come in blocks of `length`, each begun as `mask_id` and filled over several passes."""

    length: int
    mask_id: int


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A whole decoder. layers[i] is the i-th decoder layer's sublayers, in order.

    embed_scale_rounded: the factor on embeddings is first rounded to the model's dtype (Gemma).
    normed_head: each column of the head is divided by its length over the vocabulary at load (Bailing's norm_head).
    float32_head: logits are formed in float32 from the weights as they are.
    streams: several residual streams instead of one; sublayers then have pre_norm and body alone (DeepSeek-V4).
    blocks: the model denoises blocks instead of predicting the next token (SDAR, LLaDA2).
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[tuple[Sublayer, ...], ...]
    final_norm: NormSpec
    context_length: int
    tie_embeddings: bool = False
    embed_scale: float = 1.0
    embed_scale_rounded: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    head_bias: bool = False
    normed_head: bool = False
    float32_head: bool = False
    streams: StreamsSpec | None = None
    blocks: BlocksSpec | None = None

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers that hold a MoE sublayer: the layer axis of routes."""
        return tuple(i for i, subs in enumerate(self.layers) for s in subs if isinstance(s.body, MoESpec))

    def with_float32_routers(self) -> ModelSpec:
        """The same model whose gates and scores are formed in float32, whatever its reference does."""

        def change(sub: Sublayer) -> Sublayer:
            if not isinstance(sub.body, MoESpec):
                return sub
            router = replace(sub.body.router, gate_dtype="float32", score_dtype="float32")
            return replace(sub, body=replace(sub.body, router=router))

        return replace(self, layers=tuple(tuple(map(change, subs)) for subs in self.layers))

    def in_blocks(self, blocks: BlocksSpec) -> ModelSpec:
        """The same model as one that denoises blocks: attention sees the whole of a token's own block."""

        def change(sub: Sublayer) -> Sublayer:
            body = sub.body
            return replace(sub, body=replace(body, block=blocks.length)) if isinstance(body, AttentionSpec) else sub

        return replace(self, blocks=blocks, layers=tuple(tuple(map(change, subs)) for subs in self.layers))

    def bodies(self, kind: type[Body]) -> list[Body]:
        """The sublayers' bodies of one kind, in order."""
        return [s.body for subs in self.layers for s in subs if isinstance(s.body, kind)]

    @property
    def routers(self) -> tuple[RouterSpec, ...]:
        return tuple(s.body.router for subs in self.layers for s in subs if isinstance(s.body, MoESpec))


@dataclass(frozen=True, slots=True)
class Split:
    """A checkpoint tensor that holds several of our parts, interleaved: cut(tensor, the model) gives one per target."""

    targets: tuple[str, ...]
    cut: Callable[[Any, ModelSpec], tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family: which checkpoints it serves, how a config becomes a ModelSpec, and what its tensors are called.

    names     checkpoint name template -> our part name, with {i} for the layer, {j} for the expert
              (our names: embed, head, norm, layers.{i}.<sublayer>.<part>; see docs/add_a_family.md)
    transforms our part name template -> function of (checkpoint tensor, shape of the part) that gives what is copied
    splits    checkpoint name template -> the parts that the tensor is cut into
    ignored   regular expressions of checkpoint tensors that are skipped on purpose (other towers, MTP layers)
    claims    whether a config with our architecture name is ours (two families may share one name)
    note      what `tracklayer models` says of it: choices made where references disagree
    mtp_past_end  layers numbered past the last are MTP layers, and are skipped too
    layers_rule   which layers are MoE layers, in the config's own words
    oracle        what the family is compared with in tests
    """

    name: str
    architectures: tuple[str, ...]
    spec: Callable[[dict[str, Any]], ModelSpec]
    names: dict[str, str]
    transforms: dict[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    splits: dict[str, Split] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    mtp_past_end: bool = False
    claims: Callable[[dict[str, Any]], bool] = lambda config: True
    note: str = ""
    layers_rule: str = "all"
    oracle: str = "transformers"
