"""What the layers are told of one forward: which tokens, where they lie in the caches, which sequences they form.

T tokens of the step, B sequences, R rows of the slot table, C context length, S slots, L MoE layers, K chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class Run:
    """Sequences of about one length side by side, as recurrent mixers walk them: B sequences, M places each.

    tokens_BM int64    index in T of each place; places past a sequence's end repeat its last token
    counts_B int64     tokens of each sequence in this step, 1 to M
    rows_B int64       line of each in the state pools
    fresh_B bool       sequences that begin in this step: their state is zero, whatever the pool holds
    """

    tokens_BM: Tensor
    counts_B: Tensor
    rows_B: Tensor
    fresh_B: Tensor


@dataclass(slots=True)
class Batch:
    """One forward's metadata; tensors live on the model's device, ints on the host.

    token_ids_T int32; positions_T int32; slots_T int32 (cache slot of each token; 0 for padded tokens)
    rows_B int32         line of each sequence in slot_table_RC (and in recurrent state pools)
    starts_B1 int32      tokens of sequence b are starts_B1[b] .. starts_B1[b+1]
    lens_B int32         tokens of sequence b in the cache, this step's included
    slot_table_RC int32  slot of every position of every row
    windowed             slots_T and slot_table_RC of layers that see a window only; None: the same as the others'
    max_query, max_len   upper bounds of tokens a sequence has in this step / in the cache
    num_decodes          host int: that many first sequences have one token each
    fresh                lens_B for sequences that have a past (None: none has) and for those that begin here, -1
                         elsewhere; None when few tokens begin sequences
    num_tokens_1 int32   [1]: tokens that are not padding; None when none are (only CUDA graphs pad)
    kv                   per attention sublayer: its caches (k_SHD, v_SHD), in model order
    pool_SLK             the route pool's tensor, None when recording is off
    states               per recurrent sublayer: its state pools [R, ...], in model order
    runs, order_T        the sequences in runs, and where in the runs' places token t stands (int64; None: in order);
                         only for models with recurrent sublayers
    """

    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    rows_B: Tensor
    starts_B1: Tensor
    lens_B: Tensor
    slot_table_RC: Tensor
    max_query: int
    max_len: int
    num_decodes: int = 0
    fresh: tuple[Tensor | None, Tensor] | None = None
    num_tokens_1: Tensor | None = None
    kv: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    pool_SLK: Tensor | None = None
    states: list[tuple[Tensor, ...]] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    order_T: Tensor | None = None
    windowed: tuple[Tensor, Tensor] | None = None

    def places(self, windowed: bool) -> tuple[Tensor, Tensor]:
        """slots_T and slot_table_RC of a layer that sees a window only, or everything."""
        return self.windowed if windowed and self.windowed is not None else (self.slots_T, self.slot_table_RC)


def rows_of_tokens(batch: Batch) -> Tensor:
    """Line of the slot table of each token, int64 [T]; tokens past the last sequence count as its own."""
    tokens_T = torch.arange(len(batch.token_ids_T), device=batch.rows_B.device, dtype=torch.int32)
    sequence_T = torch.searchsorted(batch.starts_B1[1:].contiguous(), tokens_T, right=True)
    return batch.rows_B.long()[sequence_T.clamp(max=len(batch.rows_B) - 1)]
