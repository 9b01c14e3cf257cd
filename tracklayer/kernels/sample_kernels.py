"""Triton: sampling, its filter thresholds, log-probabilities and penalties; the rules are in sample.py.

N rows, V tokens of the vocabulary. A row is read by several programs, CHUNK tokens each whatever the batch, and the
last one to finish merges their results in order, so a row's outcome does not depend on the rows beside it.
No sort: the filters keep every token whose strictly likelier ones weigh less than a target (a count for top-k, a
probability mass for top-p), so the least logit kept is found by bisection over the ordered bit patterns of float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracklayer.kernels.jit import counters, jit, next_power_of_2, tl

CHUNK = 4096
BLOCK = 2048


@jit
def _mix(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@jit
def _noise(ids, key0, key1):
    """-log of an exponential variate per token id; the same integers as sample.exponential_noise."""
    x = ids.to(tl.uint32) ^ key0
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= key1
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    u = ((x & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31
    series = u + 0.5 * u * u
    return -tl.log(tl.where(u < 0.0009765625, series, -tl.log(tl.maximum(1.0 - u, 1.4901161193847656e-08))))


@jit
def _load_logits(row_ptr, ids, V, temperature):
    """float32 logits over temperature; NaN becomes -inf, +inf a large number, as does nothing past V."""
    z = tl.load(row_ptr + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    z = tl.where(z == z, tl.minimum(z, 1e30), float("-inf"))
    return tl.div_rn(z, temperature) + 0.0  # -0.0 becomes 0.0, its bit pattern counts below


@jit
def _row_temperature(temperature_ptr, top_k_ptr, row):
    """(temperature, greedy): 1.0 for greedy rows."""
    temperature = tl.load(temperature_ptr + row)
    greedy = (temperature < 1e-6) | (tl.load(top_k_ptr + row) == 1)
    return tl.where(greedy, 1.0, temperature), greedy


@jit
def _sample_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, threshold_ptr, seeds_ptr, positions_ptr, out_ptr, best_ptr, ids_ptr,
    done_ptr, V, stride, SPLITS: tl.constexpr, SPLITS_P: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    GREEDY: tl.constexpr, FILTER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    temperature = 1.0
    greedy = True
    if not GREEDY:
        temperature, greedy = _row_temperature(temperature_ptr, top_k_ptr, row)
        seed = tl.load(seeds_ptr + row)
        low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
        position = tl.load(positions_ptr + row).to(tl.uint32)
        key0 = _mix(_mix(_mix(low) ^ high) ^ position)
        key1 = _mix(_mix(_mix(high ^ 0x5BD1E995) ^ position) ^ low)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = split * CHUNK + tl.arange(0, BLOCK)
    for offset in tl.static_range(0, CHUNK, BLOCK):
        ids = split * CHUNK + offset + tl.arange(0, BLOCK)
        z = _load_logits(row_ptr, ids, V, temperature)
        if FILTER:
            z = tl.where(z < tl.load(threshold_ptr + row), float("-inf"), z)
        if not GREEDY:
            z += tl.where(greedy, 0.0, _noise(ids, key0, key1))
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


@jit
def _key(z):
    """int32 that orders as the float32 z does."""
    bits = z.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _weigh(row_ptr, V, temperature, top, floor, pivots, MASS: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr):
    """float32 [P]: per pivot the number (or probability mass) of tokens with floor <= key and pivot < key."""
    total = tl.zeros([BLOCK, P], tl.float32)
    for offset in range(0, V, BLOCK):
        ids = offset + tl.arange(0, BLOCK)
        z = _load_logits(row_ptr, ids, V, temperature)
        key = _key(z)
        weight = tl.exp(z - top) if MASS else tl.full([BLOCK], 1.0, tl.float32)
        weight = tl.where((ids < V) & (key >= floor), weight, 0.0)
        total += tl.where(key.to(tl.int64)[:, None] > pivots[None, :], weight[:, None], 0.0)
    return tl.sum(total, 0)


@jit
def _bisect(
    row_ptr, V, temperature, top, floor, low, high, target, MASS: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr
):
    """The least key in low .. high beyond which the weight is under target (at high it is)."""
    j = tl.arange(0, P)
    while low < high:
        pivots = low + (high - low) * (j + 1) // (P + 1)
        under = _weigh(row_ptr, V, temperature, top, floor, pivots, MASS, BLOCK, P) < target
        new_low = tl.max(tl.where(under, low, pivots + 1), 0)
        high = tl.min(tl.where(under, pivots, high), 0)
        low = new_low
    return low


@jit
def _threshold_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, threshold_ptr, V, stride, BLOCK: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    temperature, greedy = _row_temperature(temperature_ptr, top_k_ptr, row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    threshold = float("-inf")
    if (not greedy) & ((top_k < V) | (top_p < 1.0) | (min_p > 0.0)):
        most = tl.full([BLOCK], float("-inf"), tl.float32)
        least = tl.full([BLOCK], float("inf"), tl.float32)
        for offset in range(0, V, BLOCK):
            ids = offset + tl.arange(0, BLOCK)
            z = _load_logits(row_ptr, ids, V, temperature)
            most = tl.maximum(most, z)
            least = tl.minimum(least, tl.where(ids < V, z, float("inf")))
        top = tl.max(most, 0)
        low = _key(tl.min(least, 0)).to(tl.int64)
        high = _key(top).to(tl.int64)
        if (top_k < V) & (low < high):
            low = _bisect(row_ptr, V, temperature, top, low, low, high, top_k.to(tl.float32), False, BLOCK, P)
        if (top_p < 1.0) & (low < high):
            whole = _weigh(row_ptr, V, temperature, top, low, low - 1 + tl.zeros([P], tl.int64), True, BLOCK, P)
            target = top_p * tl.max(whole, 0)
            low = _bisect(row_ptr, V, temperature, top, low, low, high, target, True, BLOCK, P)
        low32 = low.to(tl.int32)
        threshold = (low32 ^ ((low32 >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        if min_p > 0.0:
            threshold = tl.maximum(threshold, top + tl.log(min_p))
    tl.store(threshold_ptr + row, threshold)


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
    """Triton launch of `sample`: one launch, one more with filters."""
    rows, vocabulary = logits_NV.shape
    device = logits_NV.device
    out = torch.empty(rows, dtype=torch.int32, device=device)
    if rows == 0:
        return out
    filtered = any_filter and not all_greedy
    threshold = launch_threshold(logits_NV, temperature_N, top_k_N, top_p_N, min_p_N) if filtered else None
    splits = -(-vocabulary // CHUNK)
    best = torch.empty(rows * splits, dtype=torch.float32, device=device)
    ids = torch.empty(rows * splits, dtype=torch.int32, device=device)
    _sample_kernel[(rows * splits,)](
        logits_NV, temperature_N, top_k_N, threshold, seeds_N, positions_N, out, best, ids,
        counters(device, max(next_power_of_2(rows), 4096)), vocabulary, logits_NV.stride(0), SPLITS=splits,
        SPLITS_P=next_power_of_2(splits), CHUNK=CHUNK, BLOCK=BLOCK, GREEDY=all_greedy, FILTER=filtered, num_warps=4,
    )  # fmt: skip
    return out


def launch_threshold(
    logits_NV: Tensor, temperature_N: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor
) -> Tensor:
    """float32 [N]: tokens whose logit over temperature lies below it are filtered out; -inf for rows without filter."""
    threshold = torch.empty(len(logits_NV), dtype=torch.float32, device=logits_NV.device)
    _threshold_kernel[(len(logits_NV),)](
        logits_NV, temperature_N, top_k_N, top_p_N, min_p_N, threshold, logits_NV.shape[1], logits_NV.stride(0),
        BLOCK=min(BLOCK, next_power_of_2(logits_NV.shape[1])), P=8, num_warps=16,
    )  # fmt: skip
    return threshold


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
