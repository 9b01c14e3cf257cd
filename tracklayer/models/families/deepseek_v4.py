"""DeepSeek-V4: experts of the first layers by token id, attention over a window and compressed entries, four streams.

Layers are of three kinds: window alone; with one entry for 128 tokens, all of them seen; with one for 4, overlapping,
of which an indexer chooses. Published files name tensors without a prefix and give compress_ratios; transformers saves
them below `model.` and gives layer_types: both are read. Only layers that compress have the stretched positions.
"""

from __future__ import annotations

from dataclasses import replace

from tracklayer.errors import CheckpointError
from tracklayer.kernels.topk import RouterSpec
from tracklayer.layers.spec import CompressedSpec, CompressorSpec, IndexerSpec, MLPSpec, MoESpec, RopeSpec, StreamsSpec
from tracklayer.models.common import (
    Config,
    activation,
    below,
    block,
    mlp_names,
    model,
    need,
    norm,
    num_experts,
    typed_rope,
)
from tracklayer.models.spec import Family, ModelSpec, Sublayer

WINDOW, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
RATIOS = {0: WINDOW, 4: SPARSE, 128: HEAVY}
SCORES = {"sqrtsoftplus": "sqrt_softplus", "softmax": "softmax", "sigmoid": "sigmoid"}


def kinds(c: Config) -> list[str]:
    """What attention each layer has; by default, as in transformers, two heavy, then heavy and sparse by turns."""
    count, ratios = need(c, "num_hidden_layers"), c.get("compress_ratios")
    named = c.get("layer_types") or (ratios and [RATIOS.get(ratio, ratio) for ratio in ratios])
    named = named or [SPARSE if i > 2 and i % 2 else HEAVY for i in range(count)]
    if len(named) < count or not set(named) <= {WINDOW, SPARSE, HEAVY}:
        raise CheckpointError(
            f"layer_types (or compress_ratios) must say {WINDOW} (0), {SPARSE} (4) or {HEAVY} (128) for each of "
            f"{count} layers, got {named}"
        )
    return list(named[:count])


def ropes(c: Config) -> tuple[RopeSpec, RopeSpec]:
    """Rotation in layers with a window alone, and in those that compress; YaRN's factor on attention is not used."""
    width, old = need(c, "head_dim"), c.get("rope_parameters") or c.get("rope_scaling") or {}
    partial = c.get("partial_rotary_factor") or (c.get("qk_rope_head_dim") or width / 8) / width
    if not isinstance(old.get("main"), dict):
        far = {**old, "rope_theta": c.get("compress_rope_theta", 160000.0)}
        old = {"main": {"rope_theta": c.get("rope_theta", 10000.0)}, "compress": far}
    c = {**c, "rope_parameters": old, "partial_rotary_factor": partial}
    plain, stretched = (typed_rope(c, kind, width, interleaved=True) for kind in ("main", "compress"))
    scaling = stretched.scaling and {"attention_factor": 1.0, **stretched.scaling}
    return plain, replace(stretched, scaling=scaling)


def attention(c: Config, kind: str) -> CompressedSpec:
    rates = {
        SPARSE: c.get("compress_rate_csa", 4),
        HEAVY: c.get("compress_rate_hca", 128),
        **c.get("compress_rates", {}),
    }
    compressor = None
    if kind != WINDOW:
        indexer = IndexerSpec(
            num_heads=need(c, "index_n_heads"), head_dim=need(c, "index_head_dim"), top_k=need(c, "index_topk")
        )
        sparse = kind == SPARSE
        compressor = CompressorSpec(rate=rates[kind], overlap=sparse, indexer=indexer if sparse else None)
    return CompressedSpec(
        num_heads=need(c, "num_attention_heads"),
        width=need(c, "head_dim"),
        q_lora_rank=need(c, "q_lora_rank"),
        rope=ropes(c)[compressor is not None],
        norm=norm(c),
        window=need(c, "sliding_window"),
        groups=need(c, "o_groups"),
        group_rank=need(c, "o_lora_rank"),
        compressor=compressor,
    )


