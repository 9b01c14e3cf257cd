"""Routes in the layout of Megatron-Core's router replay: for one rank, one [tokens, K] array for each of its routers.

B samples, S padded length, T tokens of a rank, K chosen. Pure functions of numpy arrays: no rank needs another's help.

Megatron splits a batch in this order, and so does `rank_index`:
    context parallel   each sequence into 2 * cp chunks; rank r has chunks r and 2 * cp - 1 - r (zig-zag, for balance)
    sequence-first     hidden states are [S, B, D]: tokens of one position lie together (packed: B = 1)
    sequence parallel  contiguous parts along the sequence, one for each tensor-parallel rank
Layers go to pipeline stages in blocks; with virtual stages block v * pp + r is chunk v of rank r.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import numpy as np
import numpy.typing as npt

from tracklayer.errors import UserError
from tracklayer.replay.packing import ReplayBatch, Slots, lay_out
from tracklayer.routes.ids import Array
from tracklayer.routes.record import Routes


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Where a process stands. sequence_parallel: activations before the router are split over tensor-parallel ranks."""

    tp_size: int = 1
    tp_rank: int = 0
    cp_size: int = 1
    cp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    vp_size: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for kind in ("tp", "cp", "pp"):
            size, rank = getattr(self, f"{kind}_size"), getattr(self, f"{kind}_rank")
            if not 0 <= rank < size:
                raise UserError(f"{kind}_rank {rank} is not one of {size} ranks")
        if self.vp_size < 1:
            raise UserError(f"vp_size must be 1 or more, got {self.vp_size}")


def zigzag(length: int, size: int, rank: int) -> Array:
    """Positions of a sequence of `length` (a multiple of 2 * size) that context-parallel `rank` computes, in order."""
    if size == 1:
        return np.arange(length)
    if length % (2 * size):
        raise UserError(f"context parallel of {size} needs sequences of a multiple of {2 * size} tokens, got {length}")
    chunk = length // (2 * size)
    last = 2 * size - 1 - rank
    return np.concatenate([np.arange(rank * chunk, (rank + 1) * chunk), np.arange(last * chunk, (last + 1) * chunk)])


def _sequence_part(length: int, rank: Rank) -> slice:
    """The contiguous part of the (context-parallel) sequence that a tensor-parallel rank holds before its router."""
    if not rank.sequence_parallel or rank.tp_size == 1:
        return slice(0, length)
    if length % rank.tp_size:
        raise UserError(f"sequence parallel of {rank.tp_size} can not split {length} positions evenly")
    part = length // rank.tp_size
    return slice(rank.tp_rank * part, (rank.tp_rank + 1) * part)


def padded_rank_index(num_samples: int, length: int, rank: Rank) -> Array:
    """int64 [T]: indices into the flattened [B, S] batch of the tokens that the rank's routers see, in their order."""
    grid_BS = np.arange(num_samples * length).reshape(num_samples, length)
    grid_BS = grid_BS[:, zigzag(length, rank.cp_size, rank.cp_rank)]
    return grid_BS.T[_sequence_part(grid_BS.shape[1], rank)].reshape(-1)


def packed_rank_index(cumulative_lengths: npt.ArrayLike, rank: Rank) -> Array:
    """int64 [T]: indices into a packed batch of the tokens that the rank's routers see, in their order.

    cumulative_lengths [B + 1] count the padding behind each sequence; each one is split zig-zag by itself.
    """
    ends = np.asarray(cumulative_lengths, np.int64)
    starts, spans = ends[:-1].tolist(), np.diff(ends).tolist()
    parts = [first + zigzag(span, rank.cp_size, rank.cp_rank) for first, span in zip(starts, spans, strict=True)]
    whole = np.concatenate(parts) if parts else np.empty(0, np.int64)
    return whole[_sequence_part(len(whole), rank)]


