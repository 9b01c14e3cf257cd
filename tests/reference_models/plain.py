"""Plain float64 models of the families that transformers has no class for, written from descriptions of their own code.

One sequence at a time, no cache, loops over tokens and experts. Tensors go by their checkpoint names; `shapes` says
which there are, `routes` which experts each MoE layer used in the last call.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turn(x_THD: Tensor, theta: float) -> Tensor:
    """Rotary embedding of pairs (i, i + D / 2) as complex numbers."""
    tokens, _, width = x_THD.shape
    half = width // 2
    speed = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(tokens, dtype=torch.float64)[:, None] * speed
    z = torch.complex(x_THD[..., :half], x_THD[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([z.real, z.imag], -1)


class Plain:
    """A pre-norm decoder; subclasses say names, router and what else differs."""

    EMBED, Q_NAMES = "model.embed_tokens.weight", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    OUT, GATE = "self_attn.o_proj.weight", "mlp.gate.weight"
    EXPERT, SPELLING = "mlp.experts.{j}.", ("gate_proj", "up_proj", "down_proj")
    differences: ClassVar[dict[str, Any]]

    def __init__(self, seed: int, **overrides: Any) -> None:
        self.config = {**TINY, **self.differences, **overrides}
        self.routes: dict[int, Tensor] = {}
        generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, Tensor] = {}
        for name, shape in self.shapes().items():
            noise = torch.randn(shape, generator=generator)
            self.tensors[name] = 1 + 0.2 * noise if len(shape) == 1 else noise * (1.5 / shape[-1] ** 0.5)

    def get(self, name: str) -> Tensor:
        return self.tensors[name].double()

    @property
    def kv_heads(self) -> int:
        return self.config.get("num_key_value_heads") or self.config["num_attention_heads"]

    @property
    def head_dim(self) -> int:
        return self.config["hidden_size"] // self.config["num_attention_heads"]

    def is_moe(self, i: int) -> bool:
        return i >= self.config.get("first_k_dense_replace", 0)

    def expert_width(self) -> int:
        return self.config["moe_intermediate_size"]

    def shared_width(self) -> int:
        return 0

    def num_experts(self) -> int:
        return self.config["num_experts"]

    def top_k(self) -> int:
        return self.config["num_experts_per_tok"]

    def norm_names(self) -> tuple[str, ...]:
        return "input_layernorm.weight", "post_attention_layernorm.weight"

    def mlp_shapes(self, prefix: str, width: int, spelling: tuple[str, str, str]) -> dict[str, tuple[int, ...]]:
        size = self.config["hidden_size"]
        gate, up, down = (f"{prefix}{word}.weight" for word in spelling)
        return {gate: (width, size), up: (width, size), down: (size, width)}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        c, size = self.config, self.config["hidden_size"]
        widths = [c["num_attention_heads"] * self.head_dim, *[self.kv_heads * self.head_dim] * 2]
        if len(self.Q_NAMES) == 1:
            widths = [sum(widths)]
        found = {self.EMBED: (c["vocab_size"], size), "model.norm.weight": (size,), "lm_head.weight": (97, size)}
        for i in range(c["num_hidden_layers"]):
            layer = f"model.layers.{i}."
            found |= {layer + name: (size,) for name in self.norm_names()}
            found |= {f"{layer}{n}.weight": (w, size) for n, w in zip(self.Q_NAMES, widths, strict=True)}
            found[layer + self.OUT] = (size, c["num_attention_heads"] * self.head_dim)
            if not self.is_moe(i):
                found |= self.mlp_shapes(layer + "mlp.", c["intermediate_size"], self.SPELLING)
                continue
            found[layer + self.GATE] = (self.num_experts(), size)
            for j in range(self.num_experts()):
                found |= self.mlp_shapes(layer + self.EXPERT.format(j=j), self.expert_width(), self.SPELLING)
            if self.shared_width():
                found |= self.mlp_shapes(layer + "mlp.shared_experts.", self.shared_width(), self.SPELLING)
        return found

    def act(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def mlp(self, x: Tensor, prefix: str) -> Tensor:
        gate, up, down = (self.get(f"{prefix}{word}.weight") for word in self.SPELLING)
        return down @ (self.act(gate @ x) * (up @ x))

    def weigh(self, scores: list[float]) -> list[float]:
        """The chosen experts' weights from their softmax scores."""
        raise NotImplementedError

    def moe(self, x_TD: Tensor, i: int) -> Tensor:
        layer, out, rows = f"model.layers.{i}.", [], []
        for x in x_TD:
            score = torch.softmax(self.get(layer + self.GATE) @ x, 0)
            ids = sorted(range(len(score)), key=lambda j: -float(score[j]))[: self.top_k()]
            weights = self.weigh([float(score[j]) for j in ids])
            y = sum(w * self.mlp(x, layer + self.EXPERT.format(j=j)) for j, w in zip(ids, weights, strict=True))
            if self.shared_width():
                y = y + self.mlp(x, layer + "mlp.shared_experts.")
            out.append(y)
            rows.append(ids)
        self.routes[i] = torch.tensor(rows)
        return torch.stack(out)

    def cap(self, scores: Tensor) -> Tensor:
        return scores / math.sqrt(self.head_dim)

    def attention(self, x_TD: Tensor, i: int) -> Tensor:
        heads, kv = self.config["num_attention_heads"], self.kv_heads
        qkv = torch.cat([x_TD @ self.get(f"model.layers.{i}.{n}.weight").T for n in self.Q_NAMES], -1)
        qkv = qkv.view(len(x_TD), heads + 2 * kv, self.head_dim)
        theta = self.config.get("rope_theta", 10000.0)
        q, k, v = turn(qkv[:, :heads], theta), turn(qkv[:, heads : heads + kv], theta), qkv[:, heads + kv :]
        future = torch.ones(len(x_TD), len(x_TD)).triu(1).bool()
        out = []
        for n in range(heads):
            h = n * kv // heads
            scores = self.cap(q[:, n] @ k[:, h].T).masked_fill(future, float("-inf"))
            out.append(scores.softmax(-1) @ v[:, h])
        return torch.cat(out, -1) @ self.get(f"model.layers.{i}.{self.OUT}").T

    def layer(self, x_TD: Tensor, i: int) -> Tensor:
        eps = self.config["rms_norm_eps"]
        first, second = (self.get(f"model.layers.{i}.{name}") for name in self.norm_names())
        x_TD = x_TD + self.attention(rms(x_TD, first, eps), i)
        n_TD = rms(x_TD, second, eps)
        if self.is_moe(i):
            return x_TD + self.moe(n_TD, i)
        return x_TD + torch.stack([self.mlp(n, f"model.layers.{i}.mlp.") for n in n_TD])

    def head(self) -> Tensor:
        return self.get("lm_head.weight")

    def __call__(self, *, input_ids: Tensor, use_cache: bool = False) -> SimpleNamespace:
        x_TD = self.get(self.EMBED)[input_ids[0]] * self.config.get("embedding_multiplier_scale", 1.0)
        for i in range(self.config["num_hidden_layers"]):
            x_TD = self.layer(x_TD, i)
        x_TD = rms(x_TD, self.get("model.norm.weight"), self.config["rms_norm_eps"])
        logits = x_TD @ self.head().T * self.config.get("output_multiplier_scale", 1.0)
        return SimpleNamespace(logits=logits[None])


