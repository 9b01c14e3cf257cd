"""XVERSE-MoE: float32 softmax router that always renormalises, shared experts in one MLP, multi-head attention.

The dense XVERSE models have the same architecture string: `num_experts` in the config is the only sign of this one.
The checkpoint's own code divides by (sum + 1e-6); SGLang looks for a key that the config does not have and does not
renormalise. The checkpoint was trained with its own code, so that is what is done here.
"""

from __future__ import annotations

from tracklayer.kernels.topk import RouterSpec
from tracklayer.layers.spec import MoESpec
from tracklayer.models.common import (
    PER_EXPERT,
    Config,
    activation,
    block,
    gqa,
    model,
    need,
    norm,
    num_experts,
    rope,
    shared_mlp,
)
from tracklayer.models.spec import Family, ModelSpec


def spec(c: Config) -> ModelSpec:
    router = RouterSpec(
        num_experts=num_experts(c),
        top_k=need(c, "moe_top_k", "num_experts_per_tok"),
        renormalize=True,
        renorm_eps=1e-6,
        gate_dtype="float32",
    )
    width = need(c, "intermediate_size")
    moe = MoESpec(
        router=router,
        width=width,
        activation=activation(c),
        shared=shared_mlp(c, c.get("num_shared_experts"), width),
    )
    head_dim = need(c, "hidden_size") // need(c, "num_attention_heads")
    attention = gqa(c, rope=rope(c, head_dim, theta=500000.0))
    return model(c, lambda i: block(attention, moe, norm(c)))


FAMILY = Family(
    name="xverse_moe",
    architectures=("XverseForCausalLM",),
    spec=spec,
    names={**PER_EXPERT, "model.layers.{i}.mlp.router.weight": "layers.{i}.ffn.router.weight"},
    claims=lambda c: bool(c.get("num_experts")),
    oracle="plain reference",
    note="renormalises as the checkpoint's code does (SGLang does not); told from dense XVERSE by num_experts",
)
