"""Lightning attention (Ling-2.5). T tokens, B sequences, M places, N heads of width D, X = N * D."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tracklayer.kernels.norm import rms_norm
from tracklayer.kernels.rope import rotate
from tracklayer.layers.batch import Batch, Run
from tracklayer.layers.linear import Linear
from tracklayer.layers.parts import Part, parameter
from tracklayer.layers.recurrent import Recurrent, real_places
from tracklayer.layers.recurrent_spec import LightningSpec
from tracklayer.layers.scans import linear_attention


class Lightning(Recurrent):
    """Parts: q, k, v (or qkv), q_norm, k_norm, gate, out_norm, o."""

    def __init__(self, spec: LightningSpec, hidden_size: int, cos_sin_PD: Tensor | None, place: int) -> None:
        super().__init__(place)
        self.spec, self.cos_sin_PD = spec, cos_sin_PD
        width = spec.num_heads * spec.head_dim
        self.qkv = Linear(hidden_size, dict.fromkeys("qkv", width), bias=spec.qkv_bias, fused="qkv")
        self.gate = Linear(hidden_size, {"gate": width})
        self.q_norm_D = parameter(spec.head_dim) if spec.qk_norm else None
        self.k_norm_D = parameter(spec.head_dim) if spec.qk_norm else None
        self.norm_X = parameter(width)
        self.o = Linear(width, {"o": hidden_size}, bias=spec.out_bias)
        self.log_decay_N = torch.tensor(spec.log_decays, dtype=torch.float32)

    def project(self, x_TD: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        q, k, v = (x.unflatten(-1, (self.spec.num_heads, -1)) for x in self.qkv(x_TD).chunk(3, -1))
        if self.q_norm_D is not None and self.k_norm_D is not None:
            eps = self.spec.norm.eps
            q, k = rms_norm(q.contiguous(), self.q_norm_D, eps), rms_norm(k.contiguous(), self.k_norm_D, eps)
        if self.cos_sin_PD is not None and self.spec.rope is not None:
            turn = self.cos_sin_PD[batch.positions_T.long()]
            q, k = (rotate(x, turn, self.spec.rope.interleaved) for x in (q, k))
        return q, k, v, self.gate(x_TD)

    def walk(
        self, inputs: tuple[Tensor, ...], states: tuple[Tensor, ...], run: Run
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        q, k, v = (x.float() for x in inputs[:3])
        real = real_places(run)[..., None]
        decay_BMN = self.log_decay_N * real
        y_BMND, state = linear_attention(q * self.spec.head_dim**-0.5, k * real[..., None], v, decay_BMN, states[0])
        return y_BMND.flatten(2).to(inputs[0].dtype), (state,)

    def finish(self, y_TY: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        groups = y_TY.float().unflatten(-1, (self.spec.groups, -1))
        normed = F.rms_norm(groups, groups.shape[-1:], eps=self.spec.norm.eps).flatten(1)
        out_TD: Tensor = self.o(self.norm_X * normed.to(y_TY.dtype) * torch.sigmoid(inputs[3]))
        return out_TD

    def parts(self) -> Iterator[Part]:
        for linear in (self.qkv, self.gate, self.o):
            yield from linear.parts()
        named = {"q_norm.weight": self.q_norm_D, "k_norm.weight": self.k_norm_D, "out_norm.weight": self.norm_X}
        yield from ((name, owner.data, owner) for name, owner in named.items() if owner is not None)
