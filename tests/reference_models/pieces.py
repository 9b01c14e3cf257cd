"""What plain models are made of: norms, rotation, attention under a full mask, gated experts, and a decoder's outline.

One sequence, whole, in float32; nothing is cached, batched or fused, and nothing here knows the package that is tested.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotated(x_THD: Tensor, width: int, theta: float, pairs: bool = False) -> Tensor:
    """Rotary embedding of each head's first `width` values, position = row. `pairs`: (0, 1), (2, 3) belong together;
    else value i and value i + width / 2."""
    angle = torch.arange(len(x_THD))[:, None].double() * theta ** -(torch.arange(0, width, 2).double() / width)
    cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
    out = x_THD.clone()
    first = slice(0, width, 2) if pairs else slice(0, width // 2)
    second = slice(1, width, 2) if pairs else slice(width // 2, width)
    a, b = x_THD[..., first], x_THD[..., second]
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


def causal(length: int) -> Tensor:
    """[T, T]: whether row t may see column s."""
    return torch.ones(length, length).tril().bool()


def by_blocks(length: int, block: int) -> Tensor:
    """[T, T]: all of one's own block and of the blocks before it."""
    number = torch.arange(length) // block
    return number[:, None] >= number[None]


def attend(
    q_THD: Tensor, k_TGD: Tensor, v_TGE: Tensor, mask_TT: Tensor, scale: float, cap: float | None = None
) -> Tensor:
    """Softmax attention [T, H * E]; query heads share key heads in order; `cap`: scores are cap * tanh(score / cap)."""
    share = q_THD.shape[1] // k_TGD.shape[1]
    k_THD, v_THE = k_TGD.repeat_interleave(share, 1), v_TGE.repeat_interleave(share, 1)
    score_HTT = torch.einsum("thd,shd->hts", q_THD, k_THD) * scale
    if cap is not None:
        score_HTT = cap * (score_HTT / cap).tanh()
    weight_HTT = score_HTT.masked_fill(~mask_TT, -torch.inf).softmax(-1)
    return torch.einsum("hts,she->the", weight_HTT, v_THE).flatten(1)


class Plain:
    """A decoder over checkpoint tensors by their published names.

    `model(input_ids=[1, T])` gives an object with `logits` [1, T, V]; `routes` then holds {layer: ids [T, K]}.
    """

    embedding = "model.embed_tokens"
    gate_up_down = ("gate_proj", "up_proj", "down_proj")
    act: Callable[[Tensor], Tensor] = staticmethod(silu)

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.config, self.tensors = config, {name: tensor.float() for name, tensor in tensors.items()}
        self.routes: dict[int, Tensor] = {}

    def mask(self, length: int) -> Tensor:
        return causal(length)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms(x, self.tensors[f"{name}.weight"], self.config["rms_norm_eps"])

    def mlp(self, x: Tensor, name: str) -> Tensor:
        gate, up, down = (f"{name}.{part}" for part in self.gate_up_down)
        return self.linear(self.act(self.linear(x, gate)) * self.linear(x, up), down)

    def experts(self, layer: int, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, name: str) -> Tensor:
        """The sum of each token's chosen experts; the one place where routes are noted."""
        self.routes[layer] = ids_TK
        rows = zip(x_TD, ids_TK.tolist(), weights_TK, strict=True)
        return torch.stack(
            [
                sum(weight * self.mlp(x, f"{name}.{j}") for j, weight in zip(ids, weights, strict=True))
                for x, ids, weights in rows
            ]
        )

    def attention(self, layer: int, x_TD: Tensor, mask_TT: Tensor) -> Tensor:
        raise NotImplementedError

    def feed_forward(self, layer: int, x_TD: Tensor) -> Tensor:
        raise NotImplementedError

    def layer(self, i: int, h_TD: Tensor, mask_TT: Tensor) -> Tensor:
        name = f"model.layers.{i}"
        h_TD = h_TD + self.attention(i, self.norm(h_TD, f"{name}.input_layernorm"), mask_TT)
        return h_TD + self.feed_forward(i, self.norm(h_TD, f"{name}.post_attention_layernorm"))

    def head(self, h_TD: Tensor) -> Tensor:
        return self.linear(h_TD, "lm_head")

    def embed(self, ids_T: Tensor) -> Tensor:
        return self.tensors[f"{self.embedding}.weight"][ids_T]

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        self.routes.clear()
        h_TD, mask_TT = self.embed(input_ids[0]), self.mask(input_ids.shape[1])
        for i in range(self.config["num_hidden_layers"]):
            h_TD = self.layer(i, h_TD, mask_TT)
        return SimpleNamespace(logits=self.head(self.norm(h_TD, "model.norm"))[None])
