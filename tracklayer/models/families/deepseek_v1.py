"""DeepSeek-V1 MoE: softmax router, dense first layers, shared experts in one MLP, plain multi-head attention.

The scores are formed in the model's dtype, as the checkpoint's own code does (SGLang: float32); no scaling factor.
"""

from __future__ import annotations

from tracklayer.kernels.topk import RouterSpec
from tracklayer.layers.spec import MoESpec
from tracklayer.models.common import (
    PER_EXPERT,
    Config,
    activation,
    block,
    dense,
    gqa,
    model,
    need,
    norm,
    num_experts,
    shared_mlp,
)
from tracklayer.models.spec import Family, ModelSpec, Sublayer


def spec(c: Config) -> ModelSpec:
    router = RouterSpec(
        num_experts=num_experts(c),
        top_k=need(c, "num_experts_per_tok"),
        renormalize=c.get("norm_topk_prob", False),
        renorm_eps=1e-20,
        score_dtype="model",
    )
    width = need(c, "moe_intermediate_size")
    moe = MoESpec(
        router=router,
        width=width,
        activation=activation(c),
        shared=shared_mlp(c, c.get("n_shared_experts"), width),
    )
    bias = c.get("attention_bias", False)
    attention = gqa(c, qkv_bias=bias, out_bias=bias)
    first, every = c.get("first_k_dense_replace", 0), c.get("moe_layer_freq", 1)

    def layer(i: int) -> tuple[Sublayer, ...]:
        sparse = i >= first and i % every == 0
        return block(attention, moe if sparse else dense(c), norm(c))

    return model(c, layer)


FAMILY = Family(
    name="deepseek_v1",
    architectures=("DeepseekForCausalLM",),
    spec=spec,
    names=PER_EXPERT,
    layers_rule="i >= first_k_dense_replace and i % moe_layer_freq == 0",
    oracle="plain reference",
    note="scores in the model's dtype, as in the checkpoint's code (SGLang: float32)",
)
