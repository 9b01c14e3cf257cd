"""Tiny random checkpoints, made with transformers: one row per family variant, and how to save one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": None,
    "attn_implementation": "eager",
}
MOE: dict[str, Any] = {"intermediate_size": 40, "moe_intermediate_size": 16}
GRANITE: dict[str, Any] = {
    "intermediate_size": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "embedding_multiplier": 3.0,
    "logits_scaling": 0.5,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.2,
}

# name -> (config class, model class, what differs from COMMON)
VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {"intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {
            "intermediate_size": 40,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            "intermediate_size": 40,
            "moe_intermediate_size": 16,
            "num_experts": 12,
            "num_experts_per_tok": 4,
            "head_dim": 16,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    "olmoe": (
        "OlmoeConfig",
        "OlmoeForCausalLM",
        {"intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2, "clip_qkv": 1.5},
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {
            "intermediate_size": 40,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.8,
            "use_qk_norm": True,
            "attention_bias": True,
            "head_dim": 16,
            "partial_rotary_factor": 0.5,
        },
    ),
    "dots1": (
        "Dots1Config",
        "Dots1ForCausalLM",
        {
            **MOE,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "head_dim": 16,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        "MiniMaxM2ForCausalLM",
        {
            "intermediate_size": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "head_dim": 16,
            "rotary_dim": 8,
        },
    ),
    "granite_moe": ("GraniteMoeConfig", "GraniteMoeForCausalLM", GRANITE),
    "granite_moe_shared": (
        "GraniteMoeSharedConfig",
        "GraniteMoeSharedForCausalLM",
        {**GRANITE, "shared_intermediate_size": 24, "attention_bias": True},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        "Ernie4_5_MoeForCausalLM",
        {
            **MOE,
            "num_hidden_layers": 4,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 2,
            "moe_layer_interval": 1,
            "use_bias": True,
        },
    ),
    "ernie4_5_moe_interval": (
        "Ernie4_5_MoeConfig",
        "Ernie4_5_MoeForCausalLM",
        {
            **MOE,
            "num_hidden_layers": 4,
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_num_shared_experts": 0,
            "moe_layer_interval": 2,
            "tie_word_embeddings": False,
        },
    ),
    "hunyuan_moe": (
        "HunYuanMoEV1Config",
        "HunYuanMoEV1ForCausalLM",
        {
            "intermediate_size": 24,
            "num_experts": 8,
            "moe_topk": [2, 3, 1],
            "head_dim": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0},
        },
    ),
}


def build(variant: str, seed: int = 0, **overrides: Any) -> transformers.PreTrainedModel:
    """A float32 model of the variant with random weights: norms and biases too, so that no term hides."""
    config_class, model_class, differences = VARIANTS[variant]
    config = getattr(transformers, config_class)(**{**COMMON, **differences, **overrides})
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(config).eval().float()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.is_floating_point() or "inv_freq" in name:
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.dim() >= 2:
                tensor.copy_(noise * (1.5 / tensor.shape[-1] ** 0.5))
            else:
                tensor.copy_((1.0 if "norm" in name and "bias" not in name else 0.0) + 0.2 * noise)
    return model


def save(variant: str, folder: Path, seed: int = 0, **overrides: Any) -> transformers.PreTrainedModel:
    """Build and save; returns the model as the reference."""
    model = build(variant, seed, **overrides)
    model.save_pretrained(folder)
    return model
