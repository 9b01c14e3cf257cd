"""Triton: the least logit that top-k, top-p and min-p keep, by bisection instead of a sort.

N rows, V tokens of the vocabulary, P pivots. Both filters keep the tokens whose strictly likelier ones weigh less than
a target (top-k: a count, top-p: a probability mass among what top-k kept). Logits order as integers made of their bits,
so the least one kept is the least key beyond which the weight is under the target: each pass weighs P - 1 pivots at
once and narrows the range 16 times, 4 passes for 16-bit logits, 8 for float32. A pass spreads a row over programs of
CHUNK tokens whatever the batch; the last to finish sums their parts in order and narrows the row's range.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracklayer.kernels.jit import counters, jit, next_power_of_2, tl

CHUNK = 4096
BLOCK = 512
P = 16


@jit
def load_logits(row_ptr, ids, V):
    """float32 logits: NaN and what lies past V become -inf, +inf a large number, -0.0 becomes 0.0 (one key each)."""
    z = tl.load(row_ptr + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    return tl.where(z == z, tl.minimum(z, 1e30), float("-inf")) + 0.0


@jit
def row_scale(temperature_ptr, top_k_ptr, row):
    """(1 / temperature, greedy): 1.0 for greedy rows."""
    temperature = tl.load(temperature_ptr + row)
    greedy = (temperature < 1e-6) | (tl.load(top_k_ptr + row) == 1)
    return tl.div_rn(1.0, tl.where(greedy, 1.0, temperature)), greedy


@jit
def _key(z, like: tl.constexpr):
    """int32 that orders as z does, from the bits of the logits' own dtype."""
    if like == tl.float32:
        bits = z.to(tl.int32, bitcast=True)
        return bits ^ ((bits >> 31) & 0x7FFFFFFF)
    else:
        bits = z.to(like).to(tl.int16, bitcast=True).to(tl.int32)
        return bits ^ ((bits >> 31) & 0x7FFF)


@jit
def _logit(key, like: tl.constexpr):
    """The float32 logit that has this key."""
    if like == tl.float32:
        return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    else:
        return (key ^ ((key >> 31) & 0x7FFF)).to(tl.int16).to(like, bitcast=True).to(tl.float32)


