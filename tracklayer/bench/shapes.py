"""Model shapes to measure without a checkpoint: a config.json each, filled with dummy weights.

Parameters and bytes are derived from the ModelSpec, so a floor needs no table of its own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracklayer.errors import UserError
from tracklayer.layers.spec import AttentionSpec, MLASpec, MLPSpec, MoESpec
from tracklayer.models.spec import ModelSpec

GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 150000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": 200002,
}

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "eos_token_id": 151645,
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "eos_token_id": 2,
    },
    # The published widths; of 58 MoE layers the five that fit one GPU of 139 GiB in bfloat16, after the 3 dense ones.
    "deepseek-v3-8-layers": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "num_hidden_layers": 8,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "max_position_embeddings": 40960,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "eos_token_id": 1,
    },
    "gpt-oss-20b": {**GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    # Half of the 36 layers: they fit one GPU of 139 GiB in bfloat16.
    "gpt-oss-120b-18-layers": {**GPT_OSS, "num_hidden_layers": 18, "num_local_experts": 128},
    "tiny": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 1024,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "max_position_embeddings": 8192,
        "eos_token_id": 0,
    },
}


def write_shape(name: str, folder: Path) -> Path:
    """Write the shape's config.json into `folder` and return it. Raises UserError for an unknown shape."""
    if name not in SHAPES:
        raise UserError(f"shape {name!r} is not known; known are {', '.join(SHAPES)}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name]))
    return folder


@dataclass(frozen=True, slots=True)
class Footprint:
    """Parameters by use: read by every step, one expert's, and how many experts there are and are chosen, per layer.

    kv: of each attention layer, values kept of a token and the window (None: all positions are read).
    """

    always: int
    expert: int
    num_experts: int
    top_k: int
    moe_layers: int
    kv: tuple[tuple[int, int | None], ...]

    def bytes_per_step(
        self, batch: int, context_tokens: int, itemsize: int = 2, *, experts_hit: float | None = None
    ) -> float:
        """Bytes that one decode step of `batch` sequences must read: weights once, distinct experts, KV.

        experts_hit: distinct experts of a layer, where they were counted; else as many as a random choice expects.
        """
        if experts_hit is None:
            missed = (1 - self.top_k / self.num_experts) ** batch if self.num_experts else 1.0
            experts_hit = self.num_experts * (1 - missed)
        experts = self.moe_layers * experts_hit * self.expert
        cached = sum(width * min(context_tokens, window or context_tokens) for width, window in self.kv)
        return itemsize * (self.always + experts + cached * batch)


def footprint(spec: ModelSpec) -> Footprint | None:
    """Count a ModelSpec's parameters by how often a step reads them (embeddings are a look-up, not counted).

    None for a model with a mixer that this does not count: recurrent state, compressed or chosen positions.
    """
    hidden = spec.hidden_size
    always = spec.vocab_size * hidden
    kv: list[tuple[int, int | None]] = []
    expert = num_experts = top_k = 0
    for sub in (s for layer in spec.layers for s in layer):
        match sub.body:
            case AttentionSpec() as a:
                width = a.num_heads * (a.head_dim + a.value_dim) + a.num_kv_heads * (a.head_dim + a.value_dim)
                always += hidden * width
                kv.append((a.num_kv_heads * (a.head_dim + a.value_dim), a.window))
            case MLASpec(indexer=None) as a:
                queries = a.num_heads * (a.nope_dim + a.rope_dim)
                rank = a.q_lora_rank
                always += (hidden + queries) * rank if rank else hidden * queries
                always += hidden * a.key_dim + a.kv_lora_rank * a.num_heads * (a.nope_dim + a.v_head_dim)
                always += a.num_heads * a.v_head_dim * hidden
                kv.append((a.key_dim, None))
            case MLPSpec() as m:
                always += _mlp(m, hidden)
            case MoESpec() as m:
                always += hidden * m.router.num_logits + (_mlp(m.shared, hidden) if m.shared else 0)
                expert = (3 if m.gated else 2) * hidden * m.width
                num_experts, top_k = m.router.num_experts, m.router.top_k
            case _:
                return None
    return Footprint(always, expert, num_experts, top_k, len(spec.moe_layers), tuple(kv))


def _mlp(spec: MLPSpec, hidden: int) -> int:
    return (3 if spec.gated else 2) * hidden * spec.width
