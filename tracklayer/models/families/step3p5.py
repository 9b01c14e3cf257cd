"""Step-3.5 / 3.7 (text): sigmoid router with a choice bias, scaled after the expert sum; clamps after the activation by
layer; norms of weight 1 + w; a gate per head; kinds of layers with their own head count, rotary base and turned part.
In exact arithmetic the scale may as well lie in the weights, as in SGLang.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tracklayer.kernels.topk import RouterSpec
from tracklayer.layers.spec import AttentionSpec, MLPSpec, MoESpec
from tracklayer.models.common import (
    ATTENTION,
    DENSE,
    OUTER,
    Config,
    below,
    block,
    dense,
    gqa,
    mlp_names,
    model,
    need,
    norm,
    num_experts,
    per_layer,
    sliding_layers,
    text,
    typed_rope,
)
from tracklayer.models.spec import Family, ModelSpec, Sublayer

LAYER = "model.layers.{i}"


def attention(c: Config, i: int, slides: bool) -> AttentionSpec:
    other = c.get("attention_other_setting") or {}
    heads = need(c, "num_attention_heads")
    if slides:
        heads = c.get("num_sliding_attention_heads") or other.get("num_attention_heads") or heads
    kind, head_dim = ("sliding_attention" if slides else "full_attention"), need(c, "head_dim")
    own: Config = {
        "num_attention_heads": heads,
        "num_key_value_heads": need(c, "num_attention_groups", "num_key_value_heads"),
    }
    if c.get("rope_theta") is not None:
        own["rope_theta"] = per_layer(c["rope_theta"], i)
    own["partial_rotary_factor"] = per_layer(c.get("partial_rotary_factors"), i)
    if kind not in (c.get("yarn_only_types") or [kind]):
        own["rope_scaling"] = None
    rms = norm(c, eps=c.get("rms_norm_eps", 1e-5), offset=1.0)
    return gqa(
        {**c, **own},
        rope=typed_rope({**c, **own}, kind, head_dim),
        qk_norm="head",
        norm=rms,
        out_gate="head",
        window=need(c, "sliding_window") if slides else None,
    )


def moe_layers(c: Config) -> list[bool]:
    count = need(c, "num_hidden_layers")
    if c.get("mlp_layer_types"):
        return [kind == "sparse" for kind in c["mlp_layer_types"][:count]]
    listed = c.get("moe_layers_enum")
    chosen = range(3, count) if listed is None else listed.split(",") if isinstance(listed, str) else listed
    return [i in {int(n) for n in chosen} for i in range(count)]


def clamp(c: Config, key: str, i: int) -> Any:
    """A layer's limit; 0, null and no list mean none."""
    return per_layer(c.get(key) or 0, i) or None


def spec(c: Config) -> ModelSpec:
    c = text(c)
    router = RouterSpec(
        num_experts=num_experts(c),
        top_k=need(c, "moe_top_k", "num_experts_per_tok"),
        score="sigmoid",
        choice_bias=True,
        renormalize=True,
        scale=c.get("moe_router_scaling_factor") or 1.0,
        scale_output=True,
        gate_dtype="float32" if c.get("need_fp32_gate") else "model",
    )
    shared_width = need(c, "share_expert_dim", "share_expert_dims")
    sliding, sparse = sliding_layers({"layer_types": ["full_attention"] * 999, **c}, 4), moe_layers(c)
    rms = norm(c, eps=c.get("rms_norm_eps", 1e-5), offset=1.0)

    def layer(i: int) -> tuple[Sublayer, ...]:
        limit = clamp(c, "swiglu_limits_shared", i)
        ffn: MLPSpec | MoESpec = replace(dense({**c, "hidden_act": "silu"}), clamp_after=limit)
        if sparse[i]:
            shared = MLPSpec(width=shared_width, clamp_after=limit)
            width, routed = need(c, "moe_intermediate_size"), clamp(c, "swiglu_limits", i)
            ffn = MoESpec(router=router, width=width, clamp_after=routed, shared=shared)
        return block(attention(c, i, sliding[i]), ffn, rms)

    return model(c, layer, final_norm=rms)


FAMILY = Family(
    name="step3p5",
    architectures=("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"),
    spec=spec,
    names=below(
        {
            **OUTER,
            **ATTENTION,
            **DENSE,
            **mlp_names(f"{LAYER}.moe", "layers.{i}.ffn.experts"),
            **mlp_names(f"{LAYER}.share_expert", "layers.{i}.ffn.shared"),
            f"{LAYER}.post_attention_layernorm.weight": "layers.{i}.ffn.norm.weight",
            f"{LAYER}.self_attn.g_proj.weight": "layers.{i}.attn.gate.weight",
            f"{LAYER}.moe.gate.weight": "layers.{i}.ffn.router.weight",
            f"{LAYER}.moe.router_bias": "layers.{i}.ffn.router.choice_bias",
        },
        "language_model.",
    ),
    ignored=(r"vision_model\..*", r"vit_large_projector\..*"),
    mtp_past_end=True,
    layers_rule="indices in moe_layers_enum",
    note="scale after the expert sum, as in transformers; need_fp32_gate is honoured, as in SGLang",
)
