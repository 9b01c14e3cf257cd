"""GLM-4.5 / 4.6 / 4.7 and dots1: float32 sigmoid router with a choice bias and groups, dense first layers, shared
experts in one MLP. GLM turns a part of each head and norms q and k by `use_qk_norm`; dots1 always norms them."""

from __future__ import annotations

from dataclasses import replace

from tracklayer.layers.spec import AttentionSpec, MoESpec
from tracklayer.models.common import (
    PER_EXPERT,
    Config,
    activation,
    block,
    dense,
    gqa,
    model,
    need,
    noaux_router,
    norm,
    shared_mlp,
)
from tracklayer.models.spec import Family, ModelSpec

NAMES = {**PER_EXPERT, "model.layers.{i}.mlp.gate.e_score_correction_bias": "layers.{i}.ffn.router.choice_bias"}
RULE = "i >= first_k_dense_replace"


def whole(c: Config, attention: list[AttentionSpec]) -> ModelSpec:
    """`attention`: one for all layers, or one each."""
    width = need(c, "moe_intermediate_size")
    moe = MoESpec(
        router=noaux_router(c),
        width=width,
        activation=activation(c),
        shared=shared_mlp(c, c.get("n_shared_experts"), width),
    )
    first = c.get("first_k_dense_replace", 1)
    return model(c, lambda i: block(attention[i % len(attention)], moe if i >= first else dense(c), norm(c)))


def glm(c: Config) -> ModelSpec:
    return whole(c, [gqa(c, qk_norm="head" if c.get("use_qk_norm") else None, qkv_bias=c.get("attention_bias", False))])


def dots(c: Config) -> ModelSpec:
    bias = c.get("attention_bias", False)
    full = gqa(c, qk_norm="head", qkv_bias=bias, out_bias=bias)
    if c.get("sliding_window") is None:
        return whole(c, [full])
    kinds = c.get("layer_types") or sliding_from(c, c.get("max_window_layers", 62))
    slides = [kind == "sliding_attention" for kind in kinds]
    return whole(c, [replace(full, window=c["sliding_window"]) if slide else full for slide in slides])


def sliding_from(c: Config, first: int) -> list[str]:
    return ["sliding_attention" if i >= first else "full_attention" for i in range(need(c, "num_hidden_layers"))]


FAMILIES = (
    Family(
        name="glm4_moe",
        architectures=("Glm4MoeForCausalLM",),
        spec=glm,
        names=NAMES,
        mtp_past_end=True,
        layers_rule=RULE,
    ),
    Family(name="dots1", architectures=("Dots1ForCausalLM",), spec=dots, names=NAMES, layers_rule=RULE),
)
