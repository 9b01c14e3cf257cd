"""Jamba: Mamba layers, every eighth with attention without positions; experts in every second layer, the others dense.
Softmax router, never renormalised."""

from __future__ import annotations

from math import ceil

from tracklayer.kernels.topk import RouterSpec
from tracklayer.layers.recurrent_spec import Mamba1Spec
from tracklayer.layers.spec import MoESpec
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
    need,
    norm,
    num_experts,
)
from tracklayer.models.mamba import conv_transform, mamba_names
from tracklayer.models.spec import Family, ModelSpec, Sublayer

LAYER, OURS = "model.layers.{i}", "layers.{i}"


def spec(c: Config) -> ModelSpec:
    router = RouterSpec(num_experts=num_experts(c), top_k=need(c, "num_experts_per_tok"), weights_dtype="model")
    moe = MoESpec(router=router, width=need(c, "intermediate_size"), activation=activation(c))
    hidden, rank = need(c, "hidden_size"), c.get("mamba_dt_rank", "auto")
    mamba = Mamba1Spec(
        width=c.get("mamba_expand", 2) * hidden,
        state=c.get("mamba_d_state", 16),
        dt_rank=ceil(hidden / 16) if rank == "auto" else rank,
        conv=c.get("mamba_d_conv", 4),
        conv_bias=c.get("mamba_conv_bias", True),
        bias=c.get("mamba_proj_bias", False),
        norm=norm(c),
    )
    attention = gqa(c, rope=None)

    def layer(i: int) -> tuple[Sublayer, ...]:
        attends = i % c.get("attn_layer_period", 8) == c.get("attn_layer_offset", 4)
        sparse = i % c.get("expert_layer_period", 2) == c.get("expert_layer_offset", 1)
        return block(attention if attends else mamba, moe if sparse else dense(c), norm(c))

    return model(c, layer)


FAMILY = Family(
    name="jamba",
    architectures=("JambaForCausalLM",),
    spec=spec,
    names={
        **OUTER,
        **ATTENTION,
        **mamba_names(f"{LAYER}.mamba", f"{OURS}.attn"),
        **mlp_names(f"{LAYER}.feed_forward", f"{OURS}.ffn"),
        **mlp_names(f"{LAYER}.feed_forward.experts.{{j}}", f"{OURS}.ffn.experts.{{j}}"),
        f"{LAYER}.feed_forward.router.weight": f"{OURS}.ffn.router.weight",
        f"{LAYER}.pre_ff_layernorm.weight": f"{OURS}.ffn.norm.weight",
        "model.final_layernorm.weight": "norm.weight",
    },
    transforms=conv_transform(f"{OURS}.attn"),
    layers_rule="i % expert_layer_period == expert_layer_offset",
)
