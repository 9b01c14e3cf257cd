"""Tiny random checkpoints of the models that transformers has no class for, under their published tensor names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from reference_models import blocks, models
from reference_models.pieces import Plain

Shapes = dict[str, tuple[int, ...]]

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
EXPERTS = {"intermediate_size": 40, "moe_intermediate_size": 16, "num_experts_per_tok": 3}
LING = {
    **EXPERTS,
    "num_experts": 8,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "partial_rotary_factor": 0.5,
}


def mlp(name: str, width: int, hidden: int, parts: tuple[str, str, str] = Plain.gate_up_down) -> Shapes:
    gate, up, down = parts
    return {f"{name}.{gate}": (width, hidden), f"{name}.{up}": (width, hidden), f"{name}.{down}": (hidden, width)}


def moe(name: str, c: dict[str, Any], gate: str = "gate") -> Shapes:
    count = c.get("n_routed_experts") or c["num_experts"]
    width, shared = c.get("moe_intermediate_size", c["intermediate_size"]), c.get("n_shared_experts")
    shapes: Shapes = {f"{name}.{gate}": (count, c["hidden_size"])}
    for j in range(count):
        shapes |= mlp(f"{name}.experts.{j}", width, c["hidden_size"])
    if shared := shared or c.get("num_shared_experts"):
        shapes |= mlp(f"{name}.shared_experts", shared * width, c["hidden_size"])
    return shapes


def separate(name: str, layer: int, c: dict[str, Any]) -> Shapes:
    heads, groups, width, hidden = sizes(c)
    name = f"{name}.self_attn"
    shapes = {f"{name}.{part}_proj": (n * width, hidden) for part, n in (("q", heads), ("k", groups), ("v", groups))}
    return shapes | {f"{name}.o_proj": (hidden, heads * width)}


def normed(name: str, layer: int, c: dict[str, Any]) -> Shapes:
    width = sizes(c)[2]
    return separate(name, layer, c) | {f"{name}.self_attn.{part}_norm": (width,) for part in "qk"}


def fused(name: str, layer: int, c: dict[str, Any]) -> Shapes:
    heads, groups, width, hidden = sizes(c)
    name = f"{name}.attention"
    return {f"{name}.query_key_value": ((heads + 2 * groups) * width, hidden), f"{name}.dense": (hidden, heads * width)}


def fused_normed(name: str, layer: int, c: dict[str, Any]) -> Shapes:
    norms = {f"{name}.attention.{part}_layernorm": (sizes(c)[2],) for part in ("query", "key")}
    return fused(name, layer, c) | norms


def lightning_or_latent(name: str, layer: int, c: dict[str, Any]) -> Shapes:
    heads, _, width, hidden = sizes(c)
    rank, nope, rope, value = (c[key] for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    if (layer + 1) % c["layer_group_size"]:
        inner = heads * width
        gated = {f"{name}.attention.g_proj": (inner, hidden), f"{name}.attention.g_norm": (inner,)}
        return fused_normed(name, layer, {**c, "num_key_value_heads": heads}) | gated
    name = f"{name}.attention"
    shapes: Shapes = {
        f"{name}.kv_a_proj_with_mqa": (rank + rope, hidden),
        f"{name}.kv_a_layernorm": (rank,),
        f"{name}.kv_b_proj": (heads * (nope + value), rank),
        f"{name}.dense": (hidden, heads * value),
    }
    if low := c["q_lora_rank"]:
        queries = {f"{name}.q_a_proj": (low, hidden), f"{name}.q_a_layernorm": (low,)}
        return shapes | queries | {f"{name}.q_b_proj": (heads * (nope + rope), low)}
    return shapes | {f"{name}.q_proj": (heads * (nope + rope), hidden)}


def sizes(c: dict[str, Any]) -> tuple[int, int, int, int]:
    """Query heads, key heads, width of a head, hidden size."""
    heads = c["num_attention_heads"]
    width = c.get("head_dim") or c["hidden_size"] // heads
    return heads, c.get("num_key_value_heads") or heads, width, c["hidden_size"]


def decoder(attention: Callable[[str, int, dict[str, Any]], Shapes], model: Plain, gate: str = "gate") -> Shapes:
    """Shapes of a decoder with two norms a layer."""
    c = model.config
    hidden, shapes = c["hidden_size"], {}
    for i in range(c["num_hidden_layers"]):
        name = f"model.layers.{i}"
        shapes |= {f"{name}.input_layernorm": (hidden,), f"{name}.post_attention_layernorm": (hidden,)}
        shapes |= attention(name, i, c)
        if not model.is_moe(i):
            shapes |= mlp(f"{name}.mlp", c["intermediate_size"], hidden)
            continue
        shapes |= moe(f"{name}.mlp", c, gate)
        if isinstance(model, models.BailingV2):
            shapes[f"{name}.mlp.gate.expert_bias"] = (c["num_experts"],)
    return shapes


def grok(model: Plain) -> Shapes:
    c = model.config
    shapes: Shapes = {}
    for i in range(c["num_hidden_layers"]):
        name = f"model.layers.{i}"
        for place in ("pre_attn", "post_attn", "pre_moe", "post_moe"):
            shapes[f"{name}.{place}_norm.scale"] = (c["hidden_size"],)
        shapes |= {key.replace("self_attn", "attn"): shape for key, shape in separate(name, i, c).items()}
        shapes[f"{name}.moe_block.gate"] = (c["num_experts"], c["hidden_size"])
        for j in range(c["num_experts"]):
            expert = f"{name}.moe_block.experts.{j}"
            shapes |= mlp(expert, c["intermediate_size"], c["hidden_size"], models.Grok1.gate_up_down)
    return shapes


def random_tensors(shapes: Shapes, seed: int) -> dict[str, torch.Tensor]:
    """Matrices that keep lengths, norms about 1, biases about 0: so that no term hides."""
    generator = torch.Generator().manual_seed(seed + 1)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        whole = name if name.endswith((".scale", ".expert_bias")) else f"{name}.weight"
        centre = 0.0 if "bias" in name else 1.0
        tensors[whole] = noise * (1.5 / shape[-1] ** 0.5) if len(shape) == 2 else centre + 0.2 * noise
    return tensors


def made(
    kind: type[Plain], shapes: Callable[[Any], Shapes], config: dict[str, Any], seed: int, **overrides: Any
) -> Plain:
    """A model of `kind` with random weights; `overrides` change its config."""
    config = {**BASE, **config, **overrides}
    model = kind(config, {})
    every = {model.embedding: (config["vocab_size"], config["hidden_size"]), "model.norm": (config["hidden_size"],)}
    every |= {"lm_head": (config["vocab_size"], config["hidden_size"])} | shapes(model)
    return kind(config, random_tensors(every, seed))


DEEPSEEK = {
    **EXPERTS,
    "architectures": ["DeepseekForCausalLM"],
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": False,
}
XVERSE = {
    "architectures": ["XverseForCausalLM"],
    "intermediate_size": 16,
    "num_experts": 8,
    "moe_top_k": 3,
    "num_shared_experts": 2,
    "rope_theta": 500000.0,
}
BAILING = {
    **EXPERTS,
    "architectures": ["BailingMoeForCausalLM"],
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_shared_experts": 1,
    "first_k_dense_replace": 0,
    "norm_topk_prob": True,
    "norm_head": True,
}
LING_2_5 = {
    **LING,
    "architectures": ["BailingMoeV2_5ForCausalLM"],
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "rope_theta": 600000.0,
    "layer_group_size": 2,
    "group_norm_size": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 9,
    # A head's output may be nearly 0, and the norm after it then makes much of rounding; a larger eps keeps that small.
    "rms_norm_eps": 1e-2,
}
GROK = {
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
# variant -> function of (seed, **overrides of its config): a model with `config`, `tensors`, `routes`
MODELS: dict[str, Callable[..., Plain]] = {
    "deepseek_v1": partial(made, models.DeepseekV1, partial(decoder, separate), DEEPSEEK),
    "deepseek_v1_every_second": partial(
        made,
        models.DeepseekV1,
        partial(decoder, separate),
        {**DEEPSEEK, "moe_layer_freq": 2, "first_k_dense_replace": 0, "norm_topk_prob": True, "num_hidden_layers": 4},
    ),
    "xverse_moe": partial(made, models.Xverse, partial(decoder, separate, gate="router"), XVERSE),
    "bailing_moe": partial(made, models.Bailing, partial(decoder, fused), BAILING),
    "bailing_moe_v2_5": partial(made, models.BailingV25, partial(decoder, lightning_or_latent), LING_2_5),
    "bailing_moe_v2_5_low_queries": partial(
        made,
        models.BailingV25,
        partial(decoder, lightning_or_latent),
        {**LING_2_5, "q_lora_rank": 14, "num_attention_heads": 6, "num_key_value_heads": 6, "layer_group_size": 4},
    ),
    "grok1": partial(made, models.Grok1, grok, GROK),
}
SDAR = {
    **EXPERTS,
    "architectures": ["SDARMoeForCausalLM"],
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "norm_topk_prob": True,
}
LLADA2 = {
    **LING,
    "architectures": ["LLaDA2MoeModelLM"],
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
}
# Those that are generated block by block, which the ways of running in parity.py do not know.
BLOCK_MODELS: dict[str, Callable[..., Plain]] = {
    "sdar_moe": partial(made, blocks.Sdar, partial(decoder, normed), SDAR),
    "llada2": partial(made, blocks.Llada2, partial(decoder, fused_normed), LLADA2),
}
