"""AFMoE (Trinity): sigmoid router with a choice bias, output gate per channel, sandwich norms; three of four layers
attend to a window, and only these have a rotary embedding.

transformers knows one group, sigmoid scores and renormalisation only; the config's score_func, route_norm, n_group and
topk_group, which SGLang reads, are honoured when they are there.
"""

from __future__ import annotations

from dataclasses import replace

from tracklayer.kernels.topk import RouterSpec
from tracklayer.layers.spec import MoESpec
from tracklayer.models.common import (
    DENSE,
    OUTER,
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
    shared_mlp,
    sliding_layers,
)
from tracklayer.models.spec import Family, ModelSpec, Sublayer

LAYER = "model.layers.{i}"


def spec(c: Config) -> ModelSpec:
    router = RouterSpec(
        num_experts=num_experts(c),
        top_k=need(c, "num_experts_per_tok"),
        score=c.get("score_func") or "sigmoid",
        choice_bias=True,
        num_groups=c.get("n_group") or 1,
        topk_groups=c.get("topk_group") or 1,
        renormalize=c.get("route_norm", True),
        renorm_eps=1e-20,
        scale=c.get("route_scale") or 1.0,
    )
    width = need(c, "moe_intermediate_size")
    moe = MoESpec(
        router=router,
        width=width,
        activation=activation(c),
        shared=shared_mlp(c, c.get("num_shared_experts"), width),
    )
    bias = c.get("attention_bias", False)
    full = gqa(c, qk_norm="head", out_gate="channel", qkv_bias=bias, out_bias=bias)
    sliding = sliding_layers(c, c.get("global_attn_every_n_layers") or 4)

    def layer(i: int) -> tuple[Sublayer, ...]:
        attention = replace(full, window=c.get("sliding_window")) if sliding[i] else replace(full, rope=None)
        ffn = moe if i >= (c.get("num_dense_layers") or 0) else dense(c)
        return block(attention, ffn, norm(c), norm(c))

    return model(c, layer, embed_scale=need(c, "hidden_size") ** 0.5 if c.get("mup_enabled") else 1.0)


FAMILY = Family(
    name="afmoe",
    architectures=("AfmoeForCausalLM",),
    spec=spec,
    names={
        **PER_EXPERT,
        **OUTER,
        **DENSE,
        f"{LAYER}.self_attn.gate_proj.weight": "layers.{i}.attn.gate.weight",
        f"{LAYER}.post_attention_layernorm.weight": "layers.{i}.attn.post_norm.weight",
        f"{LAYER}.pre_mlp_layernorm.weight": "layers.{i}.ffn.norm.weight",
        f"{LAYER}.post_mlp_layernorm.weight": "layers.{i}.ffn.post_norm.weight",
        f"{LAYER}.mlp.router.gate.weight": "layers.{i}.ffn.router.weight",
        f"{LAYER}.mlp.expert_bias": "layers.{i}.ffn.router.choice_bias",
    },
    layers_rule="i >= num_dense_layers",
    note="score_func, route_norm and groups are read from the config, as in SGLang (transformers: sigmoid, one group)",
)
