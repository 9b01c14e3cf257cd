"""Kimi Delta Attention (Kimi-Linear, Ling-3). T tokens, B sequences, M places, N heads of width D, X = N * D.

q, k and v pass a short convolution each and silu; q and k have length one; every key channel decays on its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tracklayer.layers.batch import Batch, Run
from tracklayer.layers.linear import Linear
from tracklayer.layers.parts import Part, parameter
from tracklayer.layers.recurrent import Recurrent, causal_conv, gated_norm, real_places, unit
from tracklayer.layers.recurrent_spec import KDASpec
from tracklayer.layers.scans import delta_rule


class KDA(Recurrent):
    """Parts: q, k, v, b, f and gate (or f_a, f_b, gate_a, gate_b); conv.q, .k, .v; A_log, dt_bias, out_norm, o."""

    def __init__(self, spec: KDASpec, hidden_size: int, place: int) -> None:
        super().__init__(place)
        self.spec = spec
        width = spec.num_heads * spec.head_dim
        inner = {"f_a": spec.head_dim, "gate_a": spec.head_dim} if spec.low_rank else {"f": width, "gate": width}
        self.first = Linear(hidden_size, {"q": width, "k": width, "v": width, "b": spec.num_heads, **inner})
        self.f_b = Linear(spec.head_dim, {"f_b": width}) if spec.low_rank else None
        self.gate_b = Linear(spec.head_dim, {"gate_b": width}) if spec.low_rank else None
        self.conv_XK = parameter(3 * width, spec.conv, dtype=torch.float32)
        self.a_log_N = parameter(spec.num_heads, dtype=torch.float32)
        self.dt_bias_X = parameter(width, dtype=torch.float32)
        self.norm_D = parameter(spec.head_dim)
        self.o = Linear(width, {"o": hidden_size})

    def project(self, x_TD: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        heads, (q, k, v, *rest) = self.spec.num_heads, list(self.first.outputs.values())
        qkv_TX, b_TN, f_TX, gate_TX = self.first(x_TD).split([q + k + v, *rest], -1)
        if self.f_b is not None and self.gate_b is not None:
            f_TX, gate_TX = self.f_b(f_TX.contiguous()), self.gate_b(gate_TX.contiguous())
        f_TND = (f_TX.float() + self.dt_bias_X).unflatten(-1, (heads, -1))
        rate_N1 = self.a_log_N.exp()[:, None]
        bound = self.spec.lower_bound
        log_decay = -rate_N1 * F.softplus(f_TND) if bound is None else bound * torch.sigmoid(rate_N1 * f_TND)
        return qkv_TX, log_decay, torch.sigmoid(b_TN).float(), gate_TX

    def walk(
        self, inputs: tuple[Tensor, ...], states: tuple[Tensor, ...], run: Run
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        qkv_BMX, log_decay_BMND, beta_BMN, _ = inputs
        y_BMX, window = causal_conv(qkv_BMX, states[0], self.conv_XK, None, run)
        parts = F.silu(y_BMX).to(qkv_BMX.dtype).chunk(3, -1)
        q, k, v = (x.unflatten(-1, (self.spec.num_heads, -1)) for x in parts)
        real = real_places(run)[..., None]
        o_BMND, state = delta_rule(
            unit(q) * self.spec.head_dim**-0.5,
            unit(k),
            v.float(),
            log_decay_BMND * real[..., None],
            beta_BMN * real,
            states[1],
        )
        return o_BMND.to(qkv_BMX.dtype), (window, state)

    def finish(self, y_TY: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        gate_TND = inputs[3].unflatten(-1, (self.spec.num_heads, -1))
        y_TND = gated_norm(y_TY, gate_TND, self.norm_D, self.spec.norm.eps, "sigmoid", torch.float32)
        out_TD: Tensor = self.o(y_TND.flatten(1))
        return out_TD

    def parts(self) -> Iterator[Part]:
        for linear in (self.first, self.f_b, self.gate_b, self.o):
            if linear is not None:
                yield from linear.parts()
        for name, view in zip("qkv", self.conv_XK.data.chunk(3), strict=True):
            yield f"conv.{name}.weight", view, self.conv_XK
        for name, owner in (("out_norm.weight", self.norm_D), ("A_log", self.a_log_N), ("dt_bias", self.dt_bias_X)):
            yield name, owner.data, owner
