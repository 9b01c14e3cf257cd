"""GLM-4.5 / 4.6 / 4.7: sigmoid router in float32 with a correction bias for the choice and groups, dense first layers,
shared experts in one MLP, partial rotary embedding."""

from __future__ import annotations

from tracklayer.layers.spec import MLPSpec, MoESpec
from tracklayer.models.common import (
    ATTENTION,
    OUTER,
    Config,
    activation,
    dense,
    gqa,
    mlp_names,
    model,
    moe_names,
    need,
    noaux_router,
    norm,
)
from tracklayer.models.spec import Family, ModelSpec, Sublayer


def spec(c: Config) -> ModelSpec:
    shared = c.get("n_shared_experts") or 0
    width = need(c, "moe_intermediate_size")
    attention = gqa(c, qk_norm="head" if c.get("use_qk_norm") else None, qkv_bias=c.get("attention_bias", False))
    moe = MoESpec(
        router=noaux_router(c),
        width=width,
        activation=activation(c),
        shared=MLPSpec(width=width * shared, activation=activation(c)) if shared else None,
    )

    def layer(i: int) -> tuple[Sublayer, ...]:
        sparse = i >= c.get("first_k_dense_replace", 1)
        ffn = moe if sparse else dense(c)
        return Sublayer(name="attn", body=attention, pre_norm=norm(c)), Sublayer(name="ffn", body=ffn, pre_norm=norm(c))

    return model(c, layer)


FAMILY = Family(
    name="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    spec=spec,
    names={
        **OUTER,
        **ATTENTION,
        **moe_names("mlp", "gate.weight"),
        **mlp_names("model.layers.{i}.mlp", "layers.{i}.ffn"),
        **mlp_names("model.layers.{i}.mlp.shared_experts", "layers.{i}.ffn.shared"),
        "model.layers.{i}.mlp.gate.e_score_correction_bias": "layers.{i}.ffn.router.choice_bias",
    },
    mtp_past_end=True,
)
