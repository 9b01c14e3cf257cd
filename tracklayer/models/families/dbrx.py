"""DBRX: softmax router normalised by a p-norm, layer norms without bias, fused and clipped qkv, flat expert tensors.

transformers divides by the norm of order moe_normalize_expert_weights (none: not at all) in the model's dtype; SGLang
always divides by the sum, in float32. They agree for the published value 1.0; here it is as in transformers. The rotary
base is attn_config's, as in the checkpoint's own code and SGLang (transformers 5.24 does not look there).
"""

from __future__ import annotations

from typing import Any

from tracklayer.kernels.topk import RouterSpec
from tracklayer.layers.spec import AttentionSpec, MoESpec, NormSpec, RopeSpec
from tracklayer.models.common import Config, activation, block, model, need
from tracklayer.models.spec import Family, ModelSpec

BLOCK = "transformer.blocks.{i}"


def spec(c: Config) -> ModelSpec:
    ffn, attn = need(c, "ffn_config"), need(c, "attn_config")
    order = ffn.get("moe_normalize_expert_weights", 1.0)
    router = RouterSpec(
        num_experts=need(ffn, "moe_num_experts"),
        top_k=need(ffn, "moe_top_k"),
        renormalize=order is not None,
        renorm_p=1.0 if order is None else float(order),
        score_dtype="model",
        weights_dtype="model",
    )
    heads, width = need(c, "n_heads"), need(c, "d_model")
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=attn.get("kv_n_heads") or heads,
        head_dim=width // heads,
        rope=RopeSpec(dim=width // heads, theta=float(attn.get("rope_theta", 10000.0))),
        clip_qkv=attn.get("clip_qkv"),
    )
    act = activation({"hidden_act": (ffn.get("ffn_act_fn") or {}).get("name", "silu")})
    moe = MoESpec(router=router, width=need(ffn, "ffn_hidden_size"), activation=act)
    layer_norm = NormSpec(eps=1e-5, kind="layer")
    usual = {"hidden_size": width, "num_hidden_layers": need(c, "n_layers")}
    return model(
        {**c, **usual},
        lambda i: block(attention, moe, layer_norm),
        final_norm=layer_norm,
        context_length=c.get("max_seq_len", 2048),
    )


def unflatten(flat: Any, shape: Any) -> Any:
    """[E * F, D] -> [E, F, D]."""
    return flat.view(shape)


def unflatten_down(flat: Any, shape: Any) -> Any:
    """[E * F, D] -> [E, D, F]: the checkpoint multiplies from the other side."""
    num_experts, width, inner = shape
    return flat.view(num_experts, inner, width).transpose(1, 2)


FAMILY = Family(
    name="dbrx",
    architectures=("DbrxForCausalLM",),
    spec=spec,
    names={
        "transformer.wte.weight": "embed.weight",
        "transformer.norm_f.weight": "norm.weight",
        "lm_head.weight": "head.weight",
        f"{BLOCK}.norm_attn_norm.norm_1.weight": "layers.{i}.attn.norm.weight",
        f"{BLOCK}.norm_attn_norm.norm_2.weight": "layers.{i}.ffn.norm.weight",
        f"{BLOCK}.norm_attn_norm.attn.Wqkv.weight": "layers.{i}.attn.qkv.weight",
        f"{BLOCK}.norm_attn_norm.attn.out_proj.weight": "layers.{i}.attn.o.weight",
        f"{BLOCK}.ffn.router.layer.weight": "layers.{i}.ffn.router.weight",
        f"{BLOCK}.ffn.experts.mlp.w1": "layers.{i}.ffn.experts.gate.weight",
        f"{BLOCK}.ffn.experts.mlp.v1": "layers.{i}.ffn.experts.up.weight",
        f"{BLOCK}.ffn.experts.mlp.w2": "layers.{i}.ffn.experts.down.weight",
    },
    transforms={
        "layers.{i}.ffn.experts.gate.weight": unflatten,
        "layers.{i}.ffn.experts.up.weight": unflatten,
        "layers.{i}.ffn.experts.down.weight": unflatten_down,
    },
    note="the weights' norm has the config's order, as in transformers (SGLang: always the sum)",
)
