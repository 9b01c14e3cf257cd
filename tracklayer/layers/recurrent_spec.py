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
    """What all have in common: the states that a request keeps. They start as zeros."""

    @property
    def kept(self) -> tuple[Kept, ...]:
        raise NotImplementedError

    @property
    def rope(self) -> RopeSpec | None:
        return None


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
