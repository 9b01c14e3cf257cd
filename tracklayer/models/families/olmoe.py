"""OLMoE: softmax router (renormalised by `norm_topk_prob`), q/k norms over the whole projection, optional clipping."""

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
    router = RouterSpec(
        num_experts=num_experts(c),
        top_k=need(c, "num_experts_per_tok"),
        renormalize=c.get("norm_topk_prob", False),
        weights_dtype="model",
    )
    bias = c.get("attention_bias", False)
    rms = norm(c, eps=c.get("rms_norm_eps", 1e-5))
    attention = gqa(c, qk_norm="whole", qkv_bias=bias, out_bias=bias, norm=rms, clip_qkv=c.get("clip_qkv"))
    moe = MoESpec(router=router, width=need(c, "intermediate_size"), activation=activation(c))
    layer = (Sublayer(name="attn", body=attention, pre_norm=rms), Sublayer(name="ffn", body=moe, pre_norm=rms))
    return model(c, lambda i: layer, final_norm=rms)


FAMILY = Family(
    name="olmoe",
    architectures=("OlmoeForCausalLM",),
    spec=spec,
    names={**OUTER, **ATTENTION, **moe_names("mlp", "gate.weight")},
)
