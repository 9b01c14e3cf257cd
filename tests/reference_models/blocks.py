"""SDAR-MoE and LLaDA2 in plain PyTorch: attention both ways inside a block of tokens, and generation by denoising.

Written from JetAstra/SDAR `generate.py` and inclusionAI/LLaDA2.0 `modeling_llada2_moe.py`.
"""

from __future__ import annotations

import torch
from reference_models.models import BailingV2, DeepseekV1
from reference_models.pieces import Plain, by_blocks
from torch import Tensor


class ByBlocks(Plain):
    """A model whose tokens see their own block of `block` tokens whole, and all blocks before it."""

    block = 4

    def mask(self, length: int) -> Tensor:
        return by_blocks(length, self.block)


class Sdar(ByBlocks, DeepseekV1):
    """SDAR-MoE: Qwen3-MoE's layers, i.e. normed heads of q and k, softmax routing without a shared expert."""

    def projected(self, layer: int, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().projected(layer, x_TD)
        name = f"model.layers.{layer}.self_attn"
        return self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm"), v


class Llada2(ByBlocks, BailingV2):
    """LLaDA2: Ling-2.0's layers. Routing by blocks (`expert_capacity`) is not in the published checkpoints."""

    block = 32


def shares(block: int, steps: int) -> list[int]:
    """How many tokens each of `steps` passes shall fill at least, the first ones taking the remainder."""
    return [block // steps + (n < block % steps) for n in range(steps)]


def denoise(
    model: ByBlocks, prompt: list[int], count: int, mask_id: int, steps: int | None = None, threshold: float = 0.85
) -> tuple[list[int], dict[int, Tensor]]:
    """Greedy generation of at least `count` tokens, to the end of their last block ("low_confidence_dynamic").

    Each pass reads the whole sequence so far and fills, of the current block's masked positions, those whose best
    token has more than `threshold` of the probability, or the surest ones of the pass's share if those are fewer. The
    logits at a position are those of its own token. Returns the sequence and the routes {layer: ids [T, K]} of the
    pass over the finished sequence, which is the one that a cache would keep.
    """
    block = model.block
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        start = len(tokens) // block * block
        tokens += [mask_id] * (start + block - len(tokens))
        masked = torch.tensor([t >= len(prompt) and tokens[t] == mask_id for t in range(len(tokens))])
        for share in shares(block, steps or block):
            if not masked.any():
                break
            probability_TV = model(input_ids=torch.tensor([tokens])).logits[0].softmax(-1)
            sure_T, best_T = probability_TV.max(-1)
            sure_T = sure_T.masked_fill(~masked, -1.0)
            fill = (sure_T > threshold).nonzero().flatten()
            if len(fill) < share:
                fill = sure_T.topk(min(share, int(masked.sum()))).indices
            for t in fill.tolist():
                tokens[t] = int(best_T[t])
                masked[t] = False
    model(input_ids=torch.tensor([tokens]))
    return tokens, dict(model.routes)
