"""More rows of tiny.py: families whose layers differ in their attention (windows, chunks, sinks, gates, positions)."""

from __future__ import annotations

from typing import Any

from tiny_variants import MOE

LLAMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "intermediate_size": 16,
    "intermediate_size_mlp": 40,
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 6,
    "floor_scale": 8,
}
COHERE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "intermediate_size": 16,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "prefix_dense_intermediate_size": 40,
    "sliding_window": 7,
    "logit_scale": 0.7,
    "sliding_window_pattern": 2,
}
GEMMA4: dict[str, Any] = {
    **MOE,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_experts": 8,
    "top_k_experts": 3,
    "enable_moe_block": True,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 7,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "final_logit_softcapping": 5.0,
    "pad_token_id": 0,
}

WINDOWED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "exaone_moe": (
        "ExaoneMoeConfig",
        "ExaoneMoeForCausalLM",
        {
            **MOE,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 1,
            "sliding_window": 7,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "afmoe": (
        "AfmoeConfig",
        "AfmoeForCausalLM",
        {
            **MOE,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "num_dense_layers": 2,
            "route_scale": 2.826,
            "sliding_window": 7,
            "mup_enabled": True,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "intermediate_size": 16,
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "sliding_window": 7,
            "swiglu_limit": 0.5,
        },
    ),
    "mimo_v2": (
        "MiMoV2FlashConfig",
        "MiMoV2FlashForCausalLM",
        {
            **MOE,
            "num_hidden_layers": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "head_dim": 24,
            "v_head_dim": 16,
            "sliding_window": 7,
            "attention_bias": True,
        },
    ),
    "step3p5": (
        "Step3p7TextConfig",
        "Step3p7TextModel",
        {
            **MOE,
            "num_hidden_layers": 4,
            "share_expert_dim": 24,
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_layers_enum": "1,2,3",
            "moe_router_scaling_factor": 3.0,
            "sliding_window": 7,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "rope_theta": [5e6, 1e4, 1e4, 5e6],
            "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
            "attention_other_setting": {"num_attention_heads": 6},
            "swiglu_limits": [0, 0, 0.3, 0],
            "swiglu_limits_shared": [0.4, 0, 0.3, 0],
            "pad_token_id": 0,
        },
    ),
    "llama4": ("Llama4TextConfig", "Llama4ForCausalLM", LLAMA4),
    "llama4_all": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            **LLAMA4,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 1,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_bias": True,
        },
    ),
    "cohere2_moe": ("Cohere2MoeConfig", "Cohere2MoeForCausalLM", COHERE),
    "cohere2_moe_sigmoid": (
        "Cohere2MoeConfig",
        "Cohere2MoeForCausalLM",
        {
            **COHERE,
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False,
            "shared_expert_combination_strategy": "sum",
            "num_shared_experts": 2,
            "rms_norm_eps": 1e-5,
            "prefix_dense_sliding_window_pattern": 2,
        },
    ),
    "cohere2_moe_plain": (
        "Cohere2MoeConfig",
        "Cohere2MoeForCausalLM",
        {**COHERE, "expert_selection_fn": "sigmoid", "num_shared_experts": 0, "first_k_dense_replace": 0},
    ),
    "gemma4_moe": ("Gemma4TextConfig", "Gemma4ForCausalLM", GEMMA4),
    "gemma4_moe_own_values": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {**GEMMA4, "attention_k_eq_v": False, "final_logit_softcapping": None, "tie_word_embeddings": False},
    ),
}
