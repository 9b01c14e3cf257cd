"""EXAONE-MoE (K-EXAONE): float32 sigmoid router with a choice bias and groups, per-head q/k norms; three of four
layers attend to a window, and only these have a rotary embedding."""

from __future__ import annotations

from dataclasses import replace

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
    noaux_router,
    norm,
    shared_mlp,
    sliding_layers,
)
from tracklayer.models.spec import Family, ModelSpec, Sublayer


def moe_layers(c: Config) -> list[bool]:
    """Three spellings: transformers' list of words, the hub's list of booleans, the number of dense first layers."""
    count = need(c, "num_hidden_layers")
    if c.get("mlp_layer_types"):
        return [kind == "sparse" for kind in c["mlp_layer_types"][:count]]
    if c.get("is_moe_layer"):
        return [bool(flag) for flag in c["is_moe_layer"][:count]]
    first = need({"first_k": 1, **c}, "first_k_dense_replace", "first_last_k_dense_replace", "first_k")
    return [i >= first for i in range(count)]


def windows(c: Config) -> list[bool]:
    """Sliding layers; `sliding_window_pattern` is a number, or letters of which L (local) slides ("LLLG")."""
    pattern = c.get("sliding_window_pattern") or 4
    if isinstance(pattern, str) and not c.get("layer_types"):
        return [pattern[i % len(pattern)] == "L" for i in range(need(c, "num_hidden_layers"))]
    return sliding_layers(c, pattern if isinstance(pattern, int) else 4)


def spec(c: Config) -> ModelSpec:
    width = need(c, "moe_intermediate_size")
    moe = MoESpec(
        router=noaux_router(c),
        width=width,
        activation=activation(c),
        shared=shared_mlp(c, c.get("num_shared_experts"), width),
    )
    full, window = gqa(c, qk_norm="head"), c.get("sliding_window")
    sliding, sparse = windows(c), moe_layers(c)

    def layer(i: int) -> tuple[Sublayer, ...]:
        attention = full
        if window is not None:
            attention = replace(full, window=window) if sliding[i] else replace(full, rope=None)
        return block(attention, moe if sparse[i] else dense(c), norm(c))

    return model(c, layer)


FAMILY = Family(
    name="exaone_moe",
    architectures=("ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM"),
    spec=spec,
    names={**PER_EXPERT, "model.layers.{i}.mlp.e_score_correction_bias": "layers.{i}.ffn.router.choice_bias"},
    ignored=(r"mtp\..*", r"model\.mtp\..*"),
    layers_rule="is_moe_layer or mlp_layer_types, else i >= first_k_dense_replace",
)
