"""ERNIE-4.5-MoE: float32 softmax router whose bias (moe_statics) is for the choice only, weights divided by at least
`moe_norm_min`; MoE layers by start, end and interval; rotary embedding of interleaved pairs."""

from __future__ import annotations

from dataclasses import replace

from tracklayer.kernels.topk import RouterSpec
from tracklayer.layers.spec import MoESpec
from tracklayer.models.common import (
    PER_EXPERT,
    Config,
    activation,
    block,
    dense,
    gqa,
    model,
    need,
    norm,
    num_experts,
    rope,
    shared_mlp,
)
from tracklayer.models.spec import Family, ModelSpec, Sublayer


def spec(c: Config) -> ModelSpec:
    bias = c.get("use_bias", False)
    router = RouterSpec(
        num_experts=num_experts(c),
        top_k=need(c, "moe_k", "num_experts_per_tok"),
        choice_bias=True,
        renormalize=True,
        renorm_min=c.get("moe_norm_min", 1e-12),
        gate_dtype="float32",
    )
    width = need(c, "moe_intermediate_size")
    shared = shared_mlp(c, c.get("moe_num_shared_experts"), width)
    moe = MoESpec(router=router, width=width, activation=activation(c), shared=shared and replace(shared, bias=bias))
    head_dim = c.get("head_dim") or need(c, "hidden_size") // need(c, "num_attention_heads")
    attention = gqa(c, qkv_bias=bias, out_bias=bias, rope=rope(c, head_dim, interleaved=True, theta=500000.0))
    every, start = c.get("moe_layer_interval", 1), c.get("moe_layer_start_index", 1)
    end = c.get("moe_layer_end_index", -1)
    end = need(c, "num_hidden_layers") - 1 if end == -1 else end

    def layer(i: int) -> tuple[Sublayer, ...]:
        sparse = (i + 1) % every == 0 and start <= i <= end
        return block(attention, moe if sparse else replace(dense(c), bias=bias), norm(c))

    return model(c, layer, tie_embeddings=c.get("tie_word_embeddings", True), head_bias=bias)


FAMILY = Family(
    name="ernie4_5_moe",
    architectures=("Ernie4_5_MoeForCausalLM",),
    spec=spec,
    names={
        **PER_EXPERT,
        **{t.replace("weight", "bias"): o.replace("weight", "bias") for t, o in PER_EXPERT.items() if "_proj" in t},
        "lm_head.bias": "head.bias",
        "model.layers.{i}.mlp.moe_statics.e_score_correction_bias": "layers.{i}.ffn.router.choice_bias",
    },
    transforms={"layers.{i}.ffn.router.choice_bias": lambda bias_1E, shape: bias_1E.reshape(shape)},
    ignored=(r"model\.mtp.*", r"mtp.*"),
    mtp_past_end=True,
    layers_rule="(i + 1) % moe_layer_interval == 0 and moe_layer_start_index <= i <= moe_layer_end_index",
)
