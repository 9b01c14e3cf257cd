"""GPT-OSS: router with a bias on its logits and top-k before softmax, clamped biased SwiGLU experts, sinks on all
heads, every second layer with a window. Experts are stacked, transposed, gate and up interleaved on the last axis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tracklayer.errors import CheckpointError
from tracklayer.kernels.topk import RouterSpec
from tracklayer.layers.spec import MoESpec
from tracklayer.models.common import ATTENTION, OUTER, Config, block, gqa, model, need, norm, num_experts, rope
from tracklayer.models.common import sliding_layers as sliding_of
from tracklayer.models.spec import Family, ModelSpec, Sublayer

LAYER = "model.layers.{i}"
ALPHA = 1.702


def spec(c: Config) -> ModelSpec:
    if c.get("swiglu_alpha", ALPHA) != ALPHA:
        raise CheckpointError(f"swiglu_alpha is {c['swiglu_alpha']}; only {ALPHA} is served")
    router = RouterSpec(
        num_experts=num_experts(c),
        top_k=need(c, "num_experts_per_tok", "experts_per_token"),
        after_topk=True,
        gate_bias=True,
        score_dtype="model",
        weights_dtype="model",
    )
    moe = MoESpec(
        router=router,
        width=need(c, "intermediate_size"),
        activation="swiglu_oai",
        bias=True,
        clamp_before=c.get("swiglu_limit", 7.0),
    )
    bias = c.get("attention_bias", True)
    turn = rope(c, need(c, "head_dim"), theta=150000.0)
    full = gqa(c, qkv_bias=bias, out_bias=bias, sinks=True, rope=turn)
    sliding = sliding_of(c, 2)

    def layer(i: int) -> tuple[Sublayer, ...]:
        return block(replace(full, window=c.get("sliding_window")) if sliding[i] else full, moe, norm(c))

    return model(c, layer)


def untangle(stacked: Any, shape: Any) -> Any:
    """[E, D, 2F] or [E, 2F], gate and up taking turns on the last axis -> [E, 2F, D] or [E, 2F], gate first."""
    halves = torch.cat([stacked[..., ::2], stacked[..., 1::2]], -1)
    return halves.transpose(1, 2) if halves.dim() == 3 else halves


FAMILY = Family(
    name="gpt_oss",
    architectures=("GptOssForCausalLM",),
    spec=spec,
    names={
        **OUTER,
        **ATTENTION,
        f"{LAYER}.self_attn.sinks": "layers.{i}.attn.sinks",
        f"{LAYER}.post_attention_layernorm.weight": "layers.{i}.ffn.norm.weight",
        f"{LAYER}.mlp.router.weight": "layers.{i}.ffn.router.weight",
        f"{LAYER}.mlp.router.bias": "layers.{i}.ffn.router.bias",
        f"{LAYER}.mlp.experts.gate_up_proj": "layers.{i}.ffn.experts.gate_up.weight",
        f"{LAYER}.mlp.experts.gate_up_proj_bias": "layers.{i}.ffn.experts.gate_up.bias",
        f"{LAYER}.mlp.experts.down_proj": "layers.{i}.ffn.experts.down.weight",
        f"{LAYER}.mlp.experts.down_proj_bias": "layers.{i}.ffn.experts.down.bias",
    },
    transforms={
        "layers.{i}.ffn.experts.gate_up.weight": untangle,
        "layers.{i}.ffn.experts.gate_up.bias": untangle,
        "layers.{i}.ffn.experts.down.weight": lambda stacked, shape: stacked.transpose(1, 2),
    },
)
