"""Gated short convolution (LFM2). T tokens, B sequences, M places, X channels."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tracklayer.layers.batch import Batch, Run
from tracklayer.layers.linear import Linear
from tracklayer.layers.parts import Part, parameter
from tracklayer.layers.recurrent import Recurrent, causal_conv
from tracklayer.layers.recurrent_spec import ShortConvSpec


class ShortConv(Recurrent):
    """c * conv(b * x). Parts: in (b, then c, then x), conv, o."""

    def __init__(self, spec: ShortConvSpec, hidden_size: int, place: int) -> None:
        super().__init__(place)
        self.first = Linear(hidden_size, dict.fromkeys("bcx", spec.width), bias=spec.bias, fused="in")
        self.conv_XK = parameter(spec.width, spec.conv, dtype=torch.float32)
        self.conv_bias_X = parameter(spec.width, dtype=torch.float32) if spec.bias else None
        self.o = Linear(spec.width, {"o": hidden_size}, bias=spec.bias)

    def project(self, x_TD: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        b_TX, c_TX, x_TX = self.first(x_TD).chunk(3, -1)
        return b_TX * x_TX, c_TX

    def walk(
        self, inputs: tuple[Tensor, ...], states: tuple[Tensor, ...], run: Run
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        y_BMX, window = causal_conv(inputs[0], states[0], self.conv_XK, self.conv_bias_X, run)
        return y_BMX.to(inputs[0].dtype), (window,)

    def finish(self, y_TY: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        out_TD: Tensor = self.o(inputs[1] * y_TY)
        return out_TD

    def parts(self) -> Iterator[Part]:
        yield from self.first.parts()
        yield from self.o.parts()
        yield "conv.weight", self.conv_XK.data, self.conv_XK
        if self.conv_bias_X is not None:
            yield "conv.bias", self.conv_bias_X.data, self.conv_bias_X
