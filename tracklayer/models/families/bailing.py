"""Bailing: Ling-lite / plus (v1, softmax router) and Ling-2.0 (v2, sigmoid router with bias and groups).

Fused query_key_value (all q heads, then k, then v); v2 has per-head q/k norms and turns half of each head. With
`norm_head` the output head's columns are normalised at load. Gates for image and audio tokens (`multi_gate`) are not
served.
"""

from __future__ import annotations

from tracklayer.errors import CheckpointError
from tracklayer.kernels.topk import RouterSpec
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
    num_experts,
    shared_mlp,
)
from tracklayer.models.spec import Family, ModelSpec

NAMES = {
    **{theirs: ours for theirs, ours in PER_EXPERT.items() if "self_attn" not in theirs},
    "model.word_embeddings.weight": "embed.weight",
    "model.layers.{i}.attention.query_key_value.weight": "layers.{i}.attn.qkv.weight",
    "model.layers.{i}.attention.query_key_value.bias": "layers.{i}.attn.qkv.bias",
    "model.layers.{i}.attention.dense.weight": "layers.{i}.attn.o.weight",
    "model.layers.{i}.attention.dense.bias": "layers.{i}.attn.o.bias",
    "model.layers.{i}.attention.query_layernorm.weight": "layers.{i}.attn.q_norm.weight",
    "model.layers.{i}.attention.key_layernorm.weight": "layers.{i}.attn.k_norm.weight",
    "model.layers.{i}.mlp.gate.expert_bias": "layers.{i}.ffn.router.choice_bias",
}


def whole(c: Config, attention: AttentionSpec, router: RouterSpec, first: int) -> ModelSpec:
    if c.get("multi_gate"):
        raise CheckpointError("multi_gate is set: gates of their own for image and audio tokens are not served")
    width = need(c, "moe_intermediate_size")
    moe = MoESpec(
        router=router,
        width=width,
        activation=activation(c),
        shared=shared_mlp(c, c.get("num_shared_experts"), width),
    )
    return model(
        c,
        lambda i: block(attention, moe if i >= first else dense(c), norm(c)),
        normed_head=c.get("norm_head", False),
    )


def v1(c: Config) -> ModelSpec:
    top_k = need(c, "num_experts_per_tok")
    router = RouterSpec(
        num_experts=num_experts(c), top_k=top_k, renormalize=c.get("norm_topk_prob", False) and top_k > 1
    )
    attention = gqa(c, qkv_bias=c.get("use_qkv_bias", False), out_bias=c.get("use_bias", False))
    return whole(c, attention, router, c.get("first_k_dense_replace", 0))


def v2(c: Config) -> ModelSpec:
    router = noaux_router(c, renormalize=need(c, "num_experts_per_tok") > 1)
    attention = gqa(
        c,
        qkv_bias=c.get("use_qkv_bias", False),
        out_bias=c.get("use_bias", False),
        qk_norm="head" if c.get("use_qk_norm", True) else None,
    )
    return whole(c, attention, router, c.get("first_k_dense_replace", 0))


FAMILIES = (
    Family(
        name="bailing_moe",
        architectures=("BailingMoeForCausalLM",),
        spec=v1,
        names=NAMES,
        layers_rule="i >= first_k_dense_replace (published: all)",
        oracle="plain reference",
    ),
    Family(
        name="bailing_moe_v2",
        architectures=("BailingMoeV2ForCausalLM",),
        spec=v2,
        names=NAMES,
        mtp_past_end=True,
        layers_rule="i >= first_k_dense_replace",
        oracle="transformers Glm4MoeForCausalLM with qkv fused",
    ),
)
