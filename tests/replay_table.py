"""Tiny random models of the MoE families of transformers, one row each (first half of the table)."""

from __future__ import annotations

from replay_parts import DELTA, MLA, NOAUX, QWEN, Family
from replay_rules import EXPERTS, WIDTH, dbrx, deepseek_v2, deepseek_v4, llama4, noaux, sigmoid_bias, softmax

FAMILIES: dict[str, Family] = {
    "mixtral": Family(
        "MixtralForCausalLM",
        softmax(True),
        {"intermediate_size": 12, "num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        softmax(),
        {**QWEN, "norm_topk_prob": False, "num_hidden_layers": 4, "decoder_sparse_step": 2},
        layers=(1, 3),
    ),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", softmax(), QWEN),
    "qwen3_next": Family("Qwen3NextForCausalLM", softmax(), {**QWEN, **DELTA}, layers=(0, 1)),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeForCausalLM", softmax(True), {**QWEN, **DELTA}, "Qwen3_5MoeTextConfig", layers=(0, 1)
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        deepseek_v2,
        {**NOAUX, **MLA, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
        layers=(1, 2),
    ),
    "deepseek_v2_lite": Family(
        "DeepseekV2ForCausalLM",
        deepseek_v2,
        {**NOAUX, **MLA, "topk_method": "greedy", "q_lora_rank": None, "routed_scaling_factor": 1.0},
        layers=(1, 2),
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM", noaux, {**NOAUX, **MLA, "n_group": 4, "topk_group": 2}, layers=(1, 2)
    ),
    "deepseek_v32": Family(
        "DeepseekV32ForCausalLM",
        noaux,
        {**NOAUX, **MLA, "index_topk": 4, "index_head_dim": 8, "index_n_heads": 2},
        layers=(1, 2),
    ),
    "deepseek_v4": Family(
        "DeepseekV4ForCausalLM",
        deepseek_v4,
        {
            "num_hidden_layers": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "q_lora_rank": 12,
            "moe_intermediate_size": 12,
            "n_routed_experts": EXPERTS,
            "num_experts_per_tok": 3,
            "mlp_layer_types": ["hash_moe", "moe"],
            "layer_types": ["sliding_attention", "sliding_attention"],
            "partial_rotary_factor": 0.25,
            "o_groups": 2,
            "o_lora_rank": 8,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_topk": 2,
            "sliding_window": 4,
            "hc_mult": 2,
            "routed_scaling_factor": 1.5,
        },
        layers=(0, 1),
    ),
    "kimi_linear": Family(
        "KimiLinearForCausalLM",
        noaux,
        {
            **NOAUX,
            **MLA,
            "q_lora_rank": None,
            "num_local_experts": EXPERTS,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "max_position_embeddings": ...,
            "num_hidden_layers": 4,
        },
        layers=(1, 2, 3),
    ),
    "mimo_v2_flash": Family(
        "MiMoV2FlashForCausalLM",
        noaux,
        {**NOAUX, "head_dim": 12, "v_head_dim": 8, "sliding_window": 5, "num_key_value_heads": 1},
        layers=(1, 2),
    ),
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        noaux,
        {
            **NOAUX,
            "hybrid_override_pattern": "M*E-E",
            "num_hidden_layers": ...,
            "first_k_dense_replace": ...,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 8,
            "head_dim": 8,
            "expand": 2,
            "moe_shared_expert_intermediate_size": 20,
        },
        layers=(2, 4),
    ),
    "llama4": Family(
        "Llama4ForCausalLM",
        llama4,
        {
            "num_hidden_layers": 4,
            "intermediate_size": 12,
            "intermediate_size_mlp": 24,
            "head_dim": 8,
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 4,
        },
        "Llama4TextConfig",
        layers=(1, 3),
    ),
    "dbrx": Family(
        "DbrxForCausalLM",
        dbrx,
        {
            "d_model": WIDTH,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 1e4},
            "ffn_config": {
                "ffn_hidden_size": 12,
                "moe_num_experts": EXPERTS,
                "moe_top_k": 3,
                "moe_normalize_expert_weights": 1.0,
            },
        },
        layers=(0, 1),
    ),
    "afmoe": Family(
        "AfmoeForCausalLM",
        sigmoid_bias("route_scale"),
        {
            "intermediate_size": 24,
            "moe_intermediate_size": 12,
            "head_dim": 8,
            "num_experts": EXPERTS,
            "num_experts_per_tok": 3,
            "num_shared_experts": 1,
            "num_dense_layers": 1,
            "route_scale": 2.8,
            "sliding_window": 4,
        },
        layers=(1, 2),
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        sigmoid_bias(eps=0.0),
        {
            "intermediate_size": 12,
            "head_dim": 8,
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": 3,
            "rotary_dim": 4,
        },
    ),
}
