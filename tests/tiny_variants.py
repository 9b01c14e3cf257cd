"""The rows of tiny.py: one tiny configuration per family variant."""

from __future__ import annotations

from typing import Any

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
PHIMOE: dict[str, Any] = {
    "intermediate_size": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "router_jitter_noise": 0.15,
    "attention_bias": True,
    "lm_head_bias": True,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.3, 2.0, 5.0],
        "long_factor": [2.0, 3.0, 4.0, 9.0],
        "short_mscale": 1.2,
        "long_mscale": 0.8,
        "original_max_position_embeddings": 512,
    },
}


def dbrx(order: float | None) -> dict[str, Any]:
    return {
        **dict.fromkeys(COMMON, ...),
        "vocab_size": 97,
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": 512,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 5e5},
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},  # transformers does not read attn_config's
        "ffn_config": {
            "ffn_hidden_size": 16,
            "moe_num_experts": 8,
            "moe_top_k": 3,
            "moe_normalize_expert_weights": order,
        },
        "attn_implementation": "eager",
    }


# name -> (config class, model class, what differs from COMMON)
VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {"intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "mixtral_window": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {"intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 7},
    ),
    "qwen2_moe_window": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {
            **MOE,
            "shared_expert_intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
        },
    ),
    "qwen3_moe_window": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**MOE, "num_experts": 8, "num_experts_per_tok": 3, "use_sliding_window": True, "sliding_window": 7},
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
    "bailing_moe_v2": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {
            **MOE,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
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
            "sliding_window": 7,
            "max_window_layers": 2,
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
    "phimoe": ("PhimoeConfig", "PhimoeForCausalLM", PHIMOE),
    "phimoe_long": (
        "PhimoeConfig",
        "PhimoeForCausalLM",
        {
            **PHIMOE,
            "attention_bias": False,
            "lm_head_bias": False,
            # transformers has the short factors at every length, so both are equal here; the magnitudes differ
            "rope_parameters": {
                **PHIMOE["rope_parameters"],
                "original_max_position_embeddings": 4,
                "long_factor": PHIMOE["rope_parameters"]["short_factor"],
            },
        },
    ),
    "dbrx": ("DbrxConfig", "DbrxForCausalLM", dbrx(1.0)),
    "dbrx_p2": ("DbrxConfig", "DbrxForCausalLM", dbrx(2.0)),
    "dbrx_unnormed": ("DbrxConfig", "DbrxForCausalLM", dbrx(None)),
}
