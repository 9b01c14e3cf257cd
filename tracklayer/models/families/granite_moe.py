"""GraniteMoE and GraniteMoE-shared: top-k on raw logits, then softmax; four multipliers; stacked experts.

The shared variant adds a shared MLP of `shared_intermediate_size` to the routed sum (0: none)."""

from __future__ import annotations

from tracklayer.kernels.topk import RouterSpec
from tracklayer.layers.spec import MoESpec
from tracklayer.models.common import (
    ATTENTION,
    OUTER,
    Config,
    activation,
    block,
    gqa,
    model,
    need,
    norm,
    num_experts,
    shared_mlp,
)
from tracklayer.models.spec import Family, ModelSpec

LAYER = "model.layers.{i}"


def spec(c: Config) -> ModelSpec:
    router = RouterSpec(
        num_experts=num_experts(c), top_k=need(c, "num_experts_per_tok"), after_topk=True, weights_dtype="model"
    )
    moe = MoESpec(
        router=router,
        width=need(c, "intermediate_size"),
        activation=activation(c),
        shared=shared_mlp(c, 1, c["shared_intermediate_size"]) if c.get("shared_intermediate_size") else None,
    )
    bias = c.get("attention_bias", False)
    attention = gqa(c, scale=c.get("attention_multiplier", 1.0), qkv_bias=bias, out_bias=bias)
    residual = c.get("residual_multiplier", 1.0)
    return model(
        c,
        lambda i: block(attention, moe, norm(c), residual_scale=residual),
        embed_scale=c.get("embedding_multiplier", 1.0),
        logit_scale=1.0 / c.get("logits_scaling", 1.0),
    )


FAMILY = Family(
    name="granite_moe",
    architectures=("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
    spec=spec,
    names={
        **OUTER,
        **ATTENTION,
        f"{LAYER}.post_attention_layernorm.weight": "layers.{i}.ffn.norm.weight",
        f"{LAYER}.block_sparse_moe.router.layer.weight": "layers.{i}.ffn.router.weight",
        f"{LAYER}.block_sparse_moe.input_linear.weight": "layers.{i}.ffn.experts.gate_up.weight",
        f"{LAYER}.block_sparse_moe.output_linear.weight": "layers.{i}.ffn.experts.down.weight",
        f"{LAYER}.shared_mlp.input_linear.weight": "layers.{i}.ffn.shared.gate_up.weight",
        f"{LAYER}.shared_mlp.output_linear.weight": "layers.{i}.ffn.shared.down.weight",
    },
)
