"""Model shapes to measure without a checkpoint: a config.json each, filled with dummy weights.

Parameters and bytes are derived from the ModelSpec, so a floor needs no table of its own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracklayer.errors import UserError
from tracklayer.layers.spec import AttentionSpec, MLPSpec, MoESpec
from tracklayer.models.spec import ModelSpec

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
    """Parameters by use: read by every step, one expert's, and how many experts there are and are chosen, per layer."""

    always: int
    expert: int
    num_experts: int
    top_k: int
    moe_layers: int
    kv_per_token: int

    def bytes_per_step(self, batch: int, context_tokens: int, itemsize: int = 2) -> float:
        """Bytes that one decode step of `batch` sequences must read: weights once, expected distinct experts, KV."""
        missed = (1 - self.top_k / self.num_experts) ** batch if self.num_experts else 1.0
        experts = self.moe_layers * self.num_experts * (1 - missed) * self.expert
        return itemsize * (self.always + experts + self.kv_per_token * batch * context_tokens)


def footprint(spec: ModelSpec) -> Footprint | None:
    """Count a ModelSpec's parameters by how often a step reads them (embeddings are a look-up, not counted).

    None for a model with a mixer that this does not count: latent attention, recurrent state.
    """
    hidden = spec.hidden_size
    always, kv = spec.vocab_size * hidden, 0
    expert = num_experts = top_k = 0
    for sub in (s for layer in spec.layers for s in layer):
        match sub.body:
            case AttentionSpec() as a:
                width = a.num_heads * (a.head_dim + a.value_dim) + a.num_kv_heads * (a.head_dim + a.value_dim)
                always += hidden * width
                kv += a.num_kv_heads * (a.head_dim + a.value_dim)
            case MLPSpec() as m:
                always += _mlp(m, hidden)
            case MoESpec() as m:
                always += hidden * m.router.num_logits + (_mlp(m.shared, hidden) if m.shared else 0)
                expert = (3 if m.gated else 2) * hidden * m.width
                num_experts, top_k = m.router.num_experts, m.router.top_k
            case _:
                return None
    return Footprint(always, expert, num_experts, top_k, len(spec.moe_layers), kv)


def _mlp(spec: MLPSpec, hidden: int) -> int:
    return (3 if spec.gated else 2) * hidden * spec.width
