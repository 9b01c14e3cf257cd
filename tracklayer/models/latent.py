"""What families with multi-head latent attention share: the attention read from a config, and its tensors' names."""

from __future__ import annotations

from typing import Any

from tracklayer.kernels.rope import yarn_mscale
from tracklayer.layers.spec import MLASpec, NormSpec, RopeSpec
from tracklayer.models.common import Config, need, rope


def mla_names(theirs: str, ours: str) -> dict[str, str]:
    """Names of one latent attention's tensors below the prefixes `theirs` and `ours`."""
    spelling = {
        "q_proj": "q",
        "q_a_proj": "q_a",
        "q_a_layernorm": "q_norm",
        "q_b_proj": "q_b",
        "kv_a_proj_with_mqa": "kv_a",
        "kv_a_layernorm": "kv_norm",
        "kv_b_proj": "kv_b",
        "o_proj": "o",
    }
    biased = ("q_proj", "q_a_proj", "kv_a_proj_with_mqa", "o_proj")
    return {
        **{f"{theirs}.{t}.weight": f"{ours}.{o}.weight" for t, o in spelling.items()},
        **{f"{theirs}.{t}.bias": f"{ours}.{spelling[t]}.bias" for t in biased},
    }


def mla(c: Config, **differences: Any) -> MLASpec:
    """Latent attention as DeepSeek's configs spell it; `differences` override fields of the spec.

    The latents' norms have eps 1e-6 whatever rms_norm_eps says, as in transformers and the models' own code.
    """
    nope, turned = need(c, "qk_nope_head_dim"), need(c, "qk_rope_head_dim")
    bias = c.get("attention_bias", False)
    fields: dict[str, Any] = {
        "num_heads": need(c, "num_attention_heads"),
        "kv_lora_rank": need(c, "kv_lora_rank"),
        "nope_dim": nope,
        "rope_dim": turned,
        "v_head_dim": need(c, "v_head_dim"),
        "q_lora_rank": c.get("q_lora_rank"),
        "norm": NormSpec(eps=1e-6),
        "bias": bias,
        "out_bias": bias,
    }
    if "rope" not in differences:
        fields["rope"] = rope(c, turned, interleaved=c.get("rope_interleave", True))
    turn = differences.get("rope", fields.get("rope"))
    fields["scale"] = (nope + turned) ** -0.5 * stretch(turn) ** 2
    return MLASpec(**{**fields, **differences})


def stretch(turn: RopeSpec | None) -> float:
    """The factor that YaRN's mscale_all_dim puts on queries and on keys."""
    scaling = (turn.scaling if turn else None) or {}
    return (
        yarn_mscale(scaling.get("factor") or 1.0, scaling["mscale_all_dim"]) if scaling.get("mscale_all_dim") else 1.0
    )
