"""Qwen3-Next and Qwen3.5-MoE: three of four layers are Gated DeltaNet, the others attention with an output gate.

Norm weights are 1 + w, but for DeltaNet's own. Softmax router, gated shared expert. Next keeps its projections
interleaved by key head and renormalises by `norm_topk_prob`; 3.5 keeps them apart, always renormalises, and its
multi-axis positions are plain ones for text.
"""

from __future__ import annotations

from typing import Any

from tracklayer.kernels.topk import RouterSpec
from tracklayer.layers.recurrent_spec import GatedDeltaSpec
from tracklayer.layers.spec import AttentionSpec, MLPSpec, MoESpec
from tracklayer.models.common import (
    Config,
    activation,
    block,
    dense,
    gqa,
    model,
    need,
    norm,
    num_experts,
    rope,
    text,
)
from tracklayer.models.families.qwen_moe import MOE
from tracklayer.models.spec import Family, ModelSpec, Split, Sublayer

LAYER, OURS = "model.layers.{i}", "layers.{i}"


def spec(c: Config, renormalize: bool) -> ModelSpec:
    c = {"partial_rotary_factor": 0.25, **c}
    router = RouterSpec(
        num_experts=num_experts(c),
        top_k=need(c, "num_experts_per_tok"),
        renormalize=renormalize,
        weights_dtype="model",
    )
    shared = MLPSpec(width=need(c, "shared_expert_intermediate_size"), activation=activation(c))
    moe = MoESpec(
        router=router, width=need(c, "moe_intermediate_size"), activation=activation(c), shared=shared, shared_gate=True
    )
    rms, bias = norm(c, offset=1.0), c.get("attention_bias", False)
    turn = rope(c, need(c, "head_dim"), theta=1e7)
    attention = gqa(c, qk_norm="head", norm=rms, out_gate="channel", qkv_bias=bias, out_bias=bias, rope=turn)
    delta = GatedDeltaSpec(
        num_heads=need(c, "linear_num_value_heads"),
        num_key_heads=need(c, "linear_num_key_heads"),
        key_dim=need(c, "linear_key_head_dim"),
        value_dim=need(c, "linear_value_head_dim"),
        conv=c.get("linear_conv_kernel_dim") or 4,
        norm=norm(c),
    )
    every = c.get("full_attention_interval") or 4
    kinds = c.get("layer_types") or [
        "full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(need(c, "num_hidden_layers"))
    ]

    def layer(i: int) -> tuple[Sublayer, ...]:
        sparse = i not in (c.get("mlp_only_layers") or ()) and (i + 1) % (c.get("decoder_sparse_step") or 1) == 0
        mixer = attention if kinds[i] == "full_attention" else delta
        return block(mixer, moe if sparse else dense(c), rms)

    return model(c, layer, final_norm=rms)


def by_head(tensor: Any, heads: int, *widths: int) -> tuple[Any, ...]:
    """Rows in groups of one head, each of `widths` -> the parts, each with the rows of all heads in order."""
    parts = tensor.unflatten(0, (heads, -1)).split(list(widths), 1)
    return tuple(part.flatten(0, 1) for part in parts)


def cut_queries(tensor: Any, spec: ModelSpec) -> tuple[Any, ...]:
    attention = spec.bodies(AttentionSpec)[0]
    return by_head(tensor, attention.num_heads, attention.head_dim, attention.head_dim)


def cut_qkvz(tensor: Any, spec: ModelSpec) -> tuple[Any, ...]:
    delta = spec.bodies(GatedDeltaSpec)[0]
    values = delta.num_heads // delta.num_key_heads * delta.value_dim
    return by_head(tensor, delta.num_key_heads, delta.key_dim, delta.key_dim, values, values)


def cut_ba(tensor: Any, spec: ModelSpec) -> tuple[Any, ...]:
    delta = spec.bodies(GatedDeltaSpec)[0]
    return by_head(tensor, delta.num_key_heads, *[delta.num_heads // delta.num_key_heads] * 2)


def ours(*names: str) -> tuple[str, ...]:
    return tuple(f"{OURS}.attn.{name}.weight" for name in names)


def wrapped(table: dict[str, Any]) -> dict[str, Any]:
    """The table with the names below `model.` also as the multimodal wrapper has them."""
    return table | {name.replace("model.", "model.language_model.", 1): to for name, to in table.items()}


QUERIES = {f"{LAYER}.self_attn.q_proj.weight": Split(ours("q", "gate"), cut_queries)}
NAMES = {
    **{theirs: name for theirs, name in MOE.items() if "self_attn.q_proj" not in theirs},
    **{f"{LAYER}.linear_attn.{name}": f"{OURS}.attn.{name}" for name in ("A_log", "dt_bias")},
    f"{LAYER}.linear_attn.norm.weight": f"{OURS}.attn.out_norm.weight",
    f"{LAYER}.linear_attn.conv1d.weight": f"{OURS}.attn.conv.weight",
    f"{LAYER}.linear_attn.out_proj.weight": f"{OURS}.attn.o.weight",
}
APART = {f"{LAYER}.linear_attn.in_proj_{name}.weight": f"{OURS}.attn.{name}.weight" for name in ("qkv", "z", "b", "a")}
STACKED = {
    f"{LAYER}.mlp.experts.{theirs}_proj": f"{OURS}.ffn.experts.{theirs}.weight" for theirs in ("gate_up", "down")
}
TRANSFORMS = {f"{OURS}.attn.conv.weight": lambda weight, shape: weight.view(shape)}
RULE = "i not in mlp_only_layers and (i + 1) % decoder_sparse_step == 0"

FAMILIES = (
    Family(
        name="qwen3_next",
        architectures=("Qwen3NextForCausalLM",),
        spec=lambda c: spec(c, c.get("norm_topk_prob", True)),
        names=NAMES,
        splits={
            **QUERIES,
            f"{LAYER}.linear_attn.in_proj_qkvz.weight": Split(ours("q", "k", "v", "z"), cut_qkvz),
            f"{LAYER}.linear_attn.in_proj_ba.weight": Split(ours("b", "a"), cut_ba),
        },
        transforms=TRANSFORMS,
        ignored=(r"mtp\..*",),
        layers_rule=RULE,
    ),
    Family(
        name="qwen3_5_moe",
        architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        spec=lambda c: spec(text(c), True),
        names=wrapped({**NAMES, **APART, **STACKED}),
        splits=wrapped(QUERIES),
        transforms=TRANSFORMS,
        ignored=(r"mtp\..*", r"(model\.)?visual\..*"),
    ),
)
