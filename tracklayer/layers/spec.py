"""What one sublayer is, as data: norms, rotary embedding, attention, MLP, MoE. Family files make these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tracklayer.kernels.experts import Activation
from tracklayer.kernels.topk import RouterSpec


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


class KVLayout(Protocol):
    """What one attention sublayer keeps of a token: keys [heads, head_dim], and values [heads, value_dim] beside them.

    shares_value: the values are the keys' first value_dim columns, and take no memory of their own.
    sight: (window, chunk), how far back it looks; None: to the first token.
    """

    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def shares_value(self) -> bool: ...
    @property
    def sight(self) -> tuple[int | None, int | None] | None: ...


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention of one layer.

    qk_norm         per head, over the whole projection, or none; without learned weights if not qk_norm_weight
    rope            None: no positions (NoPE)
    scale           factor on q . k; None: head_dim ** -0.5
    window, chunk   position p sees the last `window` positions / only those of its own chunk
    block           and the later ones of its own block of that many positions (block diffusion)
    sinks           a learned logit per head in the softmax's denominator
    softcap         scores become softcap * tanh(scores / softcap)
    q_temperature   (a, n): q of position p times 1 + a * log(1 + floor((p + 1) / n)) (Llama 4)
    v_norm          weightless RMS norm of each value head;  v_from_key: values are the keys before their norm (Gemma 4)
    v_scale         factor on the values (MiMo)
    out_gate        output times sigmoid of a projection of the input, one per channel or one per head
    clip_qkv        bound of q, k and v after the projection
    """

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
    chunk: int | None = None
    block: int | None = None
    qk_norm_weight: bool = True
    q_temperature: tuple[float, int] | None = None
    v_norm: bool = False
    v_from_key: bool = False
    v_scale: float = 1.0
    out_gate: Literal["channel", "head"] | None = None

    @property
    def value_dim(self) -> int:
        return self.v_head_dim or self.head_dim

    @property
    def shares_value(self) -> bool:
        return False

    @property
    def sight(self) -> tuple[int | None, int | None] | None:
        return (self.window, self.chunk) if self.window or self.chunk else None


@dataclass(frozen=True, kw_only=True)
class IndexerSpec:
    """DeepSeek's indexer: heads and width of its queries and keys; how many positions (V4: entries) attention sees."""

    num_heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True, kw_only=True)
class MLASpec:
    """Multi-head latent attention (arXiv 2405.04434): one latent a token, from which all heads' keys and values come.

    A head's query and key are nope_dim dims without position and rope_dim with (the key's are shared by all heads).
    q_lora_rank     width of the queries' own latent; None: queries straight from the input
    rope            None: the rope_dim dims are there but never turned (Kimi-Linear)
    norm            of both latents
    q_scale, kv_scale  factors on the queries and on the normed latent (LongCat)
    out_gate        as in AttentionSpec
    indexer         attention sees only the positions that it chooses; its keys lie beside the latent in the cache
    """

    num_heads: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    rope: RopeSpec | None = None
    norm: NormSpec = NormSpec()
    scale: float
    bias: bool = False
    out_bias: bool = False
    q_scale: float = 1.0
    kv_scale: float = 1.0
    out_gate: Literal["channel", "head"] | None = None
    indexer: IndexerSpec | None = None

    @property
    def num_kv_heads(self) -> int:
        return 1

    @property
    def key_dim(self) -> int:
        return self.kv_lora_rank + self.rope_dim

    @property
    def head_dim(self) -> int:
        return self.key_dim + (self.indexer.head_dim if self.indexer else 0)

    @property
    def value_dim(self) -> int:
        return self.kv_lora_rank

    @property
    def shares_value(self) -> bool:
        return True

    @property
    def sight(self) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class CompressorSpec:
    """What becomes of tokens that left the window (DeepSeek-V4): every `rate` of them make one entry.

    overlap   an entry is made of its own window and, from projections of their own, of the window before
    indexer   attention sees only the entries that it chooses (by small entries of its own); None: all of them
    """

    rate: int
    overlap: bool = False
    indexer: IndexerSpec | None = None

    def __post_init__(self) -> None:
        if self.rate < 2:
            raise ValueError(f"a compressor makes one entry of 2 tokens or more, got rate {self.rate}")

    @property
    def series(self) -> int:
        return 2 if self.overlap else 1


@dataclass(frozen=True, kw_only=True)
class CompressedSpec:
    """DeepSeek-V4's attention: one vector of `width` is every head's key and value, compressed beyond a window.

    q_lora_rank        width of the queries' latent
    rope               of the last dims of queries and keys, taken back from the output
    norm               of the latent, of the keys, and (without weights) of each head's query
    window             position p sees the last `window` positions, and what the compressor made of all complete windows
    groups, group_rank the heads' outputs go in `groups`, each through group_rank numbers, to the model's width
    """

    num_heads: int
    width: int
    q_lora_rank: int
    rope: RopeSpec
    norm: NormSpec = NormSpec()
    window: int
    groups: int
    group_rank: int
    compressor: CompressorSpec | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.groups:
            raise ValueError(f"{self.num_heads} heads can not be put into {self.groups} equal groups")

    @property
    def num_kv_heads(self) -> int:
        return 1

    @property
    def head_dim(self) -> int:
        """Numbers that the cache keeps of a token: its vector, and for each compressor what entries are made of."""
        made = self.compressor
        if made is None:
            return self.width
        entries = self.width + (made.indexer.head_dim if made.indexer else 0)
        return self.width + entries * 2 * made.series

    @property
    def value_dim(self) -> int:
        return self.width

    @property
    def shares_value(self) -> bool:
        return True

    @property
    def sight(self) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class StreamsSpec:
    """Hyper-connections (arXiv 2512.24880): `count` residual streams, mixed by learned, doubly stochastic matrices.

    iterations    how often rows and columns are normalised, with eps
    norm_eps      of the norm of all streams, from which the weights come
    """

    count: int
    iterations: int
    eps: float
    norm_eps: float


@dataclass(frozen=True, kw_only=True)
class MLPSpec:
    """A dense MLP: down(act(gate) * up), or down(act(up)) when not gated. Clamps as in MoESpec."""

    width: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    clamp_before: float | None = None
    clamp_after: float | None = None


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """Routed experts and, beside them, an optional shared MLP (`shared_gate`: times sigmoid of one learned logit).

    clamp_before / clamp_after: limit of gate and up before the activation / of its result and up (see ExpertSpec).
    output_scale: factor on the sum of routed and shared (Cohere's average). inner_norm: router, experts and shared MLP
    each norm the block's raw input by weights of their own, experts and shared MLP their outputs too (Gemma 4).
    latent: routed experts work on a projection of the input to this width, their sum is projected back (Nemotron-H).
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
    output_scale: float = 1.0
    inner_norm: NormSpec | None = None
    latent: int | None = None
