"""Mamba 2 (Nemotron-H, Granite 4). T tokens, B sequences, M places, N heads of width P, G groups, S state, X = N * P.

The scan is linear attention: B is the key, C the query, dt * x the value, exp(A * dt) the decay.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tracklayer.layers.batch import Batch, Run
from tracklayer.layers.linear import Linear
from tracklayer.layers.parts import Part, parameter
from tracklayer.layers.recurrent import Recurrent, causal_conv, real_places
from tracklayer.layers.recurrent_spec import Mamba2Spec
from tracklayer.layers.scans import linear_attention


class Mamba2(Recurrent):
    """Parts: in (z, then x, B and C, then dt), conv, A_log, D, dt_bias, out_norm, o."""

    def __init__(self, spec: Mamba2Spec, hidden_size: int, place: int) -> None:
        super().__init__(place)
        self.spec = spec
        inner = {"z": spec.width, "xbc": spec.conv_width, "dt": spec.num_heads}
        self.first = Linear(hidden_size, inner, bias=spec.bias, fused="in")
        self.conv_XK = parameter(spec.conv_width, spec.conv, dtype=torch.float32)
        self.conv_bias_X = parameter(spec.conv_width, dtype=torch.float32) if spec.conv_bias else None
        self.a_log_N = parameter(spec.num_heads, dtype=torch.float32)
        self.d_N = parameter(spec.num_heads, dtype=torch.float32)
        self.dt_bias_N = parameter(spec.num_heads, dtype=torch.float32)
        self.norm_X = parameter(spec.width)
        self.o = Linear(spec.width, {"o": hidden_size}, bias=spec.bias)

    def project(self, x_TD: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        z_TX, xbc_TX, dt_TN = self.first(x_TD).split(list(self.first.outputs.values()), -1)
        return xbc_TX, F.softplus(dt_TN.float() + self.dt_bias_N).clamp(*self.spec.dt_limits), z_TX

    def walk(
        self, inputs: tuple[Tensor, ...], states: tuple[Tensor, ...], run: Run
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        spec, (xbc_BMX, dt_BMN, _) = self.spec, inputs
        y_BMX, window = causal_conv(xbc_BMX, states[0], self.conv_XK, self.conv_bias_X, run)
        of_groups = spec.groups * spec.state
        x, b, c = F.silu(y_BMX).to(xbc_BMX.dtype).float().split([spec.width, of_groups, of_groups], -1)
        x_BMNP = x.unflatten(-1, (spec.num_heads, -1))
        share = spec.num_heads // spec.groups
        b_BMNS, c_BMNS = (v.unflatten(-1, (spec.groups, -1)).repeat_interleave(share, 2) for v in (b, c))
        dt_BMN = dt_BMN * real_places(run)[..., None]
        y_BMNP, state = linear_attention(
            c_BMNS, b_BMNS, x_BMNP * dt_BMN[..., None], -self.a_log_N.exp() * dt_BMN, states[1]
        )
        return (y_BMNP + self.d_N[:, None] * x_BMNP).flatten(2).to(xbc_BMX.dtype), (window, state)

    def finish(self, y_TY: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        z_TX = inputs[2]
        gated = (y_TY.float() * F.silu(z_TX.float())).unflatten(-1, (self.spec.groups, -1))
        normed = F.rms_norm(gated, gated.shape[-1:], eps=self.spec.norm.eps).flatten(1)
        out_TD: Tensor = self.o(self.norm_X * normed.to(z_TX.dtype))
        return out_TD

    def parts(self) -> Iterator[Part]:
        yield from self.first.parts()
        yield from self.o.parts()
        named = {
            "conv.weight": self.conv_XK,
            "conv.bias": self.conv_bias_X,
            "A_log": self.a_log_N,
            "D": self.d_N,
            "dt_bias": self.dt_bias_N,
            "out_norm.weight": self.norm_X,
        }
        yield from ((name, owner.data, owner) for name, owner in named.items() if owner is not None)
