"""DeepSeek-V3.2's key selection: a small indexer scores all earlier tokens, attention sees the best of them.

T tokens, L positions, H indexer heads of width I, K chosen positions, N query heads, D key width, C value width. Torch
throughout, some tokens at a time; no step of it waits for the device, so that a CUDA graph can hold it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tracklayer.kernels.norm import layer_norm
from tracklayer.kernels.rope import rotate
from tracklayer.layers.batch import Batch, rows_of_tokens
from tracklayer.layers.linear import Linear
from tracklayer.layers.parts import Part, parameter, prefixed
from tracklayer.layers.spec import IndexerSpec

PIECE = 1 << 26  # numbers that the widest tensor of one piece of tokens may have


class Indexer(nn.Module):
    """score(t, s) = sum_h w_h(t) relu(q_h(t) . k(s)); the first rope dims of q and k are turned, by halves.

    Parts: wq_b (from the queries' latent), wk, k_norm, weights_proj.
    """

    def __init__(self, spec: IndexerSpec, hidden_size: int, q_lora_rank: int, cos_sin_PR: Tensor) -> None:
        super().__init__()
        self.spec, self.cos_sin_PR = spec, cos_sin_PR
        self.wq_b = Linear(q_lora_rank, {"wq_b": spec.num_heads * spec.head_dim})
        self.wk = Linear(hidden_size, {"wk": spec.head_dim})
        self.k_norm_I, self.k_norm_bias_I = parameter(spec.head_dim), parameter(spec.head_dim)
        self.weights_proj = Linear(hidden_size, {"weights_proj": spec.num_heads})

    def keys(self, x_TD: Tensor, batch: Batch) -> Tensor:
        """What the cache keeps of each token for the indexer: [T, I]."""
        k_TI = layer_norm(self.wk(x_TD), self.k_norm_I, self.k_norm_bias_I, 1e-6)
        return rotate(k_TI[:, None], self.cos_sin_PR[batch.positions_T.long()], False)[:, 0]

    def queries(self, x_TD: Tensor, latent_TQ: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """(q [T, H, I], weights [T, H]), float32, with the scales in the weights."""
        q_THI = self.wq_b(latent_TQ).unflatten(-1, (self.spec.num_heads, -1))
        q_THI = rotate(q_THI, self.cos_sin_PR[batch.positions_T.long()], False)
        scale = (self.spec.num_heads * self.spec.head_dim) ** -0.5
        return q_THI.float(), self.weights_proj(x_TD).float() * scale

    def parts(self) -> Iterator[Part]:
        for linear in (self.wq_b, self.wk, self.weights_proj):
            yield from linear.parts()
        named = (("weight", self.k_norm_I), ("bias", self.k_norm_bias_I))
        yield from prefixed("k_norm", ((kind, owner.data, owner) for kind, owner in named))


def index_scores(q_THI: Tensor, weights_TH: Tensor, keys_TLI: Tensor) -> Tensor:
    """sum_h weights_h relu(q_h . k) of each token over keys of its own: float32 [T, L]."""
    return (weights_TH[:, None] @ torch.relu(q_THI @ keys_TLI.transpose(1, 2)))[:, 0]


def selected_attention(
    q_TND: Tensor,
    index_q_THI: Tensor,
    index_weights_TH: Tensor,
    cache_SX: Tensor,
    batch: Batch,
    *,
    value_dim: int,
    top_k: int,
    scale: float,
) -> Tensor:
    """Attention of each token over the top_k earlier positions, itself included, that its indexer scores best.

    cache_SX [S, X] holds, of each slot, the key's D columns (the value is the first value_dim), then the indexer's key.
    Returns [T, N, value_dim] in q's dtype.
    """
    rows_T = rows_of_tokens(batch)
    length, width = batch.max_len, q_TND.shape[2]
    chosen = min(top_k, length)
    positions_L = torch.arange(length, device=q_TND.device)
    size = max(1, PIECE // max(length * index_q_THI.shape[2], chosen * width))
    pieces = []
    for at in range(0, len(q_TND), size):
        part = slice(at, at + size)
        slots_tL = batch.slot_table_RC[rows_T[part], :length].long()
        seen_tL = positions_L <= batch.positions_T[part, None]
        slots_tL = torch.where(seen_tL, slots_tL, slots_tL[:, :1])  # what lies past the end may be anything
        keys_tLI = cache_SX[slots_tL, width:].float()
        score_tL = index_scores(index_q_THI[part], index_weights_TH[part], keys_tLI)
        score_tL = score_tL.masked_fill(~seen_tL, float("-inf"))
        best_tK = score_tL.topk(chosen, -1).indices
        rows_tKD = cache_SX[slots_tL.gather(1, best_tK), :width].to(q_TND.dtype)
        pieces.append(
            F.scaled_dot_product_attention(
                q_TND[part, :, None].transpose(1, 2),
                rows_tKD[:, None],
                rows_tKD[:, None, :, :value_dim],
                attn_mask=seen_tL.gather(1, best_tK)[:, None, None],
                scale=scale,
            )[:, 0]
        )
    return torch.cat(pieces)
