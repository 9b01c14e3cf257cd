"""Triton: sampling, log-probabilities and penalties; the rules are in sample.py, the filters in sample_filter.py.

N rows, V tokens of the vocabulary. A row is read by several programs, CHUNK tokens each whatever the batch, and the
last one to finish merges their results in order, so a row's outcome does not depend on the rows beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracklayer.kernels.jit import counters, jit, next_power_of_2, tl
from tracklayer.kernels.sample_filter import CHUNK, least_logits, load_logits, row_scale

BLOCK = 2048


@jit
def _mix(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@jit
def _log(x, FAST: tl.constexpr):
    return tl.extra.cuda.libdevice.fast_logf(x) if FAST else tl.log(x)


@jit
def _noise(ids, key0, key1, FAST: tl.constexpr):
    """-log of an exponential variate per token id; the same integers as sample.exponential_noise."""
    x = ids.to(tl.uint32) ^ key0
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= key1
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    u = ((x & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31
    # The fast logarithm has an absolute error of 2^-22: near 0 the series serves, it loses nothing there.
    series = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))
    far = -_log(tl.maximum(1.0 - u, 1.4901161193847656e-08), FAST)
    return -_log(tl.where(u < 0.03125, series, far), FAST)


@jit
def _sample_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, least_ptr, seeds_ptr, positions_ptr, out_ptr, best_ptr, ids_ptr,
    done_ptr, V, stride, SPLITS: tl.constexpr, SPLITS_P: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    GREEDY: tl.constexpr, FILTER: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    scale = 1.0
    greedy = True
    if FILTER:
        least = tl.load(least_ptr + row)
    if not GREEDY:
        scale, greedy = row_scale(temperature_ptr, top_k_ptr, row)
        seed = tl.load(seeds_ptr + row)
        low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
        position = tl.load(positions_ptr + row).to(tl.uint32)
        key0 = _mix(_mix(_mix(low) ^ high) ^ position)
        key1 = _mix(_mix(_mix(high ^ 0x5BD1E995) ^ position) ^ low)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = split * CHUNK + tl.arange(0, BLOCK)
    for offset in tl.static_range(0, CHUNK, BLOCK):
        ids = split * CHUNK + offset + tl.arange(0, BLOCK)
        z = load_logits(row_ptr, ids, V)
        if FILTER:
            z = tl.where(z < least, float("-inf"), z)
        z *= scale
        if not GREEDY:
            z += tl.where(greedy, 0.0, _noise(ids, key0, key1, FAST))
        better = z > best  # ties stay with the lower id
        best = tl.where(better, z, best)
        best_id = tl.where(better, ids, best_id)
    top = tl.max(best, 0)
    top_id = tl.min(tl.where(best == top, best_id, 0x7FFFFFFF), 0)
    tl.store(best_ptr + row * SPLITS + split, top)
    tl.store(ids_ptr + row * SPLITS + split, top_id)
    tl.debug_barrier()
    if tl.atomic_add(done_ptr + row, 1, sem="acq_rel") == SPLITS - 1:
        tl.store(done_ptr + row, 0)
        i = tl.arange(0, SPLITS_P)
        tops = tl.load(best_ptr + row * SPLITS + i, mask=i < SPLITS, other=float("-inf"), cache_modifier=".cg")
        top_ids = tl.load(ids_ptr + row * SPLITS + i, mask=i < SPLITS, other=0x7FFFFFFF, cache_modifier=".cg")
        tl.store(out_ptr + row, tl.min(tl.where(tops == tl.max(tops, 0), top_ids, 0x7FFFFFFF), 0))


def launch_sample(
    logits_NV: Tensor,
    *,
    temperature_N: Tensor,
    top_k_N: Tensor,
    top_p_N: Tensor,
    min_p_N: Tensor,
    seeds_N: Tensor,
    positions_N: Tensor,
    all_greedy: bool,
    any_filter: bool,
) -> Tensor:
    """Triton launch of `sample`: one launch, and the bisection of sample_filter.py with filters."""
    rows, vocabulary = logits_NV.shape
    device = logits_NV.device
    out = torch.empty(rows, dtype=torch.int32, device=device)
    if rows == 0:
        return out
    filtered = any_filter and not all_greedy
    least = least_logits(logits_NV, temperature_N, top_k_N, top_p_N, min_p_N) if filtered else None
    splits = -(-vocabulary // CHUNK)
    best = torch.empty(rows * splits, dtype=torch.float32, device=device)
    ids = torch.empty(rows * splits, dtype=torch.int32, device=device)
    _sample_kernel[(rows * splits,)](
        logits_NV, temperature_N, top_k_N, least, seeds_N, positions_N, out, best, ids,
        counters(device, max(next_power_of_2(rows), 4096)), vocabulary, logits_NV.stride(0), SPLITS=splits,
        SPLITS_P=next_power_of_2(splits), CHUNK=CHUNK, BLOCK=BLOCK, GREEDY=all_greedy, FILTER=filtered,
        FAST=logits_NV.is_cuda, num_warps=4,
    )  # fmt: skip
    return out


@jit
def _logprob_kernel(
    logits_ptr, temperature_ptr, ids_ptr, out_ptr, total_ptr, parts_ptr, done_ptr, V, stride,
    SPLITS: tl.constexpr, SPLITS_P: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    temperature = tl.load(temperature_ptr + row)
    temperature = tl.where(temperature < 1e-6, 1.0, temperature)
    ids = split * CHUNK + tl.arange(0, CHUNK)
    z = tl.load(row_ptr + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    z = tl.div_rn(z, temperature)
    top = tl.maximum(tl.max(z, 0), -1e38)
    tl.store(parts_ptr + (row * SPLITS + split) * 2, top)
    tl.store(parts_ptr + (row * SPLITS + split) * 2 + 1, tl.sum(tl.exp(z - top), 0))
    tl.debug_barrier()
    if tl.atomic_add(done_ptr + row, 1, sem="acq_rel") == SPLITS - 1:
        tl.store(done_ptr + row, 0)
        i = tl.arange(0, SPLITS_P)
        parts = parts_ptr + (row * SPLITS + i) * 2
        tops = tl.load(parts, mask=i < SPLITS, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(parts + 1, mask=i < SPLITS, other=0.0, cache_modifier=".cg")
        most = tl.max(tops, 0)
        total = most + tl.log(tl.sum(sums * tl.exp(tops - most), 0))
        chosen = tl.load(row_ptr + tl.load(ids_ptr + row)).to(tl.float32)
        tl.store(total_ptr + row, total)
        tl.store(out_ptr + row, tl.div_rn(chosen, temperature) - total)


def launch_logprobs_of(
    logits_NV: Tensor, temperature_N: Tensor, ids_N: Tensor, top_n: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Triton launch of `logprobs_of`: one launch; the top_n likeliest, if any, come from torch.topk."""
    rows, vocabulary = logits_NV.shape
    device = logits_NV.device
    chosen, total = torch.empty(2, rows, dtype=torch.float32, device=device)
    if rows:
        splits = -(-vocabulary // CHUNK)
        parts = torch.empty(rows * splits * 2, dtype=torch.float32, device=device)
        _logprob_kernel[(rows * splits,)](
            logits_NV, temperature_N, ids_N, chosen, total, parts, counters(device, max(next_power_of_2(rows), 4096)),
            vocabulary, logits_NV.stride(0), SPLITS=splits, SPLITS_P=next_power_of_2(splits), CHUNK=CHUNK, num_warps=4,
        )  # fmt: skip
    if top_n == 0:
        return chosen, torch.empty(rows, 0, dtype=torch.int32, device=device), total.new_empty(rows, 0)
    top, ids = logits_NV.topk(top_n, -1)
    temperature_N1 = torch.where(temperature_N < 1e-6, 1.0, temperature_N)[:, None]
    return chosen, ids.to(torch.int32), top.float() / temperature_N1 - total[:, None]


@jit
def _penalty_kernel(
    logits_ptr, counts_ptr, seen_ptr, frequency_ptr, presence_ptr, repetition_ptr, out_ptr, V, stride, counts_stride,
    seen_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = ids < V
    z = tl.load(logits_ptr + row * stride + ids, mask=ok).to(tl.float32)
    count = tl.load(counts_ptr + row * counts_stride + ids, mask=ok, other=0)
    seen = tl.load(seen_ptr + row * seen_stride + ids, mask=ok, other=0).to(tl.int32)
    factor = tl.where((count > 0) | (seen != 0), tl.load(repetition_ptr + row), 1.0)
    z = tl.where(z > 0, tl.div_rn(z, factor), z * factor)
    z = z - tl.load(frequency_ptr + row) * count.to(tl.float32)
    z = z - tl.where(count > 0, tl.load(presence_ptr + row), 0.0)
    tl.store(out_ptr + row * V + ids, z, mask=ok)


def launch_apply_penalties(
    logits_NV: Tensor,
    counts_output_NV: Tensor,
    seen_prompt_NV: Tensor,
    frequency_N: Tensor,
    presence_N: Tensor,
    repetition_N: Tensor,
) -> Tensor:
    """Triton launch of `apply_penalties`."""
    rows, vocabulary = logits_NV.shape
    out = torch.empty(rows, vocabulary, dtype=torch.float32, device=logits_NV.device)
    if rows:
        _penalty_kernel[(rows, -(-vocabulary // BLOCK))](
            logits_NV, counts_output_NV, seen_prompt_NV, frequency_N, presence_N, repetition_N, out, vocabulary,
            logits_NV.stride(0), counts_output_NV.stride(0), seen_prompt_NV.stride(0), BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return out
