"""Tiny random models of every MoE family of transformers, and each router's weight rule written out plainly.

A rule gives the weights of *given* ids, from the router's input alone: what replay must equal, computed another way.
N tokens, D width, E = 8 experts, K chosen.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

VOCAB, WIDTH, EXPERTS = 61, 32, 8
Rule = Callable[[nn.Module, Tensor, Tensor, Any, tuple[Any, ...]], Tensor]


def _over_sum(w_NK: Tensor, eps: float = 0.0) -> Tensor:
    return w_NK / (w_NK.sum(1, keepdim=True) + eps)


def _logits(router: nn.Module, x_ND: Tensor) -> Tensor:
    return x_ND @ router.weight.T


def softmax(normed: bool | None = None) -> Rule:
    def rule(router: nn.Module, x_ND: Tensor, ids_NK: Tensor, config: Any, extra: tuple[Any, ...]) -> Tensor:
        w_NK = torch.exp(F.log_softmax(_logits(router, x_ND), 1)).gather(1, ids_NK)
        return _over_sum(w_NK) if (config.norm_topk_prob if normed is None else normed) else w_NK

    return rule


def sigmoid_bias(scale: str | None = None, eps: float = 1e-20) -> Rule:
    """The bias chooses only: it is not in the weights."""

    def rule(router: nn.Module, x_ND: Tensor, ids_NK: Tensor, config: Any, extra: tuple[Any, ...]) -> Tensor:
        logits_NE = router.gate(x_ND) if hasattr(router, "gate") else _logits(router, x_ND)
        w_NK = _over_sum(1 / (1 + torch.exp(-logits_NE.gather(1, ids_NK))), eps)
        return w_NK * (1.0 if scale is None else getattr(config, scale))

    return rule


def softmax_after(router: nn.Module, x_ND: Tensor, ids_NK: Tensor, config: Any, extra: tuple[Any, ...]) -> Tensor:
    logits_NE = _logits(router, x_ND)
    if getattr(router, "bias", None) is not None:
        logits_NE = logits_NE + router.bias
    return torch.softmax(logits_NE.gather(1, ids_NK), 1)


def deepseek_v2(router: nn.Module, x_ND: Tensor, ids_NK: Tensor, config: Any, extra: tuple[Any, ...]) -> Tensor:
    return torch.softmax(_logits(router, x_ND), 1).gather(1, ids_NK) * config.routed_scaling_factor


def deepseek_v4(router: nn.Module, x_ND: Tensor, ids_NK: Tensor, config: Any, extra: tuple[Any, ...]) -> Tensor:
    score_NK = torch.log1p(torch.exp(_logits(router, x_ND))).sqrt().gather(1, ids_NK)
    return _over_sum(score_NK, 1e-20) * config.routed_scaling_factor


def llama4(router: nn.Module, x_ND: Tensor, ids_NK: Tensor, config: Any, extra: tuple[Any, ...]) -> Tensor:
    return torch.sigmoid(_logits(router, x_ND).gather(1, ids_NK))


def dbrx(router: nn.Module, x_ND: Tensor, ids_NK: Tensor, config: Any, extra: tuple[Any, ...]) -> Tensor:
    w_NK = torch.softmax(router.layer(x_ND), 1).gather(1, ids_NK)
    return _over_sum(w_NK)


def sparsemixer(router: nn.Module, x_ND: Tensor, ids_NK: Tensor, config: Any, extra: tuple[Any, ...]) -> Tensor:
    z_NE = _logits(router, x_ND)
    columns = []
    dropped_NE = torch.zeros_like(z_NE, dtype=torch.bool)
    for k in range(2):
        id_N1 = ids_NK[:, k : k + 1]
        best_N1 = z_NE.gather(1, id_N1)
        far_NE = (best_N1 - z_NE) / torch.maximum(z_NE.abs(), best_N1) > 2 * config.router_jitter_noise
        p_NE = torch.softmax(z_NE.masked_fill(far_NE.detach() | dropped_NE, float("-inf")), 1)
        columns.append(p_NE.gather(1, id_N1))
        dropped_NE = dropped_NE.scatter(1, id_N1, True)
    return torch.cat(columns, 1)


def ernie(router: nn.Module, x_ND: Tensor, ids_NK: Tensor, config: Any, extra: tuple[Any, ...]) -> Tensor:
    w_NK = torch.softmax(_logits(router, x_ND), 1).gather(1, ids_NK)
    return w_NK / w_NK.sum(1, keepdim=True).clamp(min=config.moe_norm_min)


def hunyuan(router: nn.Module, x_ND: Tensor, ids_NK: Tensor, config: Any, extra: tuple[Any, ...]) -> Tensor:
    return _over_sum(torch.softmax(router.wg(x_ND), 1).gather(1, ids_NK))


def longcat(router: nn.Module, x_ND: Tensor, ids_NK: Tensor, config: Any, extra: tuple[Any, ...]) -> Tensor:
    return torch.softmax(router.classifier(x_ND), 1).gather(1, ids_NK) * config.routed_scaling_factor


def lfm2(router: nn.Module, x_ND: Tensor, ids_NK: Tensor, config: Any, extra: tuple[Any, ...]) -> Tensor:
    return _over_sum(torch.sigmoid(_logits(router, x_ND)).gather(1, ids_NK), 1e-6) * config.routed_scaling_factor


def gemma4(router: nn.Module, x_ND: Tensor, ids_NK: Tensor, config: Any, extra: tuple[Any, ...]) -> Tensor:
    rms_ND = x_ND * torch.rsqrt(x_ND.pow(2).mean(1, keepdim=True) + config.rms_norm_eps)
    logits_NE = router.proj(rms_ND * router.scale * WIDTH**-0.5)
    return _over_sum(torch.softmax(logits_NE, 1).gather(1, ids_NK)) * router.per_expert_scale[ids_NK]


def cohere2(router: nn.Module, x_ND: Tensor, ids_NK: Tensor, config: Any, extra: tuple[Any, ...]) -> Tensor:
    if config.expert_selection_fn == "softmax":
        return torch.softmax(_logits(router, x_ND).gather(1, ids_NK), 1)
    w_NK = torch.sigmoid(_logits(router, x_ND).gather(1, ids_NK))
    return _over_sum(w_NK) if config.norm_topk_prob else w_NK


@dataclass(frozen=True)
class Family:
    """model class, rule, config differences; config_class where the model's own default is a wrapper's."""

    model: str
    rule: Rule
    config: dict[str, Any] = field(default_factory=dict)
    config_class: str | None = None
    layers: tuple[int, ...] = (0, 1, 2)


MLA = {
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
NOAUX = {
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}
GRANITE = {"intermediate_size": 12, "num_local_experts": EXPERTS, "num_experts_per_tok": 3, "attention_multiplier": 0.1}
QWEN = {
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "head_dim": 8,
}
DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
noaux = sigmoid_bias("routed_scaling_factor")

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
    "granitemoe": Family("GraniteMoeForCausalLM", softmax_after, GRANITE),
    "granitemoeshared": Family(
        "GraniteMoeSharedForCausalLM", softmax_after, {**GRANITE, "shared_intermediate_size": 20}
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        softmax_after,
        {
            **GRANITE,
            "shared_intermediate_size": 20,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
        },
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        softmax(),
        {"intermediate_size": 12, "num_experts": EXPERTS, "num_experts_per_tok": 3, "norm_topk_prob": False},
    ),
    "phimoe": Family(
        "PhimoeForCausalLM",
        sparsemixer,
        {"intermediate_size": 12, "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "router_jitter_noise": 0.15},
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        softmax_after,
        {
            "intermediate_size": 12,
            "head_dim": 8,
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": 3,
            "sliding_window": 4,
        },
    ),
    "glm4_moe": Family("Glm4MoeForCausalLM", noaux, {**NOAUX, "head_dim": 8, "use_qk_norm": True}, layers=(1, 2)),
    "glm4_moe_lite": Family("Glm4MoeLiteForCausalLM", noaux, {**NOAUX, **MLA}, layers=(1, 2)),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeForCausalLM",
        ernie,
        {
            "intermediate_size": 24,
            "moe_intermediate_size": 12,
            "moe_num_experts": EXPERTS,
            "moe_k": 3,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
        },
        layers=(1, 2),
    ),
    "hunyuan_v1_moe": Family(
        "HunYuanMoEV1ForCausalLM",
        hunyuan,
        {"intermediate_size": 12, "head_dim": 8, "num_experts": EXPERTS, "moe_topk": 3},
    ),
    "longcat_flash": Family(
        "LongcatFlashForCausalLM",
        longcat,
        {
            **MLA,
            "num_layers": 2,
            "num_hidden_layers": ...,
            "ffn_hidden_size": 24,
            "expert_ffn_hidden_size": 12,
            "n_routed_experts": EXPERTS,
            "zero_expert_num": 4,
            "moe_topk": 4,
            "routed_scaling_factor": 2.0,
            "head_dim": 4,
        },
        layers=(0, 1),
    ),
    "bailing_hybrid": Family(
        "BailingHybridForCausalLM",
        noaux,
        {
            **NOAUX,
            **MLA,
            "n_routed_experts": ...,
            "num_experts": EXPERTS,
            "n_group": 4,
            "topk_group": 2,
            "layer_group_size": 2,
            "head_dim": 8,
            "num_hidden_layers": 3,
        },
        layers=(1, 2),
    ),
    "dots1": Family("Dots1ForCausalLM", noaux, {**NOAUX, "head_dim": 8, "num_key_value_heads": 4}, layers=(1, 2)),
    "jamba": Family(
        "JambaForCausalLM",
        softmax(False),
        {
            "intermediate_size": 12,
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 4,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
        layers=(1, 3),
    ),
    "step3p7": Family(
        "Step3p7TextModel",
        sigmoid_bias(eps=0.0),
        {
            "intermediate_size": 24,
            "moe_intermediate_size": 12,
            "share_expert_dim": 20,
            "head_dim": 8,
            "n_routed_experts": EXPERTS,
            "num_experts_per_tok": 3,
            "moe_layers_enum": "1,2",
            "moe_router_scaling_factor": 3.0,
            "sliding_window": 4,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "attention_other_setting": {"num_attention_heads": 4},
            "pad_token_id": 0,
            "swiglu_limits": [0, 0, 0.3],
            "swiglu_limits_shared": [0, 0, 0.3],
        },
        "Step3p7TextConfig",
        layers=(1, 2),
    ),
    "lfm2_moe": Family(
        "Lfm2MoeForCausalLM",
        lfm2,
        {
            "intermediate_size": 24,
            "moe_intermediate_size": 12,
            "num_experts": EXPERTS,
            "num_experts_per_tok": 3,
            "num_dense_layers": 1,
            "norm_topk_prob": True,
            "use_expert_bias": True,
            "layer_types": ["conv", "full_attention", "conv"],
        },
        layers=(1, 2),
    ),
    "gemma4": Family(
        "Gemma4ForCausalLM",
        gemma4,
        {
            "intermediate_size": 24,
            "moe_intermediate_size": 12,
            "head_dim": 8,
            "global_head_dim": 8,
            "num_experts": EXPERTS,
            "top_k_experts": 3,
            "enable_moe_block": True,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window": 4,
            "hidden_size_per_layer_input": 0,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "pad_token_id": 0,
        },
        "Gemma4TextConfig",
    ),
    "exaone_moe": Family(
        "ExaoneMoeForCausalLM",
        noaux,
        {
            **NOAUX,
            "n_routed_experts": ...,
            "num_experts": EXPERTS,
            "n_shared_experts": ...,
            "num_shared_experts": 1,
            "head_dim": 8,
            "sliding_window": 4,
        },
        layers=(1, 2),
    ),
    "cohere2_moe": Family(
        "Cohere2MoeForCausalLM",
        cohere2,
        {
            "intermediate_size": 12,
            "head_dim": 8,
            "num_experts": EXPERTS,
            "num_experts_per_tok": 3,
            "num_shared_experts": 1,
            "expert_selection_fn": "softmax",
            "shared_expert_combination_strategy": "average",
            "first_k_dense_replace": 1,
            "prefix_dense_intermediate_size": 24,
            "sliding_window": 4,
        },
        layers=(1, 2),
    ),
}
FAMILIES["cohere2_moe_sigmoid"] = Family(
    "Cohere2MoeForCausalLM",
    cohere2,
    {**FAMILIES["cohere2_moe"].config, "expert_selection_fn": "sigmoid", "norm_topk_prob": True},
    layers=(1, 2),
)


def build(name: str, experts: str = "eager") -> nn.Module:
    """The family's tiny model in float32, in eval mode, with every weight and bias random and not zero."""
    family = FAMILIES[name]
    model_class = getattr(transformers, family.model)
    config_class = getattr(transformers, family.config_class) if family.config_class else model_class.config_class
    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": False,
    }
    if name == "dbrx":  # the class names every size its own way
        common = {"vocab_size": VOCAB, "use_cache": False}
    keys = {**common, **family.config, "attn_implementation": "eager", "experts_implementation": experts}
    model = model_class(config_class(**{k: v for k, v in keys.items() if v is not ...})).eval().float()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            leaf = key.rsplit(".", 1)[-1]
            if leaf == "tid2eid":
                rows = [torch.randperm(EXPERTS, generator=generator)[: tensor.shape[1]] for _ in range(len(tensor))]
                tensor.copy_(torch.stack(rows))
            elif not tensor.is_floating_point() or "inv_freq" in key or "norm" in key.lower() or leaf == "layer_scalar":
                continue
            elif "scale" in leaf:
                tensor.copy_(1 + 0.3 * torch.randn(tensor.shape, generator=generator))
            elif re.search(r"(router|gate|classifier|wg|layer|proj)\.weight$", key) and tensor.shape[0] in (8, 12):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.5)
            elif "bias" in leaf or tensor.dim() < 2:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
            else:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * (1.0 if "embed" in key else 0.15))
    return model
