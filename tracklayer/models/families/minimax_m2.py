"""MiniMax-M2: sigmoid router with a choice bias that renormalises without epsilon, q/k norms over the whole
projection, partial rotary embedding by `rotary_dim`. The gate product has the model's dtype (SGLang: float32)."""

from __future__ import annotations

from tracklayer.kernels.topk import RouterSpec
from tracklayer.layers.spec import MoESpec
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
    norm,
    num_experts,
    rope,
)
from tracklayer.models.spec import Family, ModelSpec


def spec(c: Config) -> ModelSpec:
    router = RouterSpec(
        num_experts=num_experts(c),
        top_k=need(c, "num_experts_per_tok"),
        score="sigmoid",
        choice_bias=c.get("use_routing_bias", True),
        renormalize=True,
    )
    head_dim = c.get("head_dim") or need(c, "hidden_size") // need(c, "num_attention_heads")
    partial = {"partial_rotary_factor": c["rotary_dim"] / head_dim} if c.get("rotary_dim") else {}
    attention = gqa(
        c,
        qk_norm="whole" if c.get("use_qk_norm", True) else None,
        rope=rope({**c, **partial}, head_dim, theta=5e6),
    )
    moe = MoESpec(router=router, width=need(c, "intermediate_size"), activation=activation(c))
    return model(c, lambda i: block(attention, moe, norm(c)))


FAMILY = Family(
    name="minimax_m2",
    architectures=("MiniMaxM2ForCausalLM",),
    spec=spec,
    names={
        **OUTER,
        **ATTENTION,
        **moe_names("block_sparse_moe", "gate.weight", ("w1", "w3", "w2")),
        "model.layers.{i}.block_sparse_moe.e_score_correction_bias": "layers.{i}.ffn.router.choice_bias",
    },
    mtp_past_end=True,
    note="the gate product has the model's dtype, as in transformers (SGLang: float32)",
)