class DeepseekV1(Plain):
    differences: ClassVar[dict[str, Any]] = {
        "architectures": ["DeepseekForCausalLM"],
        "intermediate_size": 40,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "norm_topk_prob": False,
    }

    def num_experts(self) -> int:
        return self.config["n_routed_experts"]

    def shared_width(self) -> int:
        return self.config["n_shared_experts"] * self.config["moe_intermediate_size"]

    def weigh(self, scores: list[float]) -> list[float]:
        return [s / (sum(scores) + 1e-20) for s in scores] if self.config["norm_topk_prob"] else scores


class Xverse(Plain):
    GATE = "mlp.router.weight"
    differences: ClassVar[dict[str, Any]] = {
        "architectures": ["XverseForCausalLM"],
        "intermediate_size": 16,
        "num_experts": 8,
        "moe_top_k": 3,
        "num_shared_experts": 2,
        "rope_theta": 500000.0,
    }

    def expert_width(self) -> int:
        return self.config["intermediate_size"]

    def shared_width(self) -> int:
        return self.config["num_shared_experts"] * self.config["intermediate_size"]

    def top_k(self) -> int:
        return self.config["moe_top_k"]

    def weigh(self, scores: list[float]) -> list[float]:
        return [s / (sum(scores) + 1e-6) for s in scores]


class BailingV1(Plain):
    EMBED, Q_NAMES, OUT = "model.word_embeddings.weight", ("attention.query_key_value",), "attention.dense.weight"
    differences: ClassVar[dict[str, Any]] = {
        "architectures": ["BailingMoeForCausalLM"],
        "num_key_value_heads": 2,
        "intermediate_size": 40,
        "moe_intermediate_size": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 1,
        "first_k_dense_replace": 0,
        "norm_topk_prob": True,
        "norm_head": True,
    }

    def shared_width(self) -> int:
        return self.config["num_shared_experts"] * self.config["moe_intermediate_size"]

    def weigh(self, scores: list[float]) -> list[float]:
        return [s / sum(scores) for s in scores]

    def head(self) -> Tensor:
        head_VD = self.get("lm_head.weight")
        return head_VD / (head_VD.pow(2).sum(0, keepdim=True).sqrt() + 1e-7)


class Grok1(Plain):
    Q_NAMES, OUT = ("attn.q_proj", "attn.k_proj", "attn.v_proj"), "attn.o_proj.weight"
    GATE, EXPERT = "moe_block.gate.weight", "moe_block.experts.{j}."
    SPELLING = ("linear", "linear_v", "linear_1")
    differences: ClassVar[dict[str, Any]] = {
        "architectures": ["Grok1ModelForCausalLM"],
        "num_key_value_heads": 2,
        "intermediate_size": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "embedding_multiplier_scale": 3.0,
        "output_multiplier_scale": 0.5,
        "attn_output_multiplier": 0.3,
        "attn_logit_softcapping": 2.0,
    }

    def expert_width(self) -> int:
        return self.config["intermediate_size"]

    def norm_names(self) -> tuple[str, ...]:
        return tuple(f"{name}.scale" for name in ("pre_attn_norm", "post_attn_norm", "pre_moe_norm", "post_moe_norm"))

    def act(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def cap(self, scores: Tensor) -> Tensor:
        limit = self.config["attn_logit_softcapping"]
        return limit * torch.tanh(scores * self.config["attn_output_multiplier"] / limit)

    def weigh(self, scores: list[float]) -> list[float]:
        return scores

    def layer(self, x_TD: Tensor, i: int) -> Tensor:
        eps = self.config["rms_norm_eps"]
        before, after, before_moe, after_moe = (self.get(f"model.layers.{i}.{name}") for name in self.norm_names())
        x_TD = x_TD + rms(self.attention(rms(x_TD, before, eps), i), after, eps)
        return x_TD + rms(self.moe(rms(x_TD, before_moe, eps), i), after_moe, eps)


MODELS = {"deepseek_v1": DeepseekV1, "xverse_moe": Xverse, "bailing_moe": BailingV1, "grok1": Grok1}
