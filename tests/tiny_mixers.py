"""The rows of tiny.py whose mixers are not ordinary attention: latent attention and recurrent state."""

from __future__ import annotations

from typing import Any

MOE: dict[str, Any] = {"intermediate_size": 40, "moe_intermediate_size": 16}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
DEEPSEEK: dict[str, Any] = {
    **MOE,
    **LATENT,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
V4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "q_lora_rank": 24,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "partial_rotary_factor": 0.5,
    "sliding_window": 10,
    "o_groups": 2,
    "o_lora_rank": 12,
    "index_n_heads": 12,
    "index_head_dim": 14,
    "index_topk": 5,
    "hc_mult": 3,
    "swiglu_limit": 0.7,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.5,
}

# A head's output may be nearly 0, and the norm after it then makes much of rounding; a larger eps keeps that small.
CALM = {"rms_norm_eps": 1e-2}
QWEN: dict[str, Any] = {
    **MOE,
    **CALM,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "shared_expert_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}

KDA: dict[str, Any] = {
    **DEEPSEEK,
    **CALM,
    "num_hidden_layers": 4,
    "q_lora_rank": None,
    "n_group": 4,
    "topk_group": 2,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}

NEMOTRON: dict[str, Any] = {
    "num_hidden_layers": ...,
    "hybrid_override_pattern": "MEM*-ME",
    "head_dim": 16,
    "intermediate_size": 40,
    "ssm_state_size": 12,
    "mamba_num_heads": 4,
    "mamba_head_dim": 10,
    "n_groups": 2,
    "layer_norm_epsilon": 1e-3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 24,
    "routed_scaling_factor": 2.5,
    "pad_token_id": 0,
}
GRANITE_HYBRID: dict[str, Any] = {
    **CALM,
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "intermediate_size": 16,
    "shared_intermediate_size": 24,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "embedding_multiplier": 3.0,
    "logits_scaling": 0.5,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.2,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
}
JAMBA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "attn_layer_period": 4,
    "attn_layer_offset": 2,
    "mamba_d_state": 6,
}
LFM2: dict[str, Any] = {
    **MOE,
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_dense_layers": 1,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "pad_token_id": 0,
}

# name -> (config class, model class, what differs from tiny_variants.COMMON)
MIXERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek_v2": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {**DEEPSEEK, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "rope_parameters": YARN},
    ),
    "deepseek_v2_lite": ("DeepseekV2Config", "DeepseekV2ForCausalLM", {**DEEPSEEK, "q_lora_rank": None}),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**DEEPSEEK, "n_group": 4, "topk_group": 2, "rope_parameters": YARN, "attention_bias": True},
    ),
    "deepseek_v32": (
        "DeepseekV32Config",
        "DeepseekV32ForCausalLM",
        {
            **DEEPSEEK,
            "n_group": 4,
            "topk_group": 2,
            "index_n_heads": 12,
            "index_head_dim": 14,
            "index_topk": 9,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "deepseek_v4": (
        "DeepseekV4Config",
        "DeepseekV4ForCausalLM",
        {
            **V4,
            "layer_types": [
                "sliding_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
                "compressed_sparse_attention",
            ],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 7},
            "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"],
            "rope_parameters": {key: YARN[key] for key in YARN if "mscale" not in key and key != "rope_theta"},
        },
    ),
    "deepseek_v4_published": (
        "DeepseekV4Config",
        "DeepseekV4ForCausalLM",
        {
            **{key: value for key, value in V4.items() if key != "partial_rotary_factor"},
            "num_hidden_layers": 5,
            "qk_rope_head_dim": 8,
            "compress_ratios": [0, 4, 128, 0, 4, 0],  # the last is of an MTP layer
            "compress_rate_csa": 3,
            "compress_rate_hca": 8,
            "num_hash_layers": 2,
            "compress_rope_theta": 900.0,
            "rope_theta": 300.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
        },
    ),
    "kimi_k2": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**DEEPSEEK, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "rope_interleave": False},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        "Glm4MoeLiteForCausalLM",
        {**{k: v for k, v in DEEPSEEK.items() if k != "first_k_dense_replace"}, "rms_norm_eps": 1e-5},
    ),
    "longcat_flash": (
        "LongcatFlashConfig",
        "LongcatFlashForCausalLM",
        {
            **LATENT,
            "num_layers": 2,
            "num_hidden_layers": 4,
            "head_dim": 8,
            "ffn_hidden_size": 40,
            "expert_ffn_hidden_size": 16,
            "n_routed_experts": 6,
            "zero_expert_num": 4,
            "moe_topk": 3,
        },
    ),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**QWEN, "mlp_only_layers": [1]}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", QWEN),
    "kimi_linear": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {**KDA, "linear_head_dim": 12, "linear_num_heads": 3, "linear_conv_kernel_dim": 4},
    ),
    "bailing_hybrid": ("BailingHybridConfig", "BailingHybridForCausalLM", {**KDA, "head_dim": 12}),
    "bailing_hybrid_soft": (
        "BailingHybridConfig",
        "BailingHybridForCausalLM",
        {**KDA, "head_dim": 12, "q_lora_rank": 24, "kda_safe_gate": False, "short_conv_kernel_size": 3},
    ),
    "nemotron_h": ("NemotronHConfig", "NemotronHForCausalLM", NEMOTRON),
    "nemotron_h_latent": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {**NEMOTRON, "moe_latent_size": 20, "n_group": 4, "topk_group": 2, "use_conv_bias": False, "use_bias": True},
    ),
    "granite_moe_hybrid": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", GRANITE_HYBRID),
    "granite_moe_hybrid_rope": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            **GRANITE_HYBRID,
            "position_embedding_type": "rope",
            "mamba_n_groups": 2,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
        },
    ),
    "jamba": ("JambaConfig", "JambaForCausalLM", JAMBA),
    "jamba_biased": (
        "JambaConfig",
        "JambaForCausalLM",
        {**JAMBA, "mamba_proj_bias": True, "mamba_conv_bias": False, "expert_layer_period": 3, "mamba_dt_rank": 5},
    ),
    "lfm2_moe": ("Lfm2MoeConfig", "Lfm2MoeForCausalLM", LFM2),
    "lfm2_moe_biased": (
        "Lfm2MoeConfig",
        "Lfm2MoeForCausalLM",
        {
            **LFM2,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "conv_bias": True,
            "conv_L_cache": 4,
            "routed_scaling_factor": 1.7,
            "tie_word_embeddings": False,
        },
    ),
}
