"""Parts that the tiny models' configurations have in common, and what a family's row is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from replay_rules import EXPERTS, Rule


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
