"""Nemotron-H (Nemotron-3): a layer is one mixer or one feed-forward, told by a letter: M Mamba 2, * attention without
positions, E experts, - dense. Ungated relu^2 experts, in a latent space if `moe_latent_size` is set; V3's router.
"""

from __future__ import annotations

from tracklayer.errors import CheckpointError
from tracklayer.layers.recurrent_spec import Mamba2Spec
from tracklayer.layers.spec import MLPSpec, MoESpec
from tracklayer.models.common import Config, activation, gqa, model, need, noaux_router, norm
from tracklayer.models.mamba import conv_transform, mamba_names
from tracklayer.models.spec import Family, ModelSpec, Sublayer

LAYER, OURS = "backbone.layers.{i}", "layers.{i}"
WORDS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "moe": "E", "mlp": "-"}


def letters(c: Config) -> str:
    """One letter a layer, from either spelling. Raises CheckpointError for an unknown word."""
    listed = c.get("layers_block_type") or c.get("layer_types")
    if not listed:
        return str(need(c, "hybrid_override_pattern"))
    unknown = set(listed) - set(WORDS)
    if unknown:
        raise CheckpointError(f"layers_block_type has {sorted(unknown)}; known are {sorted(WORDS)}")
    return "".join(WORDS[word] for word in listed)


def mamba(c: Config) -> Mamba2Spec:
    return Mamba2Spec(
        num_heads=need(c, "mamba_num_heads"),
        head_dim=need(c, "mamba_head_dim"),
        state=need(c, "ssm_state_size"),
        groups=need(c, "n_groups", "mamba_n_groups"),
        conv=need(c, "conv_kernel", "mamba_d_conv"),
        conv_bias=c.get("use_conv_bias", True),
        bias=c.get("use_bias", False),
        dt_limits=(c.get("time_step_min", 0.001), float("inf")),
        norm=norm(c),
    )


def spec(c: Config) -> ModelSpec:
    if c.get("mlp_bias"):
        raise CheckpointError("mlp_bias is set: feed-forward biases are not served")
    c = {**c, "hidden_act": c.get("mlp_hidden_act", "relu2"), "rms_norm_eps": need(c, "layer_norm_epsilon", "norm_eps")}
    act, pattern = activation(c), letters(c)
    shared = need(c, "moe_shared_expert_intermediate_size") if c.get("n_shared_experts", 1) else 0
    moe = MoESpec(
        router=noaux_router(c),
        width=need(c, "moe_intermediate_size"),
        activation=act,
        gated=False,
        shared=MLPSpec(width=shared, activation=act, gated=False) if shared else None,
        latent=c.get("moe_latent_size"),
    )
    bodies = {
        "M": mamba(c),
        "*": gqa(c, rope=None),
        "E": moe,
        "-": MLPSpec(width=need(c, "intermediate_size"), activation=act, gated=False),
    }
    unknown = set(pattern) - set(bodies)
    if unknown:
        raise CheckpointError(f"hybrid_override_pattern has {sorted(unknown)}; known letters are M * E -")

    def layer(i: int) -> tuple[Sublayer, ...]:
        return (Sublayer(name="mixer", body=bodies[pattern[i]], pre_norm=norm(c)),)

    return model({**c, "num_hidden_layers": len(pattern)}, layer)


MIXER, MIX = f"{LAYER}.mixer", f"{OURS}.mixer"

FAMILY = Family(
    name="nemotron_h",
    architectures=("NemotronHForCausalLM",),
    spec=spec,
    names={
        "backbone.embeddings.weight": "embed.weight",
        "backbone.norm_f.weight": "norm.weight",
        "lm_head.weight": "head.weight",
        f"{LAYER}.norm.weight": f"{MIX}.norm.weight",
        **mamba_names(MIXER, MIX),
        **{f"{MIXER}.{p}_proj.weight": f"{MIX}.{p}.weight" for p in ("q", "k", "v", "o", "up", "down")},
        f"{MIXER}.gate.weight": f"{MIX}.router.weight",
        f"{MIXER}.gate.e_score_correction_bias": f"{MIX}.router.choice_bias",
        f"{MIXER}.fc1_latent_proj.weight": f"{MIX}.latent_in.weight",
        f"{MIXER}.fc2_latent_proj.weight": f"{MIX}.latent_out.weight",
        **{f"{MIXER}.experts.{{j}}.{p}_proj.weight": f"{MIX}.experts.{{j}}.{p}.weight" for p in ("up", "down")},
        **{f"{MIXER}.shared_experts.{p}_proj.weight": f"{MIX}.shared.{p}.weight" for p in ("up", "down")},
    },
    transforms=conv_transform(MIX),
    ignored=(r"mtp\..*",),
    layers_rule="letter E of hybrid_override_pattern",
    note="step sizes are at least time_step_min, as in transformers, which does not read time_step_limit",
)