@jit
def _is_last(done_ptr, row, SPLITS: tl.constexpr):
    """True in the row's last program to come here; everything stored before is visible to it (load with .cg)."""
    tl.debug_barrier()
    last = tl.atomic_add(done_ptr + row, 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.store(done_ptr + row, 0)
    return last


@jit
def _range_kernel(
    logits_ptr, part_ptr, range_ptr, done_ptr, V, stride, SPLITS: tl.constexpr, SPLITS_P: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """range_N4 = keys (least, largest, largest, least): low and high of the search, and what top-p starts from."""
    row = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    like: tl.constexpr = logits_ptr.dtype.element_ty
    ids = split * CHUNK + tl.arange(0, CHUNK)
    key = _key(load_logits(logits_ptr + row.to(tl.int64) * stride, ids, V), like)
    part = part_ptr + (row * SPLITS + split) * 2
    tl.store(part, tl.min(key, 0))
    tl.store(part + 1, tl.max(key, 0))
    if _is_last(done_ptr, row, SPLITS):
        i = tl.arange(0, SPLITS_P)
        parts = part_ptr + (row * SPLITS + i) * 2
        low = tl.min(tl.load(parts, mask=i < SPLITS, other=0x7FFFFFFF, cache_modifier=".cg"), 0)
        high = tl.max(tl.load(parts + 1, mask=i < SPLITS, other=-0x7FFFFFFF, cache_modifier=".cg"), 0)
        tl.store(range_ptr + row * 4, low)
        tl.store(range_ptr + row * 4 + 1, high)
        tl.store(range_ptr + row * 4 + 2, high)
        tl.store(range_ptr + row * 4 + 3, low)


@jit
def _narrow_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, part_ptr, range_ptr, done_ptr, V, stride,
    MASS: tl.constexpr, FIRST: tl.constexpr, SPLITS: tl.constexpr, SPLITS_P: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """One pass over range_N4[row] = (low, high, largest key, floor of top-p); FIRST: of top-p, from top-k's end."""
    row = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    like: tl.constexpr = logits_ptr.dtype.element_ty
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    scale, greedy = row_scale(temperature_ptr, top_k_ptr, row)
    wanted = tl.load(top_p_ptr + row) < 1.0 if MASS else tl.load(top_k_ptr + row) < V
    low = tl.load(range_ptr + row * 4).to(tl.int64)
    top = tl.load(range_ptr + row * 4 + 2)
    high = top.to(tl.int64) if FIRST else tl.load(range_ptr + row * 4 + 1).to(tl.int64)
    floor = tl.load(range_ptr + row * 4).to(tl.int64) if FIRST else tl.load(range_ptr + row * 4 + 3).to(tl.int64)
    if greedy | (not wanted) | (low >= high):
        return
    # Pivot 0 lies below everything that counts: its weight is the whole.
    j = tl.arange(0, P)
    pivots = tl.where(j == 0, floor - 1, low + (high - low) * j // P)
    largest = tl.maximum(_logit(top, like), -1e38)
    total = tl.zeros([BLOCK, P], tl.float32)
    for offset in range(0, CHUNK, BLOCK):
        ids = split * CHUNK + offset + tl.arange(0, BLOCK)
        z = load_logits(row_ptr, ids, V)
        key = _key(z, like).to(tl.int64)
        weight = tl.exp((z - largest) * scale) if MASS else tl.full([BLOCK], 1.0, tl.float32)
        weight = tl.where((ids < V) & (key >= floor), weight, 0.0)
        total += tl.where(key[:, None] > pivots[None, :], weight[:, None], 0.0)
    tl.store(part_ptr + (row * SPLITS + split) * P + j, tl.sum(total, 0))
    if _is_last(done_ptr, row, SPLITS):
        i = tl.arange(0, SPLITS_P)
        parts = part_ptr + (row * SPLITS + i[:, None]) * P + j[None, :]
        beyond = tl.sum(tl.load(parts, mask=(i < SPLITS)[:, None], other=0.0, cache_modifier=".cg"), 0)
        whole = tl.sum(tl.where(j == 0, beyond, 0.0), 0)
        target = tl.load(top_p_ptr + row) * whole if MASS else tl.load(top_k_ptr + row).to(tl.float32)
        under = (beyond < target) & (j > 0)
        tl.store(range_ptr + row * 4, tl.max(tl.where(under | (j == 0), low, pivots + 1), 0).to(tl.int32))
        tl.store(range_ptr + row * 4 + 1, tl.min(tl.where(under, pivots, high), 0).to(tl.int32))
        if FIRST:
            tl.store(range_ptr + row * 4 + 3, floor.to(tl.int32))


@jit
def _least_kernel(temperature_ptr, top_k_ptr, min_p_ptr, range_ptr, least_ptr, like_ptr):
    """The least logit kept by all three; -inf for greedy rows."""
    row = tl.program_id(0)
    like: tl.constexpr = like_ptr.dtype.element_ty
    scale, greedy = row_scale(temperature_ptr, top_k_ptr, row)
    least = _logit(tl.load(range_ptr + row * 4), like)
    min_p = tl.load(min_p_ptr + row)
    if min_p > 0.0:
        least = tl.maximum(least, _logit(tl.load(range_ptr + row * 4 + 2), like) + tl.log(min_p) / scale)
    tl.store(least_ptr + row, tl.where(greedy, float("-inf"), least))


def least_logits(logits_NV: Tensor, temperature_N: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor) -> Tensor:
    """float32 [N]: the least logit (before temperature) that a row's filters keep. Arguments as in `sample`."""
    rows, vocabulary = logits_NV.shape
    splits = -(-vocabulary // CHUNK)
    device = logits_NV.device
    part = torch.empty(rows * splits * P, dtype=torch.float32, device=device)
    ranges = torch.empty(rows, 4, dtype=torch.int32, device=device)
    least = torch.empty(rows, dtype=torch.float32, device=device)
    done = counters(device, max(next_power_of_2(rows), 4096))
    grid, size = (rows * splits,), dict(SPLITS=splits, SPLITS_P=next_power_of_2(splits), CHUNK=CHUNK)
    stride = logits_NV.stride(0)
    _range_kernel[grid](logits_NV, part.view(torch.int32), ranges, done, vocabulary, stride, **size)
    passes = 4 if logits_NV.element_size() == 2 else 8
    for mass in (False, True):
        for i in range(passes):
            _narrow_kernel[grid](
                logits_NV, temperature_N, top_k_N, top_p_N, part, ranges, done, vocabulary, stride, MASS=mass,
                FIRST=mass and i == 0, BLOCK=BLOCK, P=P, num_warps=4, **size,
            )  # fmt: skip
    _least_kernel[(rows,)](temperature_N, top_k_N, min_p_N, ranges, least, logits_NV, num_warps=1)
    return least
