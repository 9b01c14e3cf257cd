"""Cohere2-MoE: attention and MLP side by side behind one norm; top-k on raw logits, then softmax or sigmoid; shared
experts summed or averaged with the routed; only sliding layers (and a dense prefix without windows) have positions.

The norm is an RMS norm if rms_norm_eps is set, else mean-centred: both have one weight of the model's width, so the
config alone can tell.
"""

from __future__ import annotations

from dataclasses import replace

from tracklayer.kernels.topk import RouterSpec
from tracklayer.layers.spec import MoESpec, NormSpec
from tracklayer.models.common import (
    PER_EXPERT,
    Config,
    activation,
    dense,
    gqa,
    model,
    need,
    num_experts,
    rope,
    shared_mlp,
)
from tracklayer.models.spec import Family, ModelSpec, Sublayer


def layer_kinds(c: Config) -> tuple[list[bool], list[bool]]:
    """(slides, is MoE) of each layer; the dense prefix has a window pattern of its own."""
    count, prefix = need(c, "num_hidden_layers"), c.get("first_k_dense_replace") or 0
    sparse = [i >= prefix for i in range(count)]
    if c.get("mlp_layer_types"):
        sparse = [kind == "sparse" for kind in c["mlp_layer_types"]]
    if c.get("layer_types"):
        return [kind == "sliding_attention" for kind in c["layer_types"]], sparse
    early, late = c.get("prefix_dense_sliding_window_pattern", 1), c.get("sliding_window_pattern", 4)
    rest = [(i + 1) % late != 0 for i in range(count - prefix)]
    return [(i + 1) % early != 0 for i in range(prefix)] + rest, sparse


def spec(c: Config) -> ModelSpec:
    sigmoid = c.get("expert_selection_fn", "softmax") == "sigmoid"
    router = RouterSpec(
        num_experts=num_experts(c),
        top_k=need(c, "num_experts_per_tok"),
        after_topk=True,
        score="sigmoid" if sigmoid else "softmax",
        renormalize=sigmoid and c.get("norm_topk_prob", True),
        weights_dtype="model",
    )
    width = need(c, "intermediate_size")
    shared = shared_mlp(c, c.get("num_shared_experts"), width)
    averaged = shared is not None and c.get("shared_expert_combination_strategy", "average") == "average"
    moe = MoESpec(
        router=router, width=width, activation=activation(c), shared=shared, output_scale=0.5 if averaged else 1.0
    )
    rms = c.get("rms_norm_eps")
    one_norm = NormSpec(eps=c.get("layer_norm_eps", 1e-5), kind="layer") if rms is None else NormSpec(eps=rms)
    bias, head_dim = c.get("attention_bias", False), need(c, "head_dim")
    turned = gqa(c, qkv_bias=bias, out_bias=bias, rope=rope(c, head_dim, interleaved=True))
    slides, sparse = layer_kinds(c)

    def layer(i: int) -> tuple[Sublayer, ...]:
        attention = replace(turned, window=c.get("sliding_window")) if slides[i] else turned
        if not slides[i] and (sparse[i] or c.get("prefix_dense_sliding_window_pattern", 1) != 1):
            attention = replace(turned, rope=None)
        ffn = moe if sparse[i] else dense(c, "prefix_dense_intermediate_size")
        return (
            Sublayer(name="attn", body=attention, pre_norm=one_norm),
            Sublayer(name="ffn", body=ffn, pre_norm=None, parallel=True),
        )

    return model(
        c,
        layer,
        final_norm=one_norm,
        logit_scale=c.get("logit_scale", 0.0625),
        tie_embeddings=c.get("tie_word_embeddings", True),
    )


FAMILY = Family(
    name="cohere2_moe",
    architectures=("Cohere2MoeForCausalLM",),
    spec=spec,
    names={theirs: ours for theirs, ours in PER_EXPERT.items() if "post_attention" not in theirs},
    layers_rule="mlp_layer_types, else i >= first_k_dense_replace",
    note="RMS norm if rms_norm_eps is set, else layer norm: the tensors look the same",
)
