"""A StepPlan as tensors. T tokens, B sequences (one per share, in plan order), N sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tracklayer.kernels.attention import FRESH_LEAST
from tracklayer.layers.batch import Batch
from tracklayer.runner.kv_cache import Caches
from tracklayer.runner.rows import Rows, step_slots, table_arrays
from tracklayer.runner.runs import run_arrays, runs_of
from tracklayer.types import StepPlan

Array = npt.NDArray[Any]
ALIGN = 32  # int32 values: kernels specialise on aligned pointers, so every array starts aligned


def upload(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """int32 arrays to the device in one copy that does not wait."""
    offsets = np.cumsum([0] + [-(-len(a) // ALIGN) * ALIGN for a in arrays])
    packed = np.zeros(int(offsets[-1]), np.int32)
    for array, offset in zip(arrays, offsets, strict=False):
        packed[offset : offset + len(array)] = array
    tensor = torch.from_numpy(packed)
    if device.type == "cuda":
        tensor = tensor.pin_memory().to(device, non_blocking=True)
    return [tensor[offset : offset + len(array)] for array, offset in zip(arrays, offsets, strict=False)]


def split_fresh(firsts: Array, counts: Array) -> list[Array]:
    """Lengths of the sequences, int32 [B]: with -1 for the others than those that begin in this step, and the reverse.

    The second is left out when all begin, both when too few tokens begin sequences; see kernels.attention.
    """
    begins = (firsts == 0) & (counts > 1)
    if counts[begins].sum() < FRESH_LEAST:
        return []
    lens = (firsts + counts).astype(np.int32)
    split = [np.where(begins, lens, -1).astype(np.int32), np.where(begins, -1, lens).astype(np.int32)]
    return split[:1] if begins.all() else split


def build(plan: StepPlan, rows: Rows, caches: Caches, device: torch.device) -> tuple[Batch, Tensor, Tensor]:
    """The eager form of a step: its Batch, the indices in T of the tokens whose logits are sampled, and their rows.

    Both int32 [N]. Enters the step's slots in the slot table.
    """
    shares = plan.shares
    counts = np.array([s.num_tokens for s in shares], np.int32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    num_decode = plan.num_decodes
    token_ids = np.concatenate(
        [np.zeros(1, np.int32) if s.token_ids is None else np.asarray(s.token_ids, np.int32) for s in shares]
    )
    prefill = shares[num_decode:]
    row_numbers = np.array([s.row for s in shares], np.int32)
    firsts = np.array([s.start for s in shares], np.int32)
    fresh = split_fresh(firsts, counts)
    tensors = upload(
        [
            token_ids,
            np.concatenate([np.arange(s.start, s.start + s.num_tokens, dtype=np.int32) for s in shares]),
            row_numbers,
            starts,
            firsts + counts,
            np.array([starts[b + 1] - 1 for b, s in enumerate(shares) if s.samples], np.int32),
            np.array([s.row for s in shares if s.samples], np.int32),
            *fresh,
            *step_slots(shares, rows.num_tables),
            *table_arrays(prefill, rows.num_tables),
            *(run_arrays(counts, starts, row_numbers, firsts) if caches.states else []),
        ],
        device,
    )
    token_ids_T, positions_T, rows_B, starts_B1, lens_B, sampled_N, sampled_rows_N = tensors[:7]
    rest, tables = tensors[7 + len(fresh) :], rows.num_tables
    slots, entered, rest = rest[:tables], rest[tables : 2 * tables + 2], rest[2 * tables + 2 :]
    rows.enter_prefills(*entered)
    if num_decode:
        d = slice(0, num_decode)
        token_ids_T[d] = rows.enter_decode(rows_B[d], positions_T[d], [slots_T[d] for slots_T in slots])
    runs, order_T = runs_of(rest) if caches.states else ([], None)
    batch = Batch(
        token_ids_T=token_ids_T,
        positions_T=positions_T,
        slots_T=slots[0],
        rows_B=rows_B,
        starts_B1=starts_B1,
        lens_B=lens_B,
        slot_table_RC=rows.slot_table_RC,
        max_query=int(counts.max()),
        max_len=max(s.start + s.num_tokens for s in shares),
        num_decodes=num_decode,
        fresh=(tensors[8] if len(fresh) > 1 else None, tensors[7]) if fresh else None,
        kv=caches.kv,
        pool_SLK=caches.pool.tensor_SLK if caches.pool else None,
        states=caches.states,
        runs=runs,
        order_T=order_T,
        windowed=rows.windowed(slots),
    )
    return batch, sampled_N, sampled_rows_N
