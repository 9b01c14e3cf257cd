"""Mixers whose memory of a sequence has a fixed size, as data, and what each keeps between steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tracklayer.layers.spec import NormSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class Kept:
    """One state of one request: its shape, and its dtype (`model`: that of the activations)."""

    shape: tuple[int, ...]
    dtype: Literal["model", "float32"] = "model"


@dataclass(frozen=True, kw_only=True)
class RecurrentSpec:
    """What all have in common: the states that a request keeps, zeros at first; positions, if it has any."""

    rope: RopeSpec | None = None

    @property
    def kept(self) -> tuple[Kept, ...]:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class GatedDeltaSpec(RecurrentSpec):
    """Gated DeltaNet (arXiv 2412.06464): num_heads value heads share num_key_heads key heads; conv over q, k and v.

    norm: of each head's output, before its gate.
    """

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    conv: int
    norm: NormSpec = NormSpec()

    @property
    def conv_width(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    @property
    def kept(self) -> tuple[Kept, ...]:
        return (
            Kept((self.conv - 1, self.conv_width)),
            Kept((self.num_heads, self.key_dim, self.value_dim), "float32"),
        )


@dataclass(frozen=True, kw_only=True)
class KDASpec(RecurrentSpec):
    """Kimi Delta Attention (arXiv 2510.26692): the delta rule with a decay of its own for each key channel.

    low_rank     decay and output gate come through a bottleneck of head_dim
    lower_bound  log decay = lower_bound * sigmoid(exp(A) * f) (Ling-3); None: -exp(A) * softplus(f)
    norm         of each head's output, before its sigmoid gate
    """

    num_heads: int
    head_dim: int
    conv: int
    low_rank: bool = False
    lower_bound: float | None = None
    norm: NormSpec = NormSpec()

    @property
    def kept(self) -> tuple[Kept, ...]:
        return (
            Kept((self.conv - 1, 3 * self.num_heads * self.head_dim)),
            Kept((self.num_heads, self.head_dim, self.head_dim), "float32"),
        )


@dataclass(frozen=True, kw_only=True)
class Mamba2Spec(RecurrentSpec):
    """Mamba 2 (arXiv 2405.21060): one decay a head and step; `groups` of heads share B and C of width `state`.

    dt_limits  the step size is kept within them, after softplus
    norm       of each group of the gated output
    """

    num_heads: int
    head_dim: int
    state: int
    groups: int
    conv: int
    conv_bias: bool = True
    bias: bool = False
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    norm: NormSpec = NormSpec()

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_width(self) -> int:
        return self.width + 2 * self.groups * self.state

    @property
    def kept(self) -> tuple[Kept, ...]:
        return (
            Kept((self.conv - 1, self.conv_width)),
            Kept((self.num_heads, self.state, self.head_dim), "float32"),
        )


@dataclass(frozen=True, kw_only=True)
class Mamba1Spec(RecurrentSpec):
    """Mamba (arXiv 2312.00752) with norms of dt, B and C (Jamba): every channel and state index decays on its own."""

    width: int
    state: int
    dt_rank: int
    conv: int
    conv_bias: bool = True
    bias: bool = False
    norm: NormSpec = NormSpec()

    @property
    def kept(self) -> tuple[Kept, ...]:
        return Kept((self.conv - 1, self.width)), Kept((self.width, self.state), "float32")


@dataclass(frozen=True, kw_only=True)
class ShortConvSpec(RecurrentSpec):
    """Gated short convolution (LFM2): C * conv(B * x), all of the model's width."""

    width: int
    conv: int
    bias: bool = False

    @property
    def kept(self) -> tuple[Kept, ...]:
        return (Kept((self.conv - 1, self.width)),)


@dataclass(frozen=True, kw_only=True)
class LightningSpec(RecurrentSpec):
    """Lightning attention (arXiv 2401.04658): linear attention whose heads decay by a constant each.

    log_decays  one a head, 0 or less
    groups      of heads whose outputs share a norm, before the sigmoid gate per channel
    """

    num_heads: int
    head_dim: int
    log_decays: tuple[float, ...]
    groups: int
    qk_norm: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    norm: NormSpec = NormSpec()

    @property
    def kept(self) -> tuple[Kept, ...]:
        return (Kept((self.num_heads, self.head_dim, self.head_dim), "float32"),)
