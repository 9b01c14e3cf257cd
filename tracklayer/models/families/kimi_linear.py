"""Kimi-Linear and Ling-3: Kimi Delta Attention, and latent attention every fourth or sixth layer; DeepSeek-V3's router.

Kimi-Linear's latent attention has no positions, its delta layers come through bottlenecks, and its config counts their
layers from 1. Ling-3 turns its latent keys, gates each head, and bounds the decay.
"""

from __future__ import annotations

from typing import Any

from tracklayer.layers.recurrent_spec import KDASpec
from tracklayer.layers.spec import MLASpec, MoESpec
from tracklayer.models.common import (
    OUTER,
    PER_EXPERT,
    Config,
    activation,
    block,
    dense,
    mlp_names,
    model,
    moe_names,
    need,
    noaux_router,
    norm,
    shared_mlp,
)
from tracklayer.models.latent import mla, mla_names
from tracklayer.models.spec import Family, ModelSpec, Sublayer

LAYER, OURS = "model.layers.{i}", "layers.{i}"


def spelled(c: Config) -> Config:
    """Both families' own words for what others call otherwise."""
    words = {
        "n_group": "num_expert_group",
        "norm_topk_prob": "moe_renormalize",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
        "max_position_embeddings": "model_max_length",
    }
    return {**c, **{usual: c[own] for usual, own in words.items() if own in c}}


def whole(c: Config, attention: MLASpec, delta: KDASpec, full: list[bool], first: int) -> ModelSpec:
    width, kinds = need(c, "moe_intermediate_size"), c.get("mlp_layer_types")
    moe = MoESpec(
        router=noaux_router(c),
        width=width,
        activation=activation(c),
        shared=shared_mlp(c, c.get("n_shared_experts"), width),
    )

    def layer(i: int) -> tuple[Sublayer, ...]:
        sparse = kinds[i] == "sparse" if kinds else i >= first
        return block(attention if full[i] else delta, moe if sparse else dense(c), norm(c))

    return model(c, layer)


def kimi(c: Config) -> ModelSpec:
    c, linear = spelled(c), c.get("linear_attn_config") or {}
    delta = KDASpec(
        num_heads=linear.get("num_heads") or need(c, "linear_num_heads"),
        head_dim=linear.get("head_dim") or need(c, "linear_head_dim"),
        conv=linear.get("short_conv_kernel_size") or c.get("linear_conv_kernel_dim") or 4,
        low_rank=True,
        norm=norm(c),
    )
    layers = range(need(c, "num_hidden_layers"))
    listed, kinds = linear.get("full_attn_layers"), c.get("layer_types")
    if listed is not None:
        full = [i + 1 in listed for i in layers]
    else:
        full = [kinds[i] == "full_attention" if kinds else i > 0 and i % 4 == 0 for i in layers]
    first = c.get("first_k_dense_replace", 1)
    return whole(c, mla(c, rope=None), delta, full, first)


def ling3(c: Config) -> ModelSpec:
    c = spelled({"rope_theta": 6e6, **c})
    delta = KDASpec(
        num_heads=need(c, "num_attention_heads"),
        head_dim=c.get("linear_head_dim") or c.get("kda_head_dim") or need(c, "head_dim"),
        conv=c.get("short_conv_kernel_size") or 4,
        lower_bound=c.get("kda_lower_bound", -5.0) if c.get("kda_safe_gate", True) else None,
        norm=norm(c),
    )
    every, kinds = c.get("layer_group_size") or 6, c.get("layer_types")
    layers = range(need(c, "num_hidden_layers"))
    full = [kinds[i] == "full_attention" if kinds else (i + 1) % every == 0 for i in layers]
    return whole(c, mla(c, out_gate="head"), delta, full, c.get("first_k_dense_replace", 2))


def delta_names(theirs: str) -> dict[str, str]:
    """Names of a delta layer's tensors, and of a latent layer's below the same prefix."""
    words: dict[str, Any] = {
        **{f"{p}_proj.weight": f"{p}.weight" for p in ("q", "k", "v", "b", "f", "f_a", "f_b", "o")},
        **{f"{p}_conv1d.weight": f"conv.{p}.weight" for p in "qkv"},
        **{f"g{p}_proj.weight": f"gate{p}.weight" for p in ("", "_a", "_b")},
        **{name: name for name in ("A_log", "dt_bias")},
        "o_norm.weight": "out_norm.weight",
        "dense.weight": "o.weight",
    }
    return mla_names(theirs, f"{OURS}.attn") | {f"{theirs}.{t}": f"{OURS}.attn.{o}" for t, o in words.items()}


TRANSFORMS = {
    **{f"{OURS}.attn.conv.{p}.weight": lambda weight, shape: weight.view(shape) for p in "qkv"},
    f"{OURS}.attn.A_log": lambda rates, shape: rates.view(shape),
}
BODY = {theirs: ours for theirs, ours in PER_EXPERT.items() if "self_attn" not in theirs}

FAMILIES = (
    Family(
        name="kimi_linear",
        architectures=("KimiLinearForCausalLM",),
        spec=kimi,
        names={
            **BODY,
            **moe_names("block_sparse_moe", "gate.weight", ("w1", "w3", "w2")),
            **mlp_names(f"{LAYER}.block_sparse_moe.shared_experts", f"{OURS}.ffn.shared"),
            **mlp_names(f"{LAYER}.block_sparse_moe", f"{OURS}.ffn"),  # so transformers saves dense layers
            **OUTER,
            f"{LAYER}.block_sparse_moe.gate.e_score_correction_bias": f"{OURS}.ffn.router.choice_bias",
            **delta_names(f"{LAYER}.self_attn"),
        },
        transforms=TRANSFORMS,
        layers_rule="mlp_layer_types, else i >= first_k_dense_replace",
    ),
    Family(
        name="bailing_hybrid",
        architectures=("BailingHybridForCausalLM", "BailingMoeV3ForCausalLM"),
        spec=ling3,
        names={
            **BODY,
            "model.word_embeddings.weight": "embed.weight",
            f"{LAYER}.mlp.gate.expert_bias": f"{OURS}.ffn.router.choice_bias",
            **delta_names(f"{LAYER}.attention"),
        },
        transforms=TRANSFORMS,
        mtp_past_end=True,
        layers_rule="mlp_layer_types, else i >= first_k_dense_replace",
    ),
)
