"""Mixtral: softmax router that always renormalises, experts w1 (gate), w3 (up), w2 (down)."""

from __future__ import annotations

from tracklayer.kernels.topk import RouterSpec
from tracklayer.layers.spec import MoESpec
from tracklayer.models.common import (
    ATTENTION,
    OUTER,
    Config,
    activation,
    gqa,
    model,
    moe_names,
    need,
    norm,
    num_experts,
)
from tracklayer.models.spec import Family, ModelSpec, Sublayer


def spec(c: Config) -> ModelSpec:
    router = RouterSpec(num_experts=num_experts(c), top_k=need(c, "num_experts_per_tok"), renormalize=True)
    layer = (
        Sublayer(name="attn", body=gqa(c, window=c.get("sliding_window")), pre_norm=norm(c)),
        Sublayer(
            name="ffn",
            body=MoESpec(router=router, width=c["intermediate_size"], activation=activation(c)),
            pre_norm=norm(c),
        ),
    )
    return model(c, lambda i: layer)


FAMILY = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    spec=spec,
    names={**OUTER, **ATTENTION, **moe_names("block_sparse_moe", "gate.weight", ("w1", "w3", "w2"))},
)
