"""LFM2-MoE: gated short convolutions, some layers with attention; sigmoid router in the model's dtype, whose bias is
for the choice only; tied head."""

from __future__ import annotations

from tracklayer.kernels.topk import RouterSpec
from tracklayer.layers.recurrent_spec import ShortConvSpec
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
    rope,
)
from tracklayer.models.mamba import conv_transform
from tracklayer.models.spec import Family, ModelSpec, Sublayer

LAYER, OURS, SPELLING = "model.layers.{i}", "layers.{i}", ("w1", "w3", "w2")


def spec(c: Config) -> ModelSpec:
    router = RouterSpec(
        num_experts=num_experts(c),
        top_k=need(c, "num_experts_per_tok"),
        score="sigmoid",
        choice_bias=c.get("use_expert_bias", True),
        renormalize=c.get("norm_topk_prob", True),
        renorm_eps=1e-6,
        scale=c.get("routed_scaling_factor") or 1.0,
        score_dtype="model",
    )
    moe = MoESpec(router=router, width=need(c, "moe_intermediate_size"), activation=activation(c))
    rms, hidden = norm(c, eps=c.get("norm_eps", 1e-5)), need(c, "hidden_size")
    head_dim = c.get("head_dim") or hidden // need(c, "num_attention_heads")
    attention = gqa(c, qk_norm="head", norm=rms, rope=rope(c, head_dim, theta=1e6))
    conv = ShortConvSpec(width=hidden, conv=c.get("conv_L_cache", 3), bias=c.get("conv_bias", False))
    kinds = need(c, "layer_types")

    def layer(i: int) -> tuple[Sublayer, ...]:
        ffn = moe if i >= c.get("num_dense_layers", 2) else dense(c)
        return block(attention if kinds[i] == "full_attention" else conv, ffn, rms)

    tied = c.get("tie_word_embeddings", c.get("tie_embedding", True))
    return model(c, layer, final_norm=rms, tie_embeddings=tied)


FAMILY = Family(
    name="lfm2_moe",
    architectures=("Lfm2MoeForCausalLM",),
    spec=spec,
    names={
        **OUTER,
        **ATTENTION,
        f"{LAYER}.self_attn.out_proj.weight": f"{OURS}.attn.o.weight",
        f"{LAYER}.self_attn.q_layernorm.weight": f"{OURS}.attn.q_norm.weight",
        f"{LAYER}.self_attn.k_layernorm.weight": f"{OURS}.attn.k_norm.weight",
        f"{LAYER}.operator_norm.weight": f"{OURS}.attn.norm.weight",
        f"{LAYER}.ffn_norm.weight": f"{OURS}.ffn.norm.weight",
        "model.embedding_norm.weight": "norm.weight",
        **{
            f"{LAYER}.conv.{theirs}.{kind}": f"{OURS}.attn.{ours}.{kind}"
            for theirs, ours in (("in_proj", "in"), ("conv", "conv"), ("out_proj", "o"))
            for kind in ("weight", "bias")
        },
        **mlp_names(f"{LAYER}.feed_forward", f"{OURS}.ffn", SPELLING),
        **mlp_names(f"{LAYER}.feed_forward.experts.{{j}}", f"{OURS}.ffn.experts.{{j}}", SPELLING),
        f"{LAYER}.feed_forward.gate.weight": f"{OURS}.ffn.router.weight",
        f"{LAYER}.feed_forward.expert_bias": f"{OURS}.ffn.router.choice_bias",
    },
    transforms=conv_transform(f"{OURS}.attn"),
    layers_rule="i >= num_dense_layers",
)
