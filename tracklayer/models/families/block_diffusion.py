"""Block diffusion: SDAR-MoE (Qwen3-MoE's layers) and LLaDA2 (Ling-2.0's), whose tokens come in blocks.

A block sees itself whole and everything before it; docs/block_diffusion.md says how it is filled and recorded. The
published configs do not all name block and mask: SGLang's values stand in (4 and 151669, 32 and 156895).
Routing by block (`expert_capacity`), where a token's experts depend on its neighbours, is not served.
"""

from __future__ import annotations

from tracklayer.errors import CheckpointError
from tracklayer.models.common import Config
from tracklayer.models.families import bailing, qwen_moe
from tracklayer.models.spec import BlocksSpec, Family, ModelSpec


def blocks(c: Config, length: int, mask_id: int) -> BlocksSpec:
    length = c.get("block_length") or c.get("block_size") or length
    mask_id = c.get("mask_token_id", mask_id)
    if length < 2 or not 0 <= mask_id < c["vocab_size"]:
        raise CheckpointError(f"blocks of {length} tokens, mask {mask_id} of {c['vocab_size']} ids: neither can be")
    return BlocksSpec(length=length, mask_id=mask_id)


def sdar(c: Config) -> ModelSpec:
    return qwen_moe.qwen3(c).in_blocks(blocks(c, 4, 151669))


def llada2(c: Config) -> ModelSpec:
    if c.get("expert_capacity"):
        raise CheckpointError("expert_capacity is set: routing that looks at the whole block is not served")
    return bailing.v2(c).in_blocks(blocks({**c, "block_size": None}, 32, 156895))


FAMILIES = (
    Family(
        name="sdar_moe",
        architectures=("SDARMoeForCausalLM",),
        spec=sdar,
        names=qwen_moe.MOE,
        layers_rule="as qwen3_moe (published: all)",
        oracle="transformers Qwen3MoeForCausalLM with a block mask",
        note="position q's logits are of token q, as in SGLang; the mask is never sampled",
    ),
    Family(
        name="llada2_moe",
        architectures=("LLaDA2MoeModelLM",),
        spec=llada2,
        names=bailing.NAMES,
        mtp_past_end=True,
        layers_rule="i >= first_k_dense_replace",
        oracle="transformers Glm4MoeForCausalLM with qkv fused and a block mask",
        note="position q's logits are of token q, as in SGLang; the mask is never sampled",
    ),
)
