"""PhiMoE: sparsemixer router (two choices, each weighed by a softmax over the experts near its maximum), layer norms
with bias, biases on attention and head, LongRoPE with a magnitude for short and for long contexts.

The threshold is the config's router_jitter_noise, as in transformers; SGLang has a constant 0.01, the published value.
Beyond the original context the long factors are taken, as in the checkpoint's own code (transformers: the short ones).
"""

from __future__ import annotations

from typing import Any

from tracklayer.kernels.topk import RouterSpec
from tracklayer.layers.spec import MoESpec, NormSpec
from tracklayer.models.common import (
    ATTENTION,
    OUTER,
    Config,
    activation,
    block,
    gqa,
    model,
    moe_names,
    need,
    num_experts,
    rope,
)
from tracklayer.models.spec import Family, ModelSpec


def spec(c: Config) -> ModelSpec:
    router = RouterSpec(
        num_experts=num_experts(c),
        top_k=need(c, "num_experts_per_tok"),
        score="sparsemixer",
        jitter=c.get("router_jitter_noise", 0.01),
        score_dtype="model",
        weights_dtype="model",
    )
    layer_norm = NormSpec(eps=c.get("rms_norm_eps", 1e-5), kind="layer", bias=True)
    trained = c.get("original_max_position_embeddings")
    given: Any = c.get("rope_parameters") or c.get("rope_scaling") or {}
    if trained and given:
        given = {"original_max_position_embeddings": trained, **given}
    bias, window = c.get("attention_bias", False), c.get("sliding_window")
    head_dim = need(c, "hidden_size") // need(c, "num_attention_heads")
    attention = gqa(
        c,
        rope=rope({**c, "rope_parameters": given}, head_dim, theta=1e6),
        qkv_bias=bias,
        out_bias=bias,
        window=window if window and window < c.get("max_position_embeddings", window + 1) else None,
    )
    moe = MoESpec(router=router, width=need(c, "intermediate_size"), activation=activation(c))
    head_bias = c.get("lm_head_bias", False)
    return model(c, lambda i: block(attention, moe, layer_norm), final_norm=layer_norm, head_bias=head_bias)


NAMES = {**OUTER, **ATTENTION, **moe_names("block_sparse_moe", "gate.weight", ("w1", "w3", "w2"))}
BIASED = ("layernorm", "model.norm", "lm_head")
BIASES = {
    theirs.replace("weight", "bias"): ours.replace("weight", "bias")
    for theirs, ours in NAMES.items()
    if any(word in theirs for word in BIASED)
}

FAMILY = Family(
    name="phimoe",
    architectures=("PhiMoEForCausalLM", "PhimoeForCausalLM"),
    spec=spec,
    names=NAMES | BIASES,
    note="the sparsemixer threshold is the config's, as in transformers (SGLang: constant 0.01, the published value)",
)
