"""Gated DeltaNet (Qwen3-Next, Qwen3.5). T tokens, B sequences, M places, N value heads of width E, H key heads of D.

A key head serves N / H value heads. q, k and v pass a short convolution and silu; q and k have length one.
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
from tracklayer.layers.recurrent_spec import GatedDeltaSpec
from tracklayer.layers.scans import delta_rule


class GatedDelta(Recurrent):
    """Parts: qkv (all q heads, then k, then v), z, b, a; conv, A_log, dt_bias, out_norm, o."""

    def __init__(self, spec: GatedDeltaSpec, hidden_size: int, place: int) -> None:
        super().__init__(place)
        self.spec = spec
        keys, values = spec.num_key_heads * spec.key_dim, spec.num_heads * spec.value_dim
        self.qkv = Linear(hidden_size, {"q": keys, "k": keys, "v": values}, fused="qkv")
        self.gates = Linear(hidden_size, {"z": values, "b": spec.num_heads, "a": spec.num_heads})
        self.conv_XK = parameter(spec.conv_width, spec.conv, dtype=torch.float32)
        self.a_log_N = parameter(spec.num_heads, dtype=torch.float32)
        self.dt_bias_N = parameter(spec.num_heads, dtype=torch.float32)
        self.norm_E = parameter(spec.value_dim)
        self.o = Linear(values, {"o": hidden_size})

    def project(self, x_TD: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        z_TX, b_TN, a_TN = self.gates(x_TD).split(list(self.gates.outputs.values()), -1)
        log_decay_TN = -self.a_log_N.exp() * F.softplus(a_TN.float() + self.dt_bias_N)
        return self.qkv(x_TD), log_decay_TN, torch.sigmoid(b_TN).float(), z_TX

    def walk(
        self, inputs: tuple[Tensor, ...], states: tuple[Tensor, ...], run: Run
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        spec, (qkv_BMX, log_decay_BMN, beta_BMN, _) = self.spec, inputs
        y_BMX, window = causal_conv(qkv_BMX, states[0], self.conv_XK, None, run)
        parts = F.silu(y_BMX).to(qkv_BMX.dtype).split(list(self.qkv.outputs.values()), -1)
        q, k, v = (x.unflatten(-1, (heads, -1)) for x, heads in zip(parts, self._heads, strict=True))
        share = spec.num_heads // spec.num_key_heads
        q_BMND, k_BMND = (unit(x).repeat_interleave(share, 2) for x in (q, k))
        real = real_places(run)[..., None]
        o_BMNE, state = delta_rule(
            q_BMND * spec.key_dim**-0.5,
            k_BMND,
            v.float(),
            (log_decay_BMN * real)[..., None],
            beta_BMN * real,
            states[1],
        )
        return o_BMNE.to(qkv_BMX.dtype), (window, state)

    @property
    def _heads(self) -> tuple[int, int, int]:
        return self.spec.num_key_heads, self.spec.num_key_heads, self.spec.num_heads

    def finish(self, y_TY: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        z_TNE = inputs[3].unflatten(-1, (self.spec.num_heads, -1))
        return self.o(gated_norm(y_TY, z_TNE, self.norm_E, self.spec.norm.eps).flatten(1))

    def parts(self) -> Iterator[Part]:
        yield from self.qkv.parts()
        yield from self.gates.parts()
        for name, owner in (("conv", self.conv_XK), ("out_norm", self.norm_E)):
            yield f"{name}.weight", owner.data, owner
        for name, owner in (("A_log", self.a_log_N), ("dt_bias", self.dt_bias_N)):
            yield name, owner.data, owner
        yield from self.o.parts()