def stage_layers(num_layers: int, rank: Rank, sizes: Sequence[int] | None = None) -> list[range]:
    """Decoder layers (from 0) of each model chunk of the rank, chunks in order; MTP layers lie beyond num_layers.

    sizes  layers of each of the pp * vp blocks where they are uneven (embedding or loss counted as layers, a short
           first or last stage); default: equal
    """
    blocks = rank.pp_size * rank.vp_size
    if sizes is None:
        if num_layers % blocks:
            raise UserError(f"{num_layers} layers do not split into {blocks} equal blocks: give their sizes")
        sizes = [num_layers // blocks] * blocks
    if len(sizes) != blocks or sum(sizes) != num_layers or min(sizes) < 0:
        raise UserError(f"block sizes {list(sizes)} are not {blocks} parts of {num_layers} layers")
    first = [0, *accumulate(sizes)]
    mine = [v * rank.pp_size + rank.pp_rank for v in range(rank.vp_size)]
    return [range(first[block], first[block + 1]) for block in mine]


def router_arrays(
    batch: ReplayBatch,
    chunks: Sequence[range],
    *,
    unreplayed: Literal["running", "first", "missing"] = "running",
    dtype: npt.DTypeLike = np.int64,
) -> list[dict[int, Array]]:
    """For each model chunk: Megatron's layer_number (global, from 1) -> ids [T, K] of `dtype`, in construction order.

    Megatron's replay has no mask, so tokens that are not replayed (padding, the last token) need ids too:
    "running" K distinct ids that go round all experts (even load), "first" 0..K-1, "missing" -1 (forks that then use
    the live router). Dense layers of the chunk are left out.
    """
    tokens, _, top_k = batch.ids_NLK.shape
    match unreplayed:
        case "running":
            fill_NK = (np.arange(tokens)[:, None] * top_k + np.arange(top_k)) % batch.num_experts
        case "first":
            fill_NK = np.broadcast_to(np.arange(top_k), (tokens, top_k))
        case "missing":
            fill_NK = np.full((tokens, top_k), -1)
        case _:
            raise UserError(f'unreplayed must be "running", "first" or "missing", got {unreplayed!r}')
    column = {layer: c for c, layer in enumerate(batch.layer_ids)}
    arrays = []
    for layers in chunks:
        routed = [layer for layer in layers if layer in column]
        arrays.append(
            {
                layer + 1: np.where(
                    batch.replay_NL[:, column[layer], None], batch.ids_NLK[:, column[layer]], fill_NK
                ).astype(dtype)
                for layer in routed
            }
        )
    return arrays


def rank_arrays(
    samples: Sequence[Routes | None],
    slots: Slots,
    index: npt.ArrayLike,
    rank: Rank,
    num_layers: int,
    *,
    sizes: Sequence[int] | None = None,
    replay: Sequence[npt.ArrayLike | slice | None] | None = None,
    on_missing: Literal["raise", "live"] = "raise",
    unreplayed: Literal["running", "first", "missing"] = "running",
    dtype: npt.DTypeLike = np.int64,
) -> list[dict[int, Array]]:
    """One rank's arrays from the samples' routes: `lay_out` at the rank's tokens, then `router_arrays` of its layers.

    slots   of the whole batch (`padded_slots`, `packed_slots`); index from `padded_rank_index` / `packed_rank_index`
    on_missing="live" needs unreplayed="missing": Megatron's own replay can not leave a token to the live router.
    Raises UserError as `lay_out` does, naming sample, token and layer.
    """
    if on_missing == "live" and unreplayed != "missing":
        raise UserError('on_missing="live" needs unreplayed="missing": other fills would be replayed as if recorded')
    batch = lay_out(samples, slots[np.asarray(index)], replay=replay, on_missing=on_missing)
    beyond = [layer for layer in batch.layer_ids if layer >= num_layers]
    if beyond:
        raise UserError(
            f"routes have layers {beyond}, the decoder has {num_layers}: MTP layers are not replayed, take "
            f"routes.layers(0, {num_layers})"
        )
    return router_arrays(batch, stage_layers(num_layers, rank, sizes), unreplayed=unreplayed, dtype=dtype)
