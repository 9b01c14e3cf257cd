"""Gemma 4 with MoE (26B-A4B, text): in every layer a dense MLP and routed experts side by side, each between norms of
its own; the router reads the residual stream, normed and scaled; the chosen experts' weights have a learned factor.

Full layers have wider heads, their own key heads and values that are the keys before their norm; values are normed;
the softmax scale is 1. Per-layer inputs and shared key-value layers (E2B, E4B, which have no experts) are refused.
"""

from __future__ import annotations

from typing import Any

from tracklayer.errors import CheckpointError
from tracklayer.kernels.topk import RouterSpec
from tracklayer.layers.spec import AttentionSpec, MLPSpec, MoESpec, RopeSpec
from tracklayer.models.common import (
    ATTENTION,
    DENSE,
    OUTER,
    Config,
    activation,
    gqa,
    model,
    need,
    norm,
    num_experts,
    sliding_layers,
    text,
    typed_rope,
)
from tracklayer.models.spec import Family, ModelSpec, Sublayer

LAYER, FFN = "model.layers.{i}", "layers.{i}.ffn"


def own(c: Config, i: int, key: str, default: Any) -> Any:
    """A full layer's own value: transformers writes per_layer_config, the hub global_* keys."""
    layers = c.get("per_layer_config") or {}
    return (layers.get(str(i)) or {}).get(key) or c.get(f"global_{key}") or c.get(f"num_global_{key[4:]}") or default


def attention(c: Config, i: int, slides: bool) -> AttentionSpec:
    head_dim, kv_heads = need(c, "head_dim"), need(c, "num_key_value_heads")
    turn = typed_rope(c, "sliding_attention", head_dim)
    shares = bool(c.get("attention_k_eq_v")) and not slides
    if not slides:
        head_dim = own(c, i, "head_dim", 512)
        kv_heads = own(c, i, "num_key_value_heads", kv_heads) if c.get("attention_k_eq_v") else kv_heads
        given = (c.get("rope_parameters") or {}).get("full_attention") or {}
        scaling = {"rope_type": "proportional", "partial_rotary_factor": 0.25, **given}
        turn = RopeSpec(dim=head_dim, theta=float(given.get("rope_theta", 1e6)), scaling=scaling)
    sizes = {"head_dim": head_dim, "num_key_value_heads": kv_heads}
    return gqa(
        {**c, **sizes},
        rope=turn,
        qk_norm="head",
        scale=1.0,
        v_norm=True,
        v_from_key=shares,
        window=need(c, "sliding_window") if slides else None,
        qkv_bias=c.get("attention_bias", False),
        out_bias=c.get("attention_bias", False),
    )


def spec(c: Config) -> ModelSpec:
    c = text(c)
    for key in ("hidden_size_per_layer_input", "num_kv_shared_layers", "use_bidirectional_attention"):
        if c.get(key) and c[key] != "vision":
            raise CheckpointError(f"{key} is {c[key]!r}: Gemma 4 is served with experts and without it (26B-A4B)")
    rms = norm(c)
    router = RouterSpec(
        num_experts=num_experts(c), top_k=need(c, "top_k_experts"), renormalize=True, per_expert_scale=True
    )
    mlp = MLPSpec(width=need(c, "intermediate_size"), activation=activation(c))
    width = need(c, "moe_intermediate_size")
    moe = MoESpec(router=router, width=width, activation=activation(c), shared=mlp, inner_norm=rms)
    slides = sliding_layers(c, 6)
    slides[-1] = False

    def layer(i: int) -> tuple[Sublayer, ...]:
        return (
            Sublayer(name="attn", body=attention(c, i, slides[i]), pre_norm=rms, post_norm=rms),
            Sublayer(name="ffn", body=moe, pre_norm=None, post_norm=rms, stream_scale=True),
        )

    return model(
        c,
        layer,
        embed_scale=need(c, "hidden_size") ** 0.5,
        embed_scale_rounded=True,
        logit_softcap=c.get("final_logit_softcapping"),
        tie_embeddings=c.get("tie_word_embeddings", True),
    )


NORMS = {
    "post_attention_layernorm": "layers.{i}.attn.post_norm",
    "pre_feedforward_layernorm": f"{FFN}.shared_norm",
    "post_feedforward_layernorm_1": f"{FFN}.shared_post_norm",
    "pre_feedforward_layernorm_2": f"{FFN}.experts_norm",
    "post_feedforward_layernorm_2": f"{FFN}.experts_post_norm",
    "post_feedforward_layernorm": f"{FFN}.post_norm",
}
NAMES = {
    **OUTER,
    **ATTENTION,
    **{theirs: ours.replace(".ffn.", ".ffn.shared.") for theirs, ours in DENSE.items()},
    **{f"{LAYER}.{theirs}.weight": f"{ours}.weight" for theirs, ours in NORMS.items()},
    f"{LAYER}.router.proj.weight": f"{FFN}.router.weight",
    f"{LAYER}.router.scale": f"{FFN}.router_norm.weight",
    f"{LAYER}.router.per_expert_scale": f"{FFN}.router.expert_scale",
    f"{LAYER}.experts.gate_up_proj": f"{FFN}.experts.gate_up.weight",
    f"{LAYER}.experts.down_proj": f"{FFN}.experts.down.weight",
    f"{LAYER}.layer_scalar": f"{FFN}.stream_scale",
}

FAMILY = Family(
    name="gemma4_moe",
    architectures=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    spec=spec,
    names=NAMES | {theirs.replace("model.", "model.language_model.", 1): ours for theirs, ours in NAMES.items()},
    transforms={f"{FFN}.router_norm.weight": lambda scale_D, shape: scale_D.float() * scale_D.shape[0] ** -0.5},
    ignored=(r"model\.(vision_tower|embed_vision|audio_tower|embed_audio)\..*",),
    claims=lambda c: bool(text(c).get("enable_moe_block")),
    note="with experts (enable_moe_block) only: the dense models of the family have no routes",
)
