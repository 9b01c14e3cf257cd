"""What every path of paged attention computes, whichever tokens it is given."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """Which keys a query sees, and what becomes of their scores. A layer makes one, once.

    For query head n of the token at position p, over the cached positions j:
        s_j = scale * q . k_j;  s_j = softcap * tanh(s_j / softcap)
        j is seen when j <= p, and p - window < j, and j >= p - p % chunk
        with `block`: when j <= p - p % block + block - 1 instead of j <= p (block diffusion: a block sees itself whole)
        out = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sinks_N[n])), in float32
    None leaves that part out. sinks_N [N]: a learned logit per query head, any float dtype.
    """

    scale: float
    window: int | None = None
    chunk: int | None = None
    block: int | None = None
    softcap: float | None = None
    sinks_N: Tensor | None = None

    @property
    def causal(self) -> bool:
        """Whether a query sees all positions up to its own and no others."""
        return self.window is None and self.chunk is None and self.block is None

    @property
    def softmax(self) -> bool:
        """Whether the scores' weights are their softmax: neither bounded nor beside a sink."""
        return self.softcap is None and self.sinks_N is None
