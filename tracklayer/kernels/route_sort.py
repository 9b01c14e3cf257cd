"""Triton: sort (token, expert) pairs by expert, in one launch or two that never ask the host.

P pairs (T * K), E experts, M rows of a block, C chunks of the pairs. Stable, deterministic, no atomics on memory.
    few pairs    one launch, a program per expert: it counts all pairs (a histogram), which tells it where its own
                 begin, and writes its own in their order
    many pairs   each chunk's pairs are counted; the counts of all chunks say where those of each chunk go
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracklayer.kernels.jit import await_previous, has_pdl

MANY_PAIRS = 16384  # from here on two launches that read each pair twice beat E programs that each read them all
MOST_CHUNKS = 128  # programs, which all read the counts of all
SUB = 256  # pairs ranked at once: each is compared with the others


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """pairs_P int32: pair numbers (t * K + k) grouped by expert; expert e has starts_E1[e] .. starts_E1[e + 1].

    Ids outside [0, E) are in no group, so the tail of pairs_P past starts_E1[E] is unwritten.
    blocks_2B int32: (expert, first place in pairs_P) of each block of M rows, num_blocks_1 of them.
    """

    pairs_P: Tensor
    starts_E1: Tensor
    blocks_2B: Tensor
    num_blocks_1: Tensor
    block_rows: int


@triton.jit
def _write_blocks(
    starts_ptr, blocks_ptr, num_blocks_ptr, max_blocks, counts_N, begin, expert, E: tl.constexpr, N: tl.constexpr,
    M: tl.constexpr,
):  # fmt: skip
    """What one expert adds to the lists: its first place, and its blocks of M rows."""
    before_N = tl.arange(0, N) < expert
    mine = tl.sum(tl.where(tl.arange(0, N) == expert, counts_N, 0), 0)
    first_block = tl.sum(tl.where(before_N, (counts_N + M - 1) // M, 0), 0)
    num_blocks = (mine + M - 1) // M
    tl.store(starts_ptr + expert, begin)
    if expert == E - 1:
        tl.store(starts_ptr + E, begin + mine)
        tl.store(num_blocks_ptr, first_block + num_blocks)
    for b0 in range(0, num_blocks, 32):
        b = b0 + tl.arange(0, 32)
        tl.store(blocks_ptr + first_block + b, tl.zeros([32], tl.int32) + expert, mask=b < num_blocks)
        tl.store(blocks_ptr + max_blocks + first_block + b, begin + b * M, mask=b < num_blocks)


@triton.jit(do_not_specialize=["P", "max_blocks"])
def _route_sort_kernel(
    ids_ptr, pairs_ptr, starts_ptr, blocks_ptr, num_blocks_ptr, P, max_blocks, E: tl.constexpr, N: tl.constexpr,
    CHUNK: tl.constexpr, M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    place = tl.arange(0, CHUNK)
    await_previous(PDL)
    counts_N = tl.zeros([N], tl.int32)
    for start in range(0, P, CHUNK):
        ids = tl.load(ids_ptr + start + place, mask=start + place < P, other=-1)
        known = (ids >= 0) & (ids < E)
        counts_N += tl.histogram(tl.where(known, ids, 0), N, mask=known)
    before_N = tl.arange(0, N) < expert
    begin = tl.sum(tl.where(before_N, counts_N, 0), 0)
    _write_blocks(starts_ptr, blocks_ptr, num_blocks_ptr, max_blocks, counts_N, begin, expert, E, N, M)
    for start in range(0, P, CHUNK):
        ids = tl.load(ids_ptr + start + place, mask=start + place < P, other=-1)
        hit = (ids == expert).to(tl.int32)
        at = begin + tl.cumsum(hit, 0) - 1
        tl.store(pairs_ptr + at, start + place, mask=hit > 0)
        begin += tl.sum(hit, 0)


@triton.jit(do_not_specialize=["P", "chunk_pairs"])
def _count_kernel(
    ids_ptr, counts_ptr, P, chunk_pairs, E: tl.constexpr, N: tl.constexpr, SUB: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """How many pairs of a chunk each expert has."""
    first = tl.program_id(0) * chunk_pairs
    i = tl.arange(0, SUB)
    await_previous(PDL)
    counts_N = tl.zeros([N], tl.int32)
    for start in range(first, tl.minimum(first + chunk_pairs, P), SUB):
        ids = tl.load(ids_ptr + start + i, mask=start + i < P, other=-1)
        known = (ids >= 0) & (ids < E)
        counts_N += tl.histogram(tl.where(known, ids, 0), N, mask=known)
    tl.store(counts_ptr + tl.program_id(0) * N + tl.arange(0, N), counts_N)


@triton.jit(do_not_specialize=["P", "chunk_pairs", "chunks", "max_blocks"])
def _place_kernel(
    ids_ptr, counts_ptr, pairs_ptr, starts_ptr, blocks_ptr, num_blocks_ptr, P, chunk_pairs, chunks, max_blocks,
    E: tl.constexpr, N: tl.constexpr, SUB: tl.constexpr, AT_ONCE: tl.constexpr, NEAR: tl.constexpr, M: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write the pairs of one chunk at their experts' places, in order, and every chunks-th expert's part of the lists.

    Each program sums all counts anew: that costs less than a launch that does it for all.
    """
    chunk = tl.program_id(0)
    expert_N = tl.arange(0, N)
    i = tl.arange(0, SUB)
    await_previous(PDL)
    counts_N = tl.zeros([N], tl.int32)
    earlier_N = tl.zeros([N], tl.int32)
    for c0 in range(0, chunks, AT_ONCE):
        chunk_C = c0 + tl.arange(0, AT_ONCE)
        at = chunk_C[:, None] * N + expert_N[None, :]
        counts_CN = tl.load(counts_ptr + at, mask=(chunk_C < chunks)[:, None], other=0)
        counts_N += tl.sum(counts_CN, 0)
        earlier_N += tl.sum(tl.where((chunk_C < chunk)[:, None], counts_CN, 0), 0)
    begin_N = tl.cumsum(counts_N, 0) - counts_N
    for expert in range(chunk, E, chunks):
        begin = tl.sum(tl.where(expert_N == expert, begin_N, 0), 0)
        _write_blocks(starts_ptr, blocks_ptr, num_blocks_ptr, max_blocks, counts_N, begin, expert, E, N, M)
    begin_N += earlier_N
    first = chunk * chunk_pairs
    for start in range(first, tl.minimum(first + chunk_pairs, P), SUB):
        ids = tl.load(ids_ptr + start + i, mask=start + i < P, other=-1)
        known = (ids >= 0) & (ids < E)
        at = tl.gather(begin_N, tl.where(known, ids, 0), 0)
        for near in range(0, SUB, NEAR):
            j = near + tl.arange(0, NEAR)
            others = tl.load(ids_ptr + start + j, mask=start + j < P, other=-1)
            at += tl.sum(((others[None, :] == ids[:, None]) & (j[None, :] < i[:, None])).to(tl.int32), 1)
        tl.store(pairs_ptr + at, start + i, mask=known)
        begin_N += tl.histogram(tl.where(known, ids, 0), N, mask=known)


