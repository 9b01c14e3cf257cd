"""Ling-2.5 in plain float64: lightning attention as a loop over tokens, latent attention with keys made out."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from reference_models.plain import Plain, rms, turn
from torch import Tensor


class Ling25(Plain):
    EMBED = "model.word_embeddings.weight"
    differences: ClassVar[dict[str, Any]] = {
        "architectures": ["BailingMoeV2_5ForCausalLM"],
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "head_dim": 12,
        "rope_theta": 600000.0,
        "partial_rotary_factor": 0.5,
        "layer_group_size": 2,
        "group_norm_size": 2,
        "rms_norm_eps": 1e-2,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_rope_head_dim": 6,
        "qk_nope_head_dim": 10,
        "v_head_dim": 9,
        "intermediate_size": 40,
        "moe_intermediate_size": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
    }

    def is_latent(self, i: int) -> bool:
        group, count = self.config["layer_group_size"], self.config["num_hidden_layers"]
        return (i + 1) % group == 0 or i >= count // group * group

    def attention_shapes(self, i: int) -> dict[str, tuple[int, ...]]:
        c, size, heads = self.config, self.config["hidden_size"], self.config["num_attention_heads"]
        if not self.is_latent(i):
            width = heads * c["head_dim"]
            return {
                "query_key_value.weight": (3 * width, size),
                "query_layernorm.weight": (c["head_dim"],),
                "key_layernorm.weight": (c["head_dim"],),
                "g_proj.weight": (width, size),
                "g_norm.weight": (width,),
                "dense.weight": (size, width),
            }
        query = heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
        return {
            "q_proj.weight": (query, size),
            "kv_a_proj_with_mqa.weight": (c["kv_lora_rank"] + c["qk_rope_head_dim"], size),
            "kv_a_layernorm.weight": (c["kv_lora_rank"],),
            "kv_b_proj.weight": (heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), c["kv_lora_rank"]),
            "dense.weight": (size, heads * c["v_head_dim"]),
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        c = self.config
        found = {name: shape for name, shape in super().shapes().items() if "self_attn" not in name}
        for i in range(c["num_hidden_layers"]):
            layer = f"model.layers.{i}."
            found |= {f"{layer}attention.{name}": shape for name, shape in self.attention_shapes(i).items()}
            if self.is_moe(i):
                found[layer + "mlp.gate.expert_bias"] = (c["num_experts"],)
        return found

    def shared_width(self) -> int:
        return self.config["num_shared_experts"] * self.config["moe_intermediate_size"]

    def moe(self, x_TD: Tensor, i: int) -> Tensor:
        c, layer = self.config, f"model.layers.{i}.mlp."
        rows, out = [], []
        for x in x_TD:
            score = [1 / (1 + math.exp(-float(z))) for z in self.get(layer + "gate.weight") @ x]
            choice = [s + float(b) for s, b in zip(score, self.get(layer + "gate.expert_bias"), strict=True)]
            size = c["num_experts"] // c["n_group"]
            groups = [list(range(g * size, (g + 1) * size)) for g in range(c["n_group"])]
            groups.sort(key=lambda members: -sum(sorted((choice[j] for j in members), reverse=True)[:2]))
            allowed = [j for members in groups[: c["topk_group"]] for j in members]
            ids = sorted(allowed, key=lambda j: -choice[j])[: c["num_experts_per_tok"]]
            total = sum(score[j] for j in ids) + 1e-20
            y = self.mlp(x, layer + "shared_experts.")
            for j in ids:
                y = y + score[j] / total * c["routed_scaling_factor"] * self.mlp(x, f"{layer}experts.{j}.")
            rows.append(ids)
            out.append(y)
        self.routes[i] = torch.tensor(rows)
        return torch.stack(out)

    def attention(self, x_TD: Tensor, i: int) -> Tensor:
        return self.latent(x_TD, i) if self.is_latent(i) else self.lightning(x_TD, i)

    def lightning(self, x_TD: Tensor, i: int) -> Tensor:
        c, heads, name = self.config, self.config["num_attention_heads"], f"model.layers.{i}.attention."
        width, eps = c["head_dim"], c["rms_norm_eps"]
        qkv = (x_TD @ self.get(name + "query_key_value.weight").T).view(len(x_TD), 3, heads, width)
        q = rms(qkv[:, 0], self.get(name + "query_layernorm.weight"), eps)
        k = rms(qkv[:, 1], self.get(name + "key_layernorm.weight"), eps)
        turned = int(width * c["partial_rotary_factor"])
        q, k = (torch.cat([turn(z[..., :turned], c["rope_theta"]), z[..., turned:]], -1) for z in (q, k))
        depth = 1 - (i - 1) / (c["num_hidden_layers"] - 1) + 1e-5
        memory, out = torch.zeros(heads, width, width, dtype=torch.float64), []
        keep = torch.tensor([math.exp(-(2 ** (-8 * (h + 1) / heads)) * depth) for h in range(heads)]).double()
        for t in range(len(x_TD)):
            memory = keep[:, None, None] * memory + k[t, :, :, None] * qkv[t, 2, :, None, :]
            out.append(torch.einsum("hd,hde->he", q[t], memory).flatten() / math.sqrt(width))
        y = torch.stack(out).view(len(x_TD), c["group_norm_size"], -1)
        y = (y / (y.pow(2).mean(-1, keepdim=True) + eps).sqrt()).flatten(1) * self.get(name + "g_norm.weight")
        y = y / (1 + torch.exp(-(x_TD @ self.get(name + "g_proj.weight").T)))
        return y @ self.get(name + "dense.weight").T

    def latent(self, x_TD: Tensor, i: int) -> Tensor:
        c, heads, name = self.config, self.config["num_attention_heads"], f"model.layers.{i}.attention."
        nope, turned = c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        q = (x_TD @ self.get(name + "q_proj.weight").T).view(len(x_TD), heads, nope + turned)
        both = x_TD @ self.get(name + "kv_a_proj_with_mqa.weight").T
        latent = rms(both[:, : c["kv_lora_rank"]], self.get(name + "kv_a_layernorm.weight"), 1e-6)
        kv = (latent @ self.get(name + "kv_b_proj.weight").T).view(len(x_TD), heads, -1)
        q_turned = turn(halves(q[..., nope:]), c["rope_theta"])
        k_turned = turn(halves(both[:, None, c["kv_lora_rank"] :]), c["rope_theta"])[:, 0]
        future = torch.ones(len(x_TD), len(x_TD)).triu(1).bool()
        out = []
        for h in range(heads):
            scores = q[:, h, :nope] @ kv[:, h, :nope].T + q_turned[:, h] @ k_turned.T
            scores = (scores / math.sqrt(nope + turned)).masked_fill(future, float("-inf"))
            out.append(scores.softmax(-1) @ kv[:, h, nope:])
        return torch.cat(out, -1) @ self.get(name + "dense.weight").T


def halves(x: Tensor) -> Tensor:
    """Pairs (2i, 2i + 1) as pairs (i, i + R / 2)."""
    return torch.cat([x[..., ::2], x[..., 1::2]], -1)


LING = {"bailing_moe_v2_5": Ling25}
