"""Ling-2.5 / Ring-2.5: lightning attention, and latent attention in the last layer of every group; Ling-2.0's router.

The decay of a head follows the model's own code: its slope (ALiBi's) times 1 - (i - 1) / (L - 1) + 1e-5 in layer i.
SGLang has i where that has i - 1.
"""

from __future__ import annotations

from math import log2

from tracklayer.errors import CheckpointError
from tracklayer.layers.recurrent_spec import LightningSpec
from tracklayer.layers.spec import MoESpec
from tracklayer.models.common import (
    Config,
    activation,
    block,
    dense,
    model,
    need,
    noaux_router,
    norm,
    rope,
    shared_mlp,
)
from tracklayer.models.families import bailing
from tracklayer.models.latent import mla, mla_names
from tracklayer.models.spec import Family, ModelSpec, Sublayer

LAYER, OURS = "model.layers.{i}.attention", "layers.{i}.attn"


def slopes(heads: int) -> list[float]:
    """Geometric from 2^(-8 / heads) for a power of two; others take every second of the next power for the rest."""
    whole = 1 << int(log2(heads))
    first = [2.0 ** (-8.0 * (h + 1) / whole) for h in range(whole)]
    return first if whole == heads else first + slopes(2 * whole)[::2][: heads - whole]


def spec(c: Config) -> ModelSpec:
    if c.get("linear_silu") or c.get("use_linear_silu"):
        raise CheckpointError("linear_silu is set: an activation on q, k and v is not served")
    count, heads = need(c, "num_hidden_layers"), need(c, "num_attention_heads")
    head_dim = c.get("head_dim") or need(c, "hidden_size") // heads
    plain = {key: value for key, value in c.items() if key != "partial_rotary_factor"}
    latent = mla(plain, bias=c.get("use_qkv_bias", False), out_bias=c.get("use_qkv_bias", False))
    width = need(c, "moe_intermediate_size")
    moe = MoESpec(
        router=noaux_router(c, renormalize=need(c, "num_experts_per_tok") > 1),
        width=width,
        activation=activation(c),
        shared=shared_mlp(c, c.get("num_shared_experts"), width),
    )

    def lightning(i: int) -> LightningSpec:
        return LightningSpec(
            num_heads=heads,
            head_dim=head_dim,
            log_decays=tuple(-slope * (1 - (i - 1) / (count - 1) + 1e-5) for slope in slopes(heads)),
            groups=c.get("group_norm_size") or 1,
            rope=rope(c, head_dim),
            qk_norm=c.get("use_qk_norm", True),
            qkv_bias=c.get("use_qkv_bias", False),
            out_bias=c.get("use_bias", False),
            norm=norm(c),
        )

    every = need(c, "layer_group_size")

    def layer(i: int) -> tuple[Sublayer, ...]:
        full = (i + 1) % every == 0 or i >= count // every * every
        ffn = moe if i >= c.get("first_k_dense_replace", 0) else dense(c)
        return block(latent if full else lightning(i), ffn, norm(c))

    return model(c, layer)


FAMILY = Family(
    name="bailing_moe_v2_5",
    architectures=("BailingMoeV2_5ForCausalLM",),
    spec=spec,
    names={
        **bailing.NAMES,
        **mla_names(LAYER, OURS),
        f"{LAYER}.dense.weight": f"{OURS}.o.weight",
        f"{LAYER}.g_proj.weight": f"{OURS}.gate.weight",
        f"{LAYER}.g_norm.weight": f"{OURS}.out_norm.weight",
    },
    mtp_past_end=True,
    layers_rule="i >= first_k_dense_replace",
    oracle="plain reference",
    note="decay by layer as in the model's own code (SGLang: one layer further)",
)
