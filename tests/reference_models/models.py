"""DeepSeek-V1, XVERSE-MoE, Bailing v1, Ling-2.0, Ling-2.5 and Grok-1 in plain PyTorch.

Written from each model's own published code, named at each class. transformers has none of them.
"""

from __future__ import annotations

import math

import torch
from reference_models.pieces import Plain, attend, rms, rotated
from torch import Tensor
from torch.nn.functional import gelu, normalize


class DeepseekV1(Plain):
    """deepseek-ai/deepseek-moe-16b `modeling_deepseek.py`; the outline of all but Grok-1."""

    top_k, dense_first = "num_experts_per_tok", "first_k_dense_replace"

    def heads(self) -> tuple[int, int, int]:
        """Query heads, key heads, their width."""
        heads = self.config["num_attention_heads"]
        width = self.config.get("head_dim") or self.config["hidden_size"] // heads
        return heads, self.config.get("num_key_value_heads") or heads, width

    def projected(self, layer: int, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [T, heads, width], before rotation."""
        width, name = self.heads()[2], f"model.layers.{layer}.self_attn"
        return tuple(self.linear(x_TD, f"{name}.{part}_proj").unflatten(-1, (-1, width)) for part in "qkv")

    def out(self, layer: int, y: Tensor) -> Tensor:
        return self.linear(y, f"model.layers.{layer}.self_attn.o_proj")

    def attention(self, layer: int, x_TD: Tensor, mask_TT: Tensor) -> Tensor:
        q, k, v = self.projected(layer, x_TD)
        width = q.shape[-1]
        turned, theta = int(width * self.config.get("partial_rotary_factor", 1.0)), self.theta()
        q, k = rotated(q, turned, theta), rotated(k, turned, theta)
        return self.out(layer, attend(q, k, v, mask_TT, width**-0.5))

    def theta(self) -> float:
        return self.config.get("rope_theta", 10000.0)

    def choose(self, x_TD: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """MoEGate: softmax over all, the largest, `norm_topk_prob` divides by their sum + 1e-20; no factor."""
        weights, ids = self.linear(x_TD, f"{name}.gate").softmax(-1).topk(self.config[self.top_k])
        if self.config["norm_topk_prob"] and ids.shape[1] > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights

    def is_moe(self, layer: int) -> bool:
        return layer >= self.config.get(self.dense_first, 0) and layer % self.config.get("moe_layer_freq", 1) == 0

    def feed_forward(self, layer: int, x_TD: Tensor) -> Tensor:
        name = f"model.layers.{layer}.mlp"
        if not self.is_moe(layer):
            return self.mlp(x_TD, name)
        y_TD = self.experts(layer, x_TD, *self.choose(x_TD, name), f"{name}.experts")
        if f"{name}.shared_experts.gate_proj.weight" in self.tensors:
            y_TD = y_TD + self.mlp(x_TD, f"{name}.shared_experts")
        return y_TD


class Xverse(DeepseekV1):
    """xverse/XVERSE-MoE-A4.2B `modeling_xverse.py`: every layer is MoE, the chosen weights are always divided by their
    sum + 1e-6, and the base of the rotation defaults to 500,000."""

    def theta(self) -> float:
        return self.config.get("rope_theta", 500000.0)

    def choose(self, x_TD: Tensor, name: str) -> tuple[Tensor, Tensor]:
        weights, ids = self.linear(x_TD, f"{name}.router").softmax(-1).topk(self.config["moe_top_k"])
        return ids, weights / (weights.sum(-1, keepdim=True) + 1e-6)


class Bailing(DeepseekV1):
    """inclusionAI Ling-lite `modeling_bailing_moe.py`: q, k and v in one projection (all of q, then k, then v); with
    `norm_head` each column of the head over the vocabulary has length 1."""

    embedding = "model.word_embeddings"

    def projected(self, layer: int, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads, groups, width = self.heads()
        fused = self.linear(x_TD, f"model.layers.{layer}.attention.query_key_value").unflatten(-1, (-1, width))
        return fused.split([heads, groups, groups], 1)

    def out(self, layer: int, y: Tensor) -> Tensor:
        return self.linear(y, f"model.layers.{layer}.attention.dense")

    def head(self, h_TD: Tensor) -> Tensor:
        weight = self.tensors["lm_head.weight"]
        return h_TD @ (normalize(weight, dim=0, eps=1e-7) if self.config.get("norm_head") else weight).T


def noaux(x_TD: Tensor, gate_ED: Tensor, bias_E: Tensor, config: dict) -> tuple[Tensor, Tensor]:
    """BailingMoeV2Gate: sigmoid; score + bias chooses, first the groups with the largest sum of two, then experts; the
    scores themselves weigh, divided by their sum + 1e-20 (k > 1) and times `routed_scaling_factor`."""
    score_TE = (x_TD @ gate_ED.T).sigmoid()
    choice_TGM = (score_TE + bias_E).unflatten(-1, (config["n_group"], -1))
    groups = choice_TGM.topk(2).values.sum(-1).topk(config["topk_group"]).indices
    kept_TG = torch.zeros(choice_TGM.shape[:2], dtype=torch.bool).scatter(1, groups, True)
    ids = choice_TGM.masked_fill(~kept_TG[..., None], -torch.inf).flatten(1).topk(config["num_experts_per_tok"]).indices
    weights = score_TE.gather(1, ids)
    if ids.shape[1] > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * config["routed_scaling_factor"]


class BailingV2(Bailing):
    """inclusionAI Ling-2.0 `modeling_bailing_moe_v2.py`: heads of q and k are normed, part of each is rotated."""

    def projected(self, layer: int, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().projected(layer, x_TD)
        name = f"model.layers.{layer}.attention"
        return self.norm(q, f"{name}.query_layernorm"), self.norm(k, f"{name}.key_layernorm"), v

    def choose(self, x_TD: Tensor, name: str) -> tuple[Tensor, Tensor]:
        return noaux(x_TD, self.tensors[f"{name}.gate.weight"], self.tensors[f"{name}.gate.expert_bias"], self.config)


def slopes(heads: int) -> list[float]:
    """ALiBi's slopes: a geometric row for powers of two, else filled up with every other one of twice as many."""
    whole = 2 ** int(math.log2(heads))
    row = [2.0 ** (-8 * (n + 1) / whole) for n in range(whole)]
    return row if whole == heads else row + slopes(2 * whole)[::2][: heads - whole]


class BailingV25(BailingV2):
    """inclusionAI Ling-2.5 `modeling_bailing_moe_v2_5.py`: latent attention in the last layer of each group of
    `layer_group_size`, lightning attention in the others."""

    def attention(self, layer: int, x_TD: Tensor, mask_TT: Tensor) -> Tensor:
        last = (layer + 1) % self.config["layer_group_size"] == 0
        # Layers past the last whole group are full attention too.
        whole = self.config["num_hidden_layers"] // self.config["layer_group_size"] * self.config["layer_group_size"]
        return (self.latent if last or layer >= whole else self.lightning)(layer, x_TD, mask_TT)

    def lightning(self, layer: int, x_TD: Tensor, mask_TT: Tensor) -> Tensor:
        """out_t = sum over s <= t of decay^(t - s) (q_t . k_s) v_s: its heads are `num_attention_heads`, keys too."""
        name, heads = f"model.layers.{layer}.attention", self.config["num_attention_heads"]
        fused = self.linear(x_TD, f"{name}.query_key_value").unflatten(-1, (3, heads, -1))
        q, k, v = fused.unbind(1)
        q, k = self.norm(q, f"{name}.query_layernorm"), self.norm(k, f"{name}.key_layernorm")
        width = q.shape[-1]
        turned, theta = int(width * self.config["partial_rotary_factor"]), self.theta()
        q, k = rotated(q, turned, theta), rotated(k, turned, theta)
        # The published code counts layers from 1 here: the first layer's factor is above 1.
        factor = 1 - (layer - 1) / (self.config["num_hidden_layers"] - 1) + 1e-5
        rate_H = torch.tensor(slopes(heads)) * factor
        age_TT = (torch.arange(len(x_TD))[:, None] - torch.arange(len(x_TD))[None]).float()
        decay_HTT = (-rate_H[:, None, None] * age_TT.clamp(min=0)).exp() * mask_TT
        weight_HTT = torch.einsum("thd,shd->hts", q, k) * width**-0.5 * decay_HTT
        y = torch.einsum("hts,shd->thd", weight_HTT, v).flatten(1)
        grouped = y.unflatten(-1, (self.config["group_norm_size"], -1))
        y = rms(grouped, torch.ones(()), self.config["rms_norm_eps"]).flatten(1) * self.tensors[f"{name}.g_norm.weight"]
        return self.out(layer, y * self.linear(x_TD, f"{name}.g_proj").sigmoid())

    def latent_norm(self, x: Tensor, name: str) -> Tensor:
        """Made without an eps in the published code, hence its class's default and not `rms_norm_eps`."""
        return rms(x, self.tensors[f"{name}.weight"], 1e-6)

    def latent(self, layer: int, x_TD: Tensor, mask_TT: Tensor) -> Tensor:
        """Multi-head latent attention of DeepSeek-V3, rotated in pairs."""
        name, c = f"model.layers.{layer}.attention", self.config
        heads, nope = c["num_attention_heads"], c["qk_nope_head_dim"]
        rope, rank = c["qk_rope_head_dim"], c["kv_lora_rank"]
        if c.get("q_lora_rank"):
            low = self.latent_norm(self.linear(x_TD, f"{name}.q_a_proj"), f"{name}.q_a_layernorm")
            q = self.linear(low, f"{name}.q_b_proj")
        else:
            q = self.linear(x_TD, f"{name}.q_proj")
        q_nope, q_rope = q.unflatten(-1, (heads, nope + rope)).split([nope, rope], -1)
        latent, k_rope = self.linear(x_TD, f"{name}.kv_a_proj_with_mqa").split([rank, rope], -1)
        kv = self.linear(self.latent_norm(latent, f"{name}.kv_a_layernorm"), f"{name}.kv_b_proj")
        k_nope, v = kv.unflatten(-1, (heads, -1)).split([nope, c["v_head_dim"]], -1)
        q_rope, k_rope = rotated(q_rope, rope, self.theta(), True), rotated(k_rope[:, None], rope, self.theta(), True)
        q, k = torch.cat([q_nope, q_rope], -1), torch.cat([k_nope, k_rope.expand(-1, heads, -1)], -1)
        return self.out(layer, attend(q, k, v, mask_TT, (nope + rope) ** -0.5))


class Grok1(Plain):
    """xai-org/grok-1 `model.py` (JAX): norms around both halves, capped attention scores, tanh-gelu experts; softmax
    over the uncapped logits, the two largest as they are, not divided by their sum."""

    gate_up_down = ("linear", "linear_v", "linear_1")
    act = staticmethod(lambda x: gelu(x, approximate="tanh"))  # jax.nn.gelu's default form

    def scaled(self, x: Tensor, name: str) -> Tensor:
        return rms(x, self.tensors[f"{name}.scale"], self.config["rms_norm_eps"])

    def embed(self, ids_T: Tensor) -> Tensor:
        return super().embed(ids_T) * self.config["embedding_multiplier_scale"]

    def head(self, h_TD: Tensor) -> Tensor:
        return super().head(h_TD) * self.config["output_multiplier_scale"]

    def layer(self, i: int, h_TD: Tensor, mask_TT: Tensor) -> Tensor:
        name = f"model.layers.{i}"
        y_TD = self.attention(i, self.scaled(h_TD, f"{name}.pre_attn_norm"), mask_TT)
        h_TD = h_TD + self.scaled(y_TD, f"{name}.post_attn_norm")
        y_TD = self.feed_forward(i, self.scaled(h_TD, f"{name}.pre_moe_norm"))
        return h_TD + self.scaled(y_TD, f"{name}.post_moe_norm")

    def attention(self, layer: int, x_TD: Tensor, mask_TT: Tensor) -> Tensor:
        name, c = f"model.layers.{layer}.attn", self.config
        width = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
        q, k, v = (self.linear(x_TD, f"{name}.{part}_proj").unflatten(-1, (-1, width)) for part in "qkv")
        q, k = rotated(q, width, c.get("rope_theta", 10000.0)), rotated(k, width, c.get("rope_theta", 10000.0))
        cap = c.get("attn_logit_softcapping", 30.0)
        return self.linear(attend(q, k, v, mask_TT, c["attn_output_multiplier"], cap), f"{name}.o_proj")

    def feed_forward(self, layer: int, x_TD: Tensor) -> Tensor:
        name = f"model.layers.{layer}.moe_block"
        weights, ids = self.linear(x_TD, f"{name}.gate").softmax(-1).topk(self.config["num_experts_per_tok"])
        return self.experts(layer, x_TD, ids, weights, f"{name}.experts")
