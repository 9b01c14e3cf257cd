"""Hyper-connections: several residual streams instead of one (DeepSeek-V4).

T tokens, N streams, D model width. All weights of the mixing are formed in float32, from all streams of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tracklayer.layers.parts import Part, parameter
from tracklayer.layers.spec import StreamsSpec


class Streams(nn.Module):
    """One sublayer's place among the streams: it reads a weighted sum of them; they are mixed, and its result is added.

    read = sum_n in_n x_n;  x_m <- out_m * body(read) + sum_n mix_nm x_n, with rows and columns of `mix` summing to 1.
    With `last` there is only the weighted sum, of which the final norm is taken.
    """

    def __init__(self, spec: StreamsSpec, hidden_size: int, *, last: bool = False) -> None:
        super().__init__()
        self.spec, count = spec, spec.count
        rows = count if last else (2 + count) * count
        self.fn_XF = parameter(rows, count * hidden_size, dtype=torch.float32)
        self.base_X = parameter(rows, dtype=torch.float32)
        self.scale = parameter(1 if last else 3, dtype=torch.float32)

    def forward(self, x_TND: Tensor, body: Callable[[Tensor], Tensor]) -> Tensor:
        """The streams after a sublayer [T, N, D]; body takes and gives [T, D]."""
        spec, count = self.spec, self.spec.count
        read_TN, out_TN, mix_TX = self._weights(x_TND).split([count, count, count * count], -1)
        read_base, out_base, mix_base = self.base_X.split([count, count, count * count])
        read_scale, out_scale, mix_scale = self.scale.unbind()
        y_TD = body(self._read(x_TND, read_TN * read_scale + read_base))
        out_TN = 2 * torch.sigmoid(out_TN * out_scale + out_base)
        mix_TNN = torch.softmax((mix_TX * mix_scale + mix_base).unflatten(-1, (count, count)), -1) + spec.eps
        mix_TNN = mix_TNN / (mix_TNN.sum(-2, keepdim=True) + spec.eps)
        for _ in range(spec.iterations - 1):
            mix_TNN = mix_TNN / (mix_TNN.sum(-1, keepdim=True) + spec.eps)
            mix_TNN = mix_TNN / (mix_TNN.sum(-2, keepdim=True) + spec.eps)
        mixed_TND = mix_TNN.to(x_TND.dtype).transpose(1, 2) @ x_TND
        return out_TN.to(x_TND.dtype)[..., None] * y_TD[:, None] + mixed_TND

    def collapse(self, x_TND: Tensor) -> Tensor:
        """The one vector [T, D] that the streams end in."""
        return self._read(x_TND, self._weights(x_TND) * self.scale + self.base_X)

    def _weights(self, x_TND: Tensor) -> Tensor:
        flat_TF = x_TND.flatten(1).float()
        return F.linear(F.rms_norm(flat_TF, flat_TF.shape[-1:], eps=self.spec.norm_eps), self.fn_XF)

    def _read(self, x_TND: Tensor, logits_TN: Tensor) -> Tensor:
        weights_TN = torch.sigmoid(logits_TN) + self.spec.eps
        return (weights_TN[..., None] * x_TND).sum(1).to(x_TND.dtype)

    def parts(self) -> Iterator[Part]:
        for name, owner in (("fn", self.fn_XF), ("base", self.base_X), ("scale", self.scale)):
            yield name, owner.data, owner
