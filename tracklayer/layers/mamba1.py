"""Mamba with normed dt, B and C (Jamba). T tokens, B sequences, M places, X channels, S state width, R rank of dt."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tracklayer.kernels.norm import rms_norm
from tracklayer.layers.batch import Batch, Run
from tracklayer.layers.linear import Linear
from tracklayer.layers.parts import Part, parameter
from tracklayer.layers.recurrent import Recurrent, causal_conv, real_places
from tracklayer.layers.recurrent_spec import Mamba1Spec
from tracklayer.layers.scans import SCAN_CHUNK, channel_scan


class Mamba1(Recurrent):
    """Parts: in (x, then z), conv, x_proj (dt, B, C), dt_norm, b_norm, c_norm, dt, A_log, D, o.

    What dt, B and C are depends on the convolution's result, so all but the first projection happens in the walk.
    """

    def __init__(self, spec: Mamba1Spec, hidden_size: int, place: int) -> None:
        super().__init__(place)
        self.spec = spec
        self.first = Linear(hidden_size, {"x": spec.width, "z": spec.width}, bias=spec.bias, fused="in")
        self.conv_XK = parameter(spec.width, spec.conv, dtype=torch.float32)
        self.conv_bias_X = parameter(spec.width, dtype=torch.float32) if spec.conv_bias else None
        inner = {"dt_rank": spec.dt_rank, "b": spec.state, "c": spec.state}
        self.x_proj = Linear(spec.width, inner, fused="x_proj")
        self.dt_norm_R, self.b_norm_S, self.c_norm_S = (parameter(width) for width in inner.values())
        self.dt_XR = parameter(spec.width, spec.dt_rank)
        self.dt_bias_X = parameter(spec.width, dtype=torch.float32)
        self.a_log_XS = parameter(spec.width, spec.state, dtype=torch.float32)
        self.d_X = parameter(spec.width, dtype=torch.float32)
        self.o = Linear(spec.width, {"o": hidden_size}, bias=spec.bias)

    def project(self, x_TD: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        x_TX, z_TX = self.first(x_TD).split([self.spec.width] * 2, -1)
        return x_TX, z_TX

    def walk(
        self, inputs: tuple[Tensor, ...], states: tuple[Tensor, ...], run: Run
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        window, state = states
        y_BMX, window = causal_conv(inputs[0], window, self.conv_XK, self.conv_bias_X, run)
        x_BMX = F.silu(y_BMX).to(inputs[0].dtype)
        dt_BMX, b_BMS, c_BMS = self._steps(x_BMX)
        dt_BMX = dt_BMX * real_places(run)[..., None]
        rate_XS, pieces = -self.a_log_XS.exp(), []
        for start in range(0, x_BMX.shape[1], SCAN_CHUNK):
            part = slice(start, start + SCAN_CHUNK)
            dt, x = dt_BMX[:, part, :, None], x_BMX[:, part, :, None].float()
            h_BMXS = channel_scan((dt * rate_XS).exp(), dt * x * b_BMS[:, part, None], state)
            state = h_BMXS[:, -1]
            pieces.append((h_BMXS @ c_BMS[:, part, :, None])[..., 0] + self.d_X * x[..., 0])
        return torch.cat(pieces, 1), (window, state)

    def _steps(self, x_BMX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dt [B, M, X], B and C [B, M, S] of the convolved input, float32."""
        dt_TR, b_TS, c_TS = self.x_proj(x_BMX.flatten(0, 1)).split(list(self.x_proj.outputs.values()), -1)
        eps, norms = self.spec.norm.eps, (self.dt_norm_R, self.b_norm_S, self.c_norm_S)
        dt_TR, b_TS, c_TS = (rms_norm(x.contiguous(), w, eps) for x, w in zip((dt_TR, b_TS, c_TS), norms, strict=True))
        dt_TX = F.softplus(F.linear(dt_TR, self.dt_XR).float() + self.dt_bias_X)
        dt, b, c = (x.float().unflatten(0, x_BMX.shape[:2]) for x in (dt_TX, b_TS, c_TS))
        return dt, b, c

    def finish(self, y_TY: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        z_TX = inputs[1]
        out_TD: Tensor = self.o((y_TY * F.silu(z_TX.float())).to(z_TX.dtype))
        return out_TD

    def parts(self) -> Iterator[Part]:
        for linear in (self.first, self.x_proj, self.o):
            yield from linear.parts()
        named = {
            "conv.weight": self.conv_XK,
            "conv.bias": self.conv_bias_X,
            "dt_norm.weight": self.dt_norm_R,
            "b_norm.weight": self.b_norm_S,
            "c_norm.weight": self.c_norm_S,
            "dt.weight": self.dt_XR,
            "dt.bias": self.dt_bias_X,
            "A_log": self.a_log_XS,
            "D": self.d_X,
        }
        yield from ((name, owner.data, owner) for name, owner in named.items() if owner is not None)
