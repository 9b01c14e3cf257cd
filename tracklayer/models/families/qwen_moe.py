"""Qwen2-MoE, Qwen3-MoE: softmax router, renormalised by `norm_topk_prob`; dense layers by list and stride.

Qwen2-MoE adds a shared expert times sigmoid(shared_expert_gate(x)) and q, k, v biases; Qwen3-MoE per-head q/k norms.
Router weights are cast back to the model's dtype (transformers does, and trainers with it).
"""

from __future__ import annotations

from dataclasses import replace

from tracklayer.kernels.topk import RouterSpec
from tracklayer.layers.spec import AttentionSpec, MLPSpec, MoESpec
from tracklayer.models.common import (
    ATTENTION,
    OUTER,
    Config,
    activation,
    block,
    dense,
    gqa,
    mlp_names,
    model,
    moe_names,
    need,
    norm,
    num_experts,
)
from tracklayer.models.spec import Family, ModelSpec, Sublayer

DENSE = mlp_names("model.layers.{i}.mlp", "layers.{i}.ffn")
MOE = {
    **OUTER,
    **ATTENTION,
    **moe_names("mlp", "gate.weight"),
    **DENSE,
    **mlp_names("model.layers.{i}.mlp.shared_expert", "layers.{i}.ffn.shared"),
    "model.layers.{i}.mlp.shared_expert_gate.weight": "layers.{i}.ffn.shared_gate.weight",
}


def moe_spec(c: Config, attention: list[AttentionSpec], shared: MLPSpec | None) -> ModelSpec:
    router = RouterSpec(
        num_experts=num_experts(c),
        top_k=need(c, "num_experts_per_tok"),
        renormalize=c.get("norm_topk_prob", False),
        weights_dtype="model",
    )
    moe = MoESpec(
        router=router,
        width=need(c, "moe_intermediate_size"),
        activation=activation(c),
        shared=shared,
        shared_gate=shared is not None,
    )

    def layer(i: int) -> tuple[Sublayer, ...]:
        sparse = i not in (c.get("mlp_only_layers") or ()) and (i + 1) % c.get("decoder_sparse_step", 1) == 0
        ffn = moe if sparse else dense(c)
        return block(attention[i], ffn, norm(c))

    return model(c, layer)


def qwen2(c: Config) -> ModelSpec:
    full = gqa(c, qkv_bias=c.get("qkv_bias", True))
    slides = [False] * need(c, "num_hidden_layers")
    if c.get("use_sliding_window"):
        until = c.get("max_window_layers", 28)
        slides = [kind == "sliding_attention" for kind in c.get("layer_types") or ()]
        slides = slides or [i % 2 == 0 and i < until for i in range(need(c, "num_hidden_layers"))]
    shared = MLPSpec(width=need(c, "shared_expert_intermediate_size"), activation=activation(c))
    return moe_spec(c, [replace(full, window=c["sliding_window"]) if slide else full for slide in slides], shared)


def qwen3(c: Config) -> ModelSpec:
    bias = c.get("attention_bias", False)
    window = c.get("sliding_window") if c.get("use_sliding_window") else None
    attention = gqa(c, qk_norm="head", qkv_bias=bias, out_bias=bias, window=window)
    return moe_spec(c, [attention] * need(c, "num_hidden_layers"), None)


RULE = "i not in mlp_only_layers and (i + 1) % decoder_sparse_step == 0"

FAMILIES = (
    Family(name="qwen2_moe", architectures=("Qwen2MoeForCausalLM",), spec=qwen2, names=MOE, layers_rule=RULE),
    Family(name="qwen3_moe", architectures=("Qwen3MoeForCausalLM",), spec=qwen3, names=MOE, layers_rule=RULE),
)
