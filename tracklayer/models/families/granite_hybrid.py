"""Granite 4 (GraniteMoE-hybrid): Mamba 2 layers and a few with attention, usually without positions; else as
GraniteMoE-shared. Without experts (`num_local_experts` 0) it is a dense model, which is not served here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tracklayer.layers.recurrent_spec import Mamba2Spec
from tracklayer.models.common import Config, need, norm
from tracklayer.models.families import granite_moe
from tracklayer.models.mamba import conv_transform, mamba_names
from tracklayer.models.spec import Family, ModelSpec, Sublayer


def number(value: Any) -> float:
    """A float of the config; transformers writes infinity as {"__float__": "Infinity"}."""
    return float(value["__float__"] if isinstance(value, dict) else value)


def spec(c: Config) -> ModelSpec:
    plain = granite_moe.spec(c)
    low, high = c.get("time_step_limit") or (0.0, float("inf"))
    heads = need(c, "mamba_n_heads")
    inner = int(c.get("mamba_expand", 2) * need(c, "hidden_size"))
    mamba = Mamba2Spec(
        num_heads=heads,
        head_dim=inner // heads,
        state=need(c, "mamba_d_state"),
        groups=c.get("mamba_n_groups") or 1,
        conv=c.get("mamba_d_conv") or 4,
        conv_bias=c.get("mamba_conv_bias", True),
        bias=c.get("mamba_proj_bias", False),
        dt_limits=(number(low), number(high)),
        norm=norm(c),
    )
    kinds = need(c, "layer_types", "layers_block_type")
    turned = c.get("position_embedding_type") == "rope"

    def mixer(sub: Sublayer, kind: str) -> Sublayer:
        if kind in ("mamba", "linear_attention"):
            return replace(sub, body=mamba)
        return sub if turned else replace(sub, body=replace(sub.body, rope=None))

    layers = tuple((mixer(subs[0], kind), *subs[1:]) for subs, kind in zip(plain.layers, kinds, strict=True))
    return replace(plain, layers=layers)


FAMILY = Family(
    name="granite_moe_hybrid",
    architectures=("GraniteMoeHybridForCausalLM",),
    spec=spec,
    names={**granite_moe.FAMILY.names, **mamba_names("model.layers.{i}.mamba", "layers.{i}.attn")},
    transforms=conv_transform("layers.{i}.attn"),
    claims=lambda c: bool(c.get("num_local_experts")),
)
