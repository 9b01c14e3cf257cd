"""What mixers with recurrent state share: the walk over a step's sequences, the causal convolution, the gated norm.

T tokens, B sequences of a run, M places, X channels. States live in pools by the request's row, beside the KV cache.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tracklayer.layers.batch import Batch, Run


class Recurrent(nn.Module):
    """A mixer with state: `project` all tokens at once, `walk` each run from its states, `finish` all at once.

    `place` is the index of its pools in Batch.states.
    """

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place

    def project(self, x_TD: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        """What `walk` reads of each token: tensors [T, ...]."""
        raise NotImplementedError

    def walk(
        self, inputs: tuple[Tensor, ...], states: tuple[Tensor, ...], run: Run
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Inputs [B, M, ...] and states [B, ...] of a run -> (outputs [B, M, ...], the states after it)."""
        raise NotImplementedError

    def finish(self, y_TY: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        """What `walk` gave, and what `project` gave, of all tokens -> [T, D]."""
        raise NotImplementedError

    def forward(self, x_TD: Tensor, batch: Batch) -> Tensor:
        pools = batch.states[self.place]
        inputs = self.project(x_TD, batch)
        pieces = []
        for run in batch.runs:
            before = tuple(_kept(pool, run) for pool in pools)
            y_BMY, after = self.walk(tuple(x[run.tokens_BM] for x in inputs), before, run)
            for pool, state in zip(pools, after, strict=True):
                pool[run.rows_B] = state.to(pool.dtype)
            pieces.append(y_BMY.flatten(0, 1))
        y_TY = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        return self.finish(y_TY if batch.order_T is None else y_TY[batch.order_T], inputs)


def _kept(pool: Tensor, run: Run) -> Tensor:
    """The states of a run's rows; zeros for the sequences that begin."""
    state = pool[run.rows_B]
    return torch.where(run.fresh_B.view(-1, *[1] * (state.dim() - 1)), torch.zeros_like(state), state)


def real_places(run: Run) -> Tensor:
    """bool [B, M]: places that are tokens, not padding."""
    return torch.arange(run.tokens_BM.shape[1], device=run.counts_B.device) < run.counts_B[:, None]


def causal_conv(
    x_BMX: Tensor, window_BWX: Tensor, weight_XK: Tensor, bias_X: Tensor | None, run: Run
) -> tuple[Tensor, Tensor]:
    """Depthwise convolution over each channel's last K tokens, this one included; W = K - 1.

    window: the inputs of the W tokens before. Returns (result float32 [B, M, X], the window after the last real token).
    """
    kernel, places = weight_XK.shape[1], x_BMX.shape[1]
    whole = torch.cat([window_BWX.to(x_BMX.dtype), x_BMX], 1)
    y_BMX = whole[:, :places].float() * weight_XK[:, 0].float()
    for k in range(1, kernel):
        y_BMX = y_BMX + whole[:, k : k + places].float() * weight_XK[:, k].float()
    if bias_X is not None:
        y_BMX = y_BMX + bias_X.float()
    last_BW = run.counts_B[:, None] + torch.arange(kernel - 1, device=whole.device)
    return y_BMX, whole.gather(1, last_BW[..., None].expand(-1, -1, whole.shape[2]))


def unit(x: Tensor) -> Tensor:
    """x divided by its length over the last axis, 1e-6 inside the root; float32."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def gated_norm(
    y: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str = "silu", dtype: torch.dtype | None = None
) -> Tensor:
    """rms_norm(y) * weight, then * activation(gate), over the last axis; the normed values rounded to `dtype`."""
    normed = F.rms_norm(y.float(), y.shape[-1:], eps=eps)
    normed = normed.to(dtype or y.dtype) * weight
    act = F.silu if activation == "silu" else torch.sigmoid
    return (normed * act(gate.float())).to(gate.dtype)
