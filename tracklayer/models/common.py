"""What many families share: reading a Hugging Face config, and tables of tensor names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tracklayer.errors import CheckpointError
from tracklayer.kernels.topk import RouterSpec
from tracklayer.layers.spec import AttentionSpec, MLPSpec, MoESpec, NormSpec, RopeSpec
from tracklayer.models.spec import ModelSpec, Sublayer

Config = dict[str, Any]

ATTENTION = {
    "model.layers.{i}.input_layernorm.weight": "layers.{i}.attn.norm.weight",
    **{
        f"model.layers.{{i}}.self_attn.{p}_proj.{kind}": f"layers.{{i}}.attn.{p}.{kind}"
        for p in "qkvo"
        for kind in ("weight", "bias")
    },
    "model.layers.{i}.self_attn.q_norm.weight": "layers.{i}.attn.q_norm.weight",
    "model.layers.{i}.self_attn.k_norm.weight": "layers.{i}.attn.k_norm.weight",
}
OUTER = {
    "model.embed_tokens.weight": "embed.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}


def mlp_names(
    theirs: str, ours: str, spelling: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, str]:
    """Names of one gated MLP's three matrices below the prefixes `theirs` and `ours`."""
    return {f"{theirs}.{t}.weight": f"{ours}.{o}.weight" for t, o in zip(spelling, ("gate", "up", "down"), strict=True)}


def moe_names(
    block: str, gate: str, spelling: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, str]:
    """Names of a router's gate and of experts stored one by one below model.layers.{i}.<block>."""
    theirs = f"model.layers.{{i}}.{block}"
    return {
        "model.layers.{i}.post_attention_layernorm.weight": "layers.{i}.ffn.norm.weight",
        f"{theirs}.{gate}": "layers.{i}.ffn.router.weight",
        **mlp_names(f"{theirs}.experts.{{j}}", "layers.{i}.ffn.experts.{j}", spelling),
    }


DENSE = mlp_names("model.layers.{i}.mlp", "layers.{i}.ffn")
SHARED = mlp_names("model.layers.{i}.mlp.shared_experts", "layers.{i}.ffn.shared")
# The commonest layout: experts one by one below mlp.experts, shared experts as one MLP, dense layers below mlp.
PER_EXPERT = {**OUTER, **ATTENTION, **moe_names("mlp", "gate.weight"), **DENSE, **SHARED}


def below(names: dict[str, str], *prefixes: str) -> dict[str, str]:
    """The table with every checkpoint name also under the prefixes of multimodal wrappers ("language_model.")."""
    return names | {prefix + theirs: ours for prefix in prefixes for theirs, ours in names.items()}


def text(c: Config) -> Config:
    """The language model's keys of a config that wraps them in text_config; a plain config as it is."""
    return {**c, **c["text_config"]} if isinstance(c.get("text_config"), dict) else c


def need(c: Config, *keys: str) -> Any:
    """The value of a config key that has no default; of the first that is there, when it has several spellings.

    Raises CheckpointError naming the keys.
    """
    for key in keys:
        if c.get(key) is not None:
            return c[key]
    raise CheckpointError(f"config.json of a {c.get('model_type')} model must say {' or '.join(map(repr, keys))}")


def per_layer(value: Any, i: int) -> Any:
    """A config value that may be a list with one entry a layer."""
    return value[i] if isinstance(value, (list, tuple)) else value


def sliding_layers(c: Config, every: int) -> list[bool]:
    """Which layers attend to a window: `layer_types`, else all but each `every`-th."""
    count = need(c, "num_hidden_layers")
    if c.get("layer_types"):
        return [kind == "sliding_attention" for kind in c["layer_types"][:count]]
    return [bool((i + 1) % every) for i in range(count)]


