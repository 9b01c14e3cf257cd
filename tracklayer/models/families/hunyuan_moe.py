"""Hunyuan-MoE (A13B): float32 softmax router that always renormalises, one shared MLP, q/k norms after the rotation,
NTK-alpha rotary embedding. Expert count, top-k, widths and shared experts may differ by layer (lists).

transformers always has the shared MLP and renormalises; SGLang does so only with use_mixed_mlp_moe and top-k above 1.
The config's own use_mixed_mlp_moe is honoured when it is there; renormalising one weight alone is not offered.
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
    mlp_names,
    model,
    need,
    norm,
    per_layer,
    shared_mlp,
)
from tracklayer.models.spec import Family, ModelSpec, Sublayer

LAYER = "model.layers.{i}"


def spec(c: Config) -> ModelSpec:
    bias = c.get("attention_bias", False)
    c = {**c, "head_dim": c.get("head_dim") or c.get("attention_head_dim")}
    qk_norm = "head" if c.get("use_qk_norm", True) else None
    attention = gqa(c, qkv_bias=bias, out_bias=bias, qk_norm=qk_norm, qk_norm_after_rope=True)

    def layer(i: int) -> tuple[Sublayer, ...]:
        router = RouterSpec(
            num_experts=per_layer(need(c, "num_experts", "num_local_experts"), i),
            top_k=per_layer(need(c, "moe_topk", "num_experts_per_tok"), i),
            renormalize=True,
            gate_dtype="float32",
        )
        mixed = c.get("use_mixed_mlp_moe", True)
        shared = per_layer(c.get("num_shared_expert") or 1, i) if mixed else 0
        moe = MoESpec(
            router=router,
            width=per_layer(need(c, "moe_intermediate_size", "intermediate_size"), i),
            activation=activation(c),
            shared=shared_mlp(c, shared, need(c, "intermediate_size")),
        )
        return block(attention, moe, norm(c))

    return model(c, layer)


FAMILY = Family(
    name="hunyuan_moe",
    architectures=("HunYuanMoEV1ForCausalLM",),
    spec=spec,
    names={
        **PER_EXPERT,
        **mlp_names(f"{LAYER}.mlp.shared_mlp", "layers.{i}.ffn.shared"),
        f"{LAYER}.mlp.gate.wg.weight": "layers.{i}.ffn.router.weight",
        f"{LAYER}.self_attn.query_layernorm.weight": "layers.{i}.attn.q_norm.weight",
        f"{LAYER}.self_attn.key_layernorm.weight": "layers.{i}.attn.k_norm.weight",
    },
    note="always renormalises, as transformers does (SGLang: only for top-k above 1)",
)
