"""DeepSeek-V2 / V2-Lite, V3 / R1 and V3.2, Kimi-K2 and GLM-4.7-Flash: latent attention, dense first layers, shared
experts in one MLP.

V2 chooses by softmax, greedily or among the groups with the best maximum (masked experts weigh 0). The others have the
float32 sigmoid router with a choice bias and groups by their top 2; Kimi-K2 is V3 with one group, K2.5 wraps it. V3.2
attends to the positions that its indexer chooses; without the published kernels' 8-bit rounding, as transformers does.
"""

from __future__ import annotations

from tracklayer.errors import CheckpointError
from tracklayer.kernels.topk import RouterSpec
from tracklayer.layers.spec import IndexerSpec, MoESpec
from tracklayer.models.common import (
    OUTER,
    PER_EXPERT,
    Config,
    activation,
    below,
    block,
    dense,
    model,
    need,
    noaux_router,
    norm,
    num_experts,
    shared_mlp,
    text,
)
from tracklayer.models.latent import mla, mla_names
from tracklayer.models.spec import Family, ModelSpec

LAYER = "model.layers.{i}"
NAMES = {
    **{theirs: ours for theirs, ours in PER_EXPERT.items() if "self_attn" not in theirs},
    **mla_names(f"{LAYER}.self_attn", "layers.{i}.attn"),
    **OUTER,
    f"{LAYER}.mlp.gate.e_score_correction_bias": "layers.{i}.ffn.router.choice_bias",
}
RULE = "i >= first_k_dense_replace"


def whole(c: Config, router: RouterSpec, indexer: IndexerSpec | None = None) -> ModelSpec:
    width = need(c, "moe_intermediate_size")
    moe = MoESpec(
        router=router,
        width=width,
        activation=activation(c),
        shared=shared_mlp(c, c.get("n_shared_experts"), width),
    )
    attention, kinds = mla(c, indexer=indexer), c.get("mlp_layer_types")
    first, every = c.get("first_k_dense_replace") or 0, c.get("moe_layer_freq") or 1

    def sparse(i: int) -> bool:
        return kinds[i] == "sparse" if kinds else i >= first and i % every == 0

    return model(c, lambda i: block(attention, moe if sparse(i) else dense(c), norm(c)))


def v2(c: Config) -> ModelSpec:
    method = c.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise CheckpointError(f"topk_method is {method!r}; greedy and group_limited_greedy are served")
    grouped = method == "group_limited_greedy"
    renormalize = bool(c.get("norm_topk_prob"))
    router = RouterSpec(
        num_experts=num_experts(c),
        top_k=need(c, "num_experts_per_tok"),
        num_groups=need(c, "n_group") if grouped else 1,
        topk_groups=need(c, "topk_group") if grouped else 1,
        group_score="max",
        group_mask=0.0,
        renormalize=renormalize,
        renorm_eps=1e-20,
        scale=1.0 if renormalize else c.get("routed_scaling_factor") or 1.0,
        gate_dtype="float32",
    )
    return whole(c, router)


def v3(c: Config) -> ModelSpec:
    c = text(c)
    return whole(c, noaux_router(c))


def v32(c: Config) -> ModelSpec:
    indexer = IndexerSpec(
        num_heads=need(c, "index_n_heads"), head_dim=need(c, "index_head_dim"), top_k=need(c, "index_topk")
    )
    need(c, "q_lora_rank")  # the indexer's queries come from it
    return whole(c, noaux_router(c), indexer)


def glm_lite(c: Config) -> ModelSpec:
    return v3({"first_k_dense_replace": 1, **c})


FAMILIES = (
    Family(
        name="deepseek_v2",
        architectures=("DeepseekV2ForCausalLM",),
        spec=v2,
        names=NAMES,
        layers_rule=f"{RULE} and i % moe_layer_freq == 0",
        note="norm_topk_prob renormalises instead of scaling, as in the model's own code (transformers ignores it)",
    ),
    Family(
        name="deepseek_v3",
        architectures=("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"),
        spec=v3,
        names=below(NAMES, "language_model."),
        ignored=(r"(vision_tower|mm_projector|vision_model|multi_modal_projector)\..*",),
        mtp_past_end=True,
        layers_rule=f"{RULE} and i % moe_layer_freq == 0",
    ),
    Family(
        name="deepseek_v32",
        architectures=("DeepseekV32ForCausalLM",),
        spec=v32,
        names={
            **NAMES,
            **{
                f"{LAYER}.self_attn.indexer.{part}": f"layers.{{i}}.attn.indexer.{part}"
                for part in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
            },
        },
        mtp_past_end=True,
        layers_rule=f"mlp_layer_types, else {RULE}",
        note="index scores unrounded, as in transformers (the published kernels: 8 bits); ties by the device's top-k",
    ),
    Family(
        name="glm4_moe_lite",
        architectures=("Glm4MoeLiteForCausalLM",),
        spec=glm_lite,
        names=NAMES,
        mtp_past_end=True,
        layers_rule=f"mlp_layer_types, else {RULE}",
        note="norms of the latents have eps 1e-6, as in transformers (SGLang: rms_norm_eps)",
    ),
)