def num_experts(c: Config) -> int:
    """Routed experts, under any of the names that configs use."""
    return int(need(c, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"))


def rope(c: Config, head_dim: int, *, interleaved: bool = False, theta: float = 10000.0) -> RopeSpec:
    """Rotary settings from either spelling: `rope_parameters` (newer) or `rope_theta` and `rope_scaling`."""
    scaling = dict(c.get("rope_parameters") or c.get("rope_scaling") or {})
    partial = c.get("partial_rotary_factor") or scaling.get("partial_rotary_factor") or 1.0
    if "type" in scaling:
        scaling.setdefault("rope_type", scaling.pop("type"))
    plain = scaling.get("rope_type", "default") == "default"
    return RopeSpec(
        dim=int(head_dim * partial),
        theta=float(scaling.get("rope_theta") or c.get("rope_theta") or theta),
        interleaved=interleaved,
        scaling=None if plain else {"max_position_embeddings": c.get("max_position_embeddings"), **scaling},
    )


def typed_rope(c: Config, kind: str, head_dim: int, **options: Any) -> RopeSpec:
    """Rotary settings of one kind of layer, where `rope_parameters` has an entry for each kind."""
    parameters = (c.get("rope_parameters") or {}).get(kind)
    own = {"rope_parameters": parameters} if isinstance(parameters, dict) else {}
    return rope({**c, **own}, head_dim, **options)


def gqa(c: Config, **differences: Any) -> AttentionSpec:
    """Grouped-query attention as most configs spell it; `differences` override fields of the spec."""
    heads = need(c, "num_attention_heads")
    head_dim = c.get("head_dim") or need(c, "hidden_size") // heads
    fields: dict[str, Any] = {
        "num_heads": heads,
        "num_kv_heads": c.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "norm": norm(c),
    }
    if "rope" not in differences:
        fields["rope"] = rope(c, head_dim)
    return AttentionSpec(**{**fields, **differences})


def norm(c: Config, **differences: Any) -> NormSpec:
    return NormSpec(**{"eps": c.get("rms_norm_eps", 1e-6), **differences})


def noaux_router(c: Config, **differences: Any) -> RouterSpec:
    """DeepSeek-V3's rule ("noaux_tc", arXiv 2412.19437): float32 sigmoid, choice bias, groups by their top 2."""
    fields: dict[str, Any] = {
        "num_experts": num_experts(c),
        "top_k": need(c, "num_experts_per_tok"),
        "score": "sigmoid",
        "choice_bias": True,
        "num_groups": c.get("n_group") or 1,
        "topk_groups": c.get("topk_group") or 1,
        "renormalize": c.get("norm_topk_prob", True),
        "renorm_eps": 1e-20,
        "scale": c.get("routed_scaling_factor") or 1.0,
        "gate_dtype": "float32",
    }
    return RouterSpec(**{**fields, **differences})


def dense(c: Config, key: str = "intermediate_size") -> MLPSpec:
    return MLPSpec(width=need(c, key), activation=activation(c))


def shared_mlp(c: Config, count: int | None, width: int) -> MLPSpec | None:
    """`count` shared experts of `width` as the one MLP that they are; None when there are none."""
    return MLPSpec(width=count * width, activation=activation(c)) if count else None


def block(
    mixer: Any, ffn: MLPSpec | MoESpec, pre_norm: NormSpec | None, post_norm: NormSpec | None = None, **both: Any
) -> tuple[Sublayer, Sublayer]:
    """The usual layer: a mixer's spec, then MLP or MoE; `both` are further fields of the two sublayers."""
    options = {"pre_norm": pre_norm, "post_norm": post_norm, **both}
    return Sublayer(name="attn", body=mixer, **options), Sublayer(name="ffn", body=ffn, **options)


def activation(c: Config) -> Any:
    """Our name of the config's activation. Raises CheckpointError for one that is not known."""
    known = {
        "silu": "silu",
        "swish": "silu",
        "gelu": "gelu",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_new": "gelu_tanh",
        "relu2": "relu2",
    }
    name = c.get("hidden_act") or c.get("hidden_activation") or "silu"
    if name not in known:
        raise CheckpointError(f"activation {name!r} is not known; known are {', '.join(known)}")
    return known[name]


def model(c: Config, layer: Callable[[int], tuple[Sublayer, ...]], **differences: Any) -> ModelSpec:
    """The ModelSpec of a config whose i-th layer is `layer(i)`."""
    fields: dict[str, Any] = {
        "vocab_size": need(c, "vocab_size"),
        "hidden_size": need(c, "hidden_size"),
        "layers": tuple(layer(i) for i in range(need(c, "num_hidden_layers"))),
        "final_norm": norm(c),
        "context_length": c.get("max_position_embeddings", 4096),
        "tie_embeddings": c.get("tie_word_embeddings", False),
    }
    return ModelSpec(**{**fields, **differences})
