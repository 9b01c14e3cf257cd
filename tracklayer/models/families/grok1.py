"""Grok-1: float32 softmax router, top 2 without renormalising; sandwich norms; softcapped attention; gelu experts.

The model's own code (JAX) caps neither the router's logits nor divides the weights; SGLang caps them, vLLM caps and
divides. The ids agree (tanh is monotone), the weights do not, though the norm after the block cancels what is common to
a token's weights. Here it is as in the model's own code, unless the config
itself names a router_logit_softcapping.
"""

from __future__ import annotations

from tracklayer.kernels.topk import RouterSpec
from tracklayer.layers.spec import MoESpec
from tracklayer.models.common import OUTER, Config, block, gqa, mlp_names, model, need, norm, num_experts
from tracklayer.models.spec import Family, ModelSpec

LAYER = "model.layers.{i}"


def spec(c: Config) -> ModelSpec:
    rms = norm(c, eps=c.get("rms_norm_eps", 1e-5))
    router = RouterSpec(
        num_experts=num_experts(c),
        top_k=need(c, "num_experts_per_tok"),
        softcap=c.get("router_logit_softcapping") or None,
        gate_dtype="float32",
    )
    attention = gqa(
        c,
        scale=c.get("attn_output_multiplier", 128**-0.5),
        softcap=c.get("attn_logit_softcapping", 30.0),
        norm=rms,
    )
    moe = MoESpec(router=router, width=need(c, "moe_intermediate_size", "intermediate_size"), activation="gelu_tanh")
    return model(
        c,
        lambda i: block(attention, moe, rms, rms),
        final_norm=rms,
        embed_scale=c.get("embedding_multiplier_scale", 78.38367176906169),
        logit_scale=c.get("output_multiplier_scale", 0.5773502691896257),
    )


# Two conversions of the JAX checkpoint go about: experts as linear, linear_v, linear_1 below moe_block and norms called
# scale; or w1, w3, w2 below block_sparse_moe.
NAMES = {
    **OUTER,
    **{f"{LAYER}.attn.{p}_proj.weight": f"layers.{{i}}.attn.{p}.weight" for p in "qkvo"},
    f"{LAYER}.block_sparse_moe.gate.weight": "layers.{i}.ffn.router.weight",
    f"{LAYER}.moe_block.gate.weight": "layers.{i}.ffn.router.weight",
    **mlp_names(f"{LAYER}.block_sparse_moe.experts.{{j}}", "layers.{i}.ffn.experts.{j}", ("w1", "w3", "w2")),
    **mlp_names(f"{LAYER}.moe_block.experts.{{j}}", "layers.{i}.ffn.experts.{j}", ("linear", "linear_v", "linear_1")),
    "model.norm.scale": "norm.weight",
}
for _word in ("weight", "scale"):
    for _theirs, _ours in {
        "pre_attn_norm": "attn.norm",
        "post_attn_norm": "attn.post_norm",
        "pre_moe_norm": "ffn.norm",
        "post_moe_norm": "ffn.post_norm",
    }.items():
        NAMES[f"{LAYER}.{_theirs}.{_word}"] = f"layers.{{i}}.{_ours}.weight"

FAMILY = Family(
    name="grok1",
    architectures=("Grok1ModelForCausalLM", "Grok1ForCausalLM"),
    spec=spec,
    names=NAMES,
    oracle="plain reference",
    note="the router is the JAX code's: no softcap unless the config names one, no renormalising (vLLM: both)",
)
