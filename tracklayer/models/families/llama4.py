"""Llama 4 (text): top-k on raw logits, then sigmoid, and the weight multiplies the expert's input; a shared expert.

Three of four layers attend in chunks, with interleaved rotary embedding and weightless q/k norms after it; the others
see everything, without positions, their queries growing with the position. Experts are stacked and transposed.
"""

from __future__ import annotations

from dataclasses import replace

from tracklayer.kernels.topk import RouterSpec
from tracklayer.layers.spec import AttentionSpec, MLPSpec, MoESpec
from tracklayer.models.common import (
    ATTENTION,
    OUTER,
    Config,
    activation,
    below,
    block,
    dense,
    gqa,
    mlp_names,
    model,
    need,
    norm,
    num_experts,
    rope,
    text,
)
from tracklayer.models.spec import Family, ModelSpec, Sublayer

LAYER = "model.layers.{i}"


def attentions(c: Config) -> list[AttentionSpec]:
    count, every = need(c, "num_hidden_layers"), c.get("no_rope_layer_interval") or 4
    turns = c.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(count)]  # 1: the layer has rope
    kinds = c.get("layer_types") or ["chunked_attention" if turn else "full_attention" for turn in turns]
    bias = c.get("attention_bias", False)
    head_dim = c.get("head_dim") or need(c, "hidden_size") // need(c, "num_attention_heads")
    tuned = c.get("attn_temperature_tuning", True)
    tuning = (float(c.get("attn_scale", 0.1)), int(c.get("floor_scale", 8192))) if tuned else None
    eps = norm(c, eps=c.get("rms_norm_eps", 1e-5))
    free = gqa(c, qkv_bias=bias, out_bias=bias, rope=None, q_temperature=tuning, norm=eps)
    turned = replace(
        free,
        rope=rope(c, head_dim, interleaved=True, theta=500000.0),
        q_temperature=None,
        qk_norm="head" if c.get("use_qk_norm", True) else None,
        qk_norm_weight=False,
        qk_norm_after_rope=True,
    )
    chunk = c.get("attention_chunk_size")
    return [
        replace(turned if turn else free, chunk=chunk if kind == "chunked_attention" else None)
        for turn, kind in zip(turns, kinds, strict=True)
    ]


def spec(c: Config) -> ModelSpec:
    c = text(c)
    router = RouterSpec(
        num_experts=num_experts(c),
        top_k=need(c, "num_experts_per_tok"),
        score="sigmoid",
        after_topk=True,
        weight_on_input=True,
        weights_dtype="model",
    )
    width = need(c, "intermediate_size")
    shared = MLPSpec(width=width, activation=activation(c))
    moe = MoESpec(router=router, width=width, activation=activation(c), shared=shared)
    count, step = need(c, "num_hidden_layers"), c.get("interleave_moe_layer_step") or 1
    sparse = c["moe_layers"] if c.get("moe_layers") is not None else range(step - 1, count, step)
    rms, attention = norm(c, eps=c.get("rms_norm_eps", 1e-5)), attentions(c)

    def layer(i: int) -> tuple[Sublayer, ...]:
        return block(attention[i], moe if i in sparse else dense(c, "intermediate_size_mlp"), rms)

    return model(c, layer, final_norm=rms)


FAMILY = Family(
    name="llama4",
    architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    spec=spec,
    names=below(
        {
            **OUTER,
            **ATTENTION,
            **mlp_names(f"{LAYER}.feed_forward", "layers.{i}.ffn"),
            **mlp_names(f"{LAYER}.feed_forward.shared_expert", "layers.{i}.ffn.shared"),
            f"{LAYER}.post_attention_layernorm.weight": "layers.{i}.ffn.norm.weight",
            f"{LAYER}.feed_forward.router.weight": "layers.{i}.ffn.router.weight",
            f"{LAYER}.feed_forward.experts.gate_up_proj": "layers.{i}.ffn.experts.gate_up.weight",
            f"{LAYER}.feed_forward.experts.down_proj": "layers.{i}.ffn.experts.down.weight",
        },
        "language_model.",
    ),
    transforms={
        "layers.{i}.ffn.experts.gate_up.weight": lambda stacked, shape: stacked.transpose(1, 2),
        "layers.{i}.ffn.experts.down.weight": lambda stacked, shape: stacked.transpose(1, 2),
    },
    ignored=(r"vision_model\..*", r"multi_modal_projector\..*"),
    layers_rule="moe_layers, else every interleave_moe_layer_step-th",
)