def spec(c: Config) -> ModelSpec:
    width, limit, mixers = need(c, "moe_intermediate_size"), c.get("swiglu_limit", 10.0), kinds(c)
    router = RouterSpec(
        num_experts=num_experts(c),
        top_k=need(c, "num_experts_per_tok"),
        score=SCORES[c.get("scoring_func", "sqrtsoftplus")],
        choice_bias=True,
        renormalize=True,
        renorm_eps=1e-20,
        scale=c.get("routed_scaling_factor", 1.5),
    )
    routers = {"moe": router, "hash_moe": replace(router, choice_bias=False, hash_vocab=need(c, "vocab_size"))}
    hashed = c.get("num_hash_layers", 3)
    ffns = c.get("mlp_layer_types") or ["hash_moe" if i < hashed else "moe" for i in range(len(mixers))]
    shared = MLPSpec(width=width * c.get("n_shared_experts", 1), activation=activation(c), clamp_before=limit)

    def layer(i: int) -> tuple[Sublayer, ...]:
        experts = {"width": width, "activation": activation(c), "clamp_before": limit, "shared": shared}
        return block(attention(c, mixers[i]), MoESpec(router=routers[ffns[i]], **experts), norm(c))

    eps = c.get("rms_norm_eps", 1e-6)
    count, iterations = c.get("hc_mult", 4), c.get("hc_sinkhorn_iters", 20)
    streams = StreamsSpec(count=count, iterations=iterations, eps=c.get("hc_eps", 1e-6), norm_eps=eps)
    return model(c, layer, streams=streams)


LAYER, MIX = "layers.{i}", ("fn", "base", "scale")
MADE = {"wkv.weight": "kv.weight", "wgate.weight": "gate.weight", "ape": "bias", "norm.weight": "norm.weight"}
ATTENTION = {
    **{f"w{p}.weight": f"{p}.weight" for p in ("q_a", "q_b", "kv", "o_a", "o_b")},
    **{name: name for name in ("q_norm.weight", "kv_norm.weight")},
    "norm.weight": "kv_norm.weight",  # so transformers saves it
    "attn_sink": "sinks",
    "indexer.wq_b.weight": "indexer.q_b.weight",
    "indexer.weights_proj.weight": "indexer.weights.weight",
    **{f"{at}compressor.{t}": f"{at}compressor.{o}" for at in ("", "indexer.") for t, o in MADE.items()},
}
NAMES = {
    **{f"{LAYER}.attn.{theirs}": f"{LAYER}.attn.{ours}" for theirs, ours in ATTENTION.items()},
    **{f"{LAYER}.hc_{sub}_{p}": f"{LAYER}.{sub}.streams.{p}" for sub in ("attn", "ffn") for p in MIX},
    **{f"{LAYER}.{sub}_norm.weight": f"{LAYER}.{sub}.norm.weight" for sub in ("attn", "ffn")},
    **mlp_names(f"{LAYER}.ffn.experts.{{j}}", f"{LAYER}.ffn.experts.{{j}}", ("w1", "w3", "w2")),
    **mlp_names(f"{LAYER}.ffn.shared_experts", f"{LAYER}.ffn.shared", ("w1", "w3", "w2")),
    f"{LAYER}.ffn.gate.weight": f"{LAYER}.ffn.router.weight",
    f"{LAYER}.ffn.gate.bias": f"{LAYER}.ffn.router.choice_bias",
    f"{LAYER}.ffn.gate.tid2eid": f"{LAYER}.ffn.router.table",
    **{f"hc_head{at}{p}": f"streams.{p}" for at in ("_", ".hc_") for p in MIX},
    **{"embed.weight": "embed.weight", "embed_tokens.weight": "embed.weight"},
    **{"norm.weight": "norm.weight", "head.weight": "head.weight"},
}

FAMILY = Family(
    name="deepseek_v4",
    architectures=("DeepseekV4ForCausalLM",),
    spec=spec,
    names=below(NAMES, "model."),
    ignored=(r"mtp\..*",),
    layers_rule="all; of these mlp_layer_types, else the first num_hash_layers, by token id",
    note="the gate product has the model's dtype, as in transformers (SGLang: float32); index scores unrounded",
)