def max_num_blocks(num_pairs: int, num_experts: int, block_rows: int) -> int:
    """The most blocks that any routing can need: a partial one for each expert that is hit."""
    return num_pairs // block_rows + min(num_experts, num_pairs)


def route_sort(ids_TK: Tensor, num_experts: int, block_rows: int) -> SortedPairs:
    """Group the pairs of contiguous int32 ids_TK [T, K] by expert; ids outside [0, num_experts) are dropped."""
    assert ids_TK.is_contiguous() and ids_TK.dtype == torch.int32, f"{ids_TK.dtype} {ids_TK.stride()}"
    num_pairs, device = ids_TK.numel(), ids_TK.device
    max_blocks = max_num_blocks(num_pairs, num_experts, block_rows)
    pairs_P = torch.empty(num_pairs, dtype=torch.int32, device=device)
    starts_E1 = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    blocks_2B = torch.empty(2, max_blocks, dtype=torch.int32, device=device)
    num_blocks_1 = torch.empty(1, dtype=torch.int32, device=device)
    width, pdl = max(32, triton.next_power_of_2(num_experts)), has_pdl(device)
    common = dict(E=num_experts, N=width, PDL=pdl, launch_pdl=pdl)
    lists = dict(
        starts_ptr=starts_E1, blocks_ptr=blocks_2B, num_blocks_ptr=num_blocks_1, max_blocks=max_blocks, M=block_rows
    )
    if num_pairs < MANY_PAIRS:
        chunk = min(4096, max(128, triton.next_power_of_2(num_pairs)))
        _route_sort_kernel[(num_experts,)](
            ids_TK, pairs_P, P=num_pairs, CHUNK=chunk, **lists, **common, num_warps=4 if chunk <= 1024 else 8
        )
    else:
        chunk_pairs = SUB * triton.cdiv(num_pairs, SUB * MOST_CHUNKS)
        chunks = triton.cdiv(num_pairs, chunk_pairs)
        counts_CN = torch.empty(chunks, width, dtype=torch.int32, device=device)
        cut = dict(P=num_pairs, chunk_pairs=chunk_pairs, SUB=SUB)
        _count_kernel[(chunks,)](ids_TK, counts_CN, **cut, **common)
        _place_kernel[(chunks,)](
            ids_TK, counts_CN, pairs_P, chunks=chunks, AT_ONCE=max(1, 8192 // width), NEAR=32, **cut, **lists,
            **common, num_warps=8,
        )  # fmt: skip
    return SortedPairs(pairs_P, starts_E1, blocks_2B, num_blocks_1, block_rows)


def route_sort_ref(ids_TK: Tensor, num_experts: int, block_rows: int) -> SortedPairs:
    """The torch reference of `route_sort`; blocks_2B has exactly the blocks that there are."""
    ids_P = ids_TK.reshape(-1).long()
    known_P = (ids_P >= 0) & (ids_P < num_experts)
    order_P = torch.where(known_P, ids_P, num_experts).argsort(stable=True)[: int(known_P.sum())]
    counts_E = ids_P[known_P].bincount(minlength=num_experts)
    starts_E1 = torch.nn.functional.pad(counts_E.cumsum(0), (1, 0))
    blocks = [
        (e, start) for e in range(num_experts) for start in range(int(starts_E1[e]), int(starts_E1[e + 1]), block_rows)
    ]
    blocks_2B = torch.tensor(blocks, dtype=torch.int32, device=ids_TK.device).reshape(-1, 2).t()
    num_blocks_1 = torch.tensor([len(blocks)], dtype=torch.int32, device=ids_TK.device)
    return SortedPairs(order_P.int(), starts_E1.int(), blocks_2B, num_blocks_1, block_rows)
