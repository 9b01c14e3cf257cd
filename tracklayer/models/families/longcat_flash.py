"""LongCat-Flash: a layer is latent attention, dense MLP, latent attention, dense MLP, and one MoE that reads what the
first MLP reads and is added at the layer's end.

Some experts are no experts: ids from n_routed_experts on return their input, times the weight. They are chosen,
weighted and recorded like the others, under their own ids. Without renormalisation, the bias is for the choice only.
"""

from __future__ import annotations

from tracklayer.errors import CheckpointError
from tracklayer.kernels.topk import RouterSpec
from tracklayer.layers.spec import MLPSpec, MoESpec, NormSpec
from tracklayer.models.common import OUTER, Config, activation, mlp_names, model, need, norm, num_experts
from tracklayer.models.latent import mla, mla_names
from tracklayer.models.spec import Family, ModelSpec, Sublayer

LAYER, OURS = "model.layers.{i}", "layers.{i}"


def spec(c: Config) -> ModelSpec:
    c = {**c, "num_hidden_layers": need(c, "num_layers")}  # transformers' num_hidden_layers counts the attentions
    if c.get("zero_expert_type", "identity") != "identity":
        raise CheckpointError(f"zero_expert_type is {c['zero_expert_type']!r}; only 'identity' is served")
    router = RouterSpec(
        num_experts=num_experts(c),
        top_k=need(c, "moe_topk", "num_experts_per_tok"),
        choice_bias=True,
        num_zero_experts=c.get("zero_expert_num") or 0,
        scale=c.get("routed_scaling_factor") or 1.0,
        gate_dtype="float32",
    )
    width = need(c, "expert_ffn_hidden_size", "moe_intermediate_size")
    moe = MoESpec(router=router, width=width, activation=activation(c))
    dense = MLPSpec(width=need(c, "ffn_hidden_size", "intermediate_size"), activation=activation(c))
    hidden = need(c, "hidden_size")
    attention = mla(
        c,
        q_scale=(hidden / need(c, "q_lora_rank")) ** 0.5 if c.get("mla_scale_q_lora", True) else 1.0,
        kv_scale=(hidden / need(c, "kv_lora_rank")) ** 0.5 if c.get("mla_scale_kv_lora", True) else 1.0,
    )
    rms: NormSpec = norm(c, eps=c.get("rms_norm_eps", 1e-5))
    layer = (
        Sublayer(name="attn0", body=attention, pre_norm=rms),
        Sublayer(name="ffn", body=moe, pre_norm=rms, deferred=True),
        Sublayer(name="mlp0", body=dense, pre_norm=None, parallel=True),
        Sublayer(name="attn1", body=attention, pre_norm=rms),
        Sublayer(name="mlp1", body=dense, pre_norm=rms),
    )
    return model(c, lambda i: layer, final_norm=rms)


FAMILY = Family(
    name="longcat_flash",
    architectures=("LongcatFlashForCausalLM",),
    spec=spec,
    names={
        **OUTER,
        **mla_names(f"{LAYER}.self_attn.0", f"{OURS}.attn0"),
        **mla_names(f"{LAYER}.self_attn.1", f"{OURS}.attn1"),
        **mlp_names(f"{LAYER}.mlps.0", f"{OURS}.mlp0"),
        **mlp_names(f"{LAYER}.mlps.1", f"{OURS}.mlp1"),
        **mlp_names(f"{LAYER}.mlp.experts.{{j}}", f"{OURS}.ffn.experts.{{j}}"),
        f"{LAYER}.input_layernorm.0.weight": f"{OURS}.attn0.norm.weight",
        f"{LAYER}.input_layernorm.1.weight": f"{OURS}.attn1.norm.weight",
        f"{LAYER}.post_attention_layernorm.0.weight": f"{OURS}.ffn.norm.weight",
        f"{LAYER}.post_attention_layernorm.1.weight": f"{OURS}.mlp1.norm.weight",
        f"{LAYER}.mlp.router.classifier.weight": f"{OURS}.ffn.router.weight",
        f"{LAYER}.mlp.router.e_score_correction_bias": f"{OURS}.ffn.router.choice_bias",
    },
    # transformers saves gate and up of zero experts too, which nothing reads; a real expert's are never surplus
    ignored=(r"model\.mtp.*", r"model\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up)_proj\.weight"),
    note="the identity part is scaled like the rest, as in transformers and vLLM (SGLang: only the real experts)",
)
