"""MiMo-V2: float32 sigmoid router with a choice bias; five of six layers attend to a window, with sinks, more key heads
and a rotary base of their own; keys wider than values, values scaled, a third of each head turned.

The hub's config lists the layers (moe_layer_freq, hybrid_layer_pattern); transformers writes mlp_layer_types and
layer_types and doubles the key heads of sliding layers. Its window counts the token itself: hub 128, transformers 129.
"""

from __future__ import annotations

from tracklayer.layers.spec import AttentionSpec, MoESpec
from tracklayer.models.common import (
    PER_EXPERT,
    Config,
    activation,
    block,
    dense,
    model,
    need,
    noaux_router,
    norm,
    typed_rope,
)
from tracklayer.models.spec import Family, ModelSpec, Sublayer

LAYER = "model.layers.{i}"


def flags(c: Config, ours: str, word: str, theirs: str) -> list[bool]:
    """Per-layer choice from transformers' list of words, else from the hub's list of 0 and 1."""
    if c.get(ours):
        return [kind == word for kind in c[ours]]
    return [bool(flag) for flag in need(c, theirs)]


def attention(c: Config, slides: bool) -> AttentionSpec:
    head_dim, kv_heads = need(c, "head_dim"), need(c, "num_key_value_heads")
    own = {}
    if slides:
        kv_heads = c.get("swa_num_key_value_heads") or 2 * kv_heads
        if c.get("swa_rope_theta"):
            own["rope_theta"] = c["swa_rope_theta"]
    size = c.get("sliding_window_size")
    kind = "sliding_attention" if slides else "full_attention"
    partial = {"partial_rotary_factor": c.get("partial_rotary_factor", 0.334)}
    if isinstance((c.get("rope_parameters") or {}).get(kind), dict):
        partial = {}
    return AttentionSpec(
        num_heads=need(c, "num_attention_heads"),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=need(c, "v_head_dim"),
        rope=typed_rope({**c, **partial, **own}, kind, head_dim, theta=1e4 if slides else 5e6),
        qkv_bias=c.get("attention_bias", False),
        norm=norm(c),
        window=(size + 1 if size else need(c, "sliding_window")) if slides else None,
        sinks=c.get("add_swa_attention_sink_bias", True) if slides else c.get("add_full_attention_sink_bias", False),
        v_scale=c.get("attention_value_scale") or 1.0,
    )


def spec(c: Config) -> ModelSpec:
    moe = MoESpec(router=noaux_router(c), width=need(c, "moe_intermediate_size"), activation=activation(c))
    sliding = flags(c, "layer_types", "sliding_attention", "hybrid_layer_pattern")
    sparse = flags(c, "mlp_layer_types", "sparse", "moe_layer_freq")

    def layer(i: int) -> tuple[Sublayer, ...]:
        return block(attention(c, sliding[i]), moe if sparse[i] else dense(c), norm(c))

    return model(c, layer)


FAMILY = Family(
    name="mimo_v2",
    architectures=("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"),
    spec=spec,
    names={
        **PER_EXPERT,
        f"{LAYER}.self_attn.sinks": "layers.{i}.attn.sinks",
        f"{LAYER}.self_attn.attention_sink_bias": "layers.{i}.attn.sinks",
        f"{LAYER}.mlp.gate.e_score_correction_bias": "layers.{i}.ffn.router.choice_bias",
    },
    ignored=(r"model\.mtp\..*",),
    layers_rule="moe_layer_freq[i] (transformers: mlp_layer_types)",
    note="the hub's window of 128 earlier tokens is transformers' 129, which counts the token itself",
)
