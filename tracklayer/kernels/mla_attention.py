"""Triton: attention of all heads to one key a token, the latent and its turned dims; the latent is the value too.

T tokens, B sequences, N heads, S cache slots, C latent width, R dims beside it, D = C + R, L keys of a block. A program
holds M rows, row r being head r % HB of token r // HB: HB heads (64, whom tensor cores want, or all there are) and, in
sequences of several tokens, as many tokens as fill 64 rows. A block of latents is loaded once and read twice, as keys
and as values.

Sequences of one token are split over programs by host bounds only, never by lens: CUDA-graph safe. Each split leaves
its normed result and its log-sum; a second kernel adds them in split order, so the sum is deterministic. Splits without
a share leave at once. Programs of one split of a sequence are neighbours: they share its latents in the L2 cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tracklayer.kernels.attention import paged_attention_ref
from tracklayer.kernels.attention_rule import Rule
from tracklayer.kernels.dispatch import use_triton
from tracklayer.kernels.jit import LOG2E, await_previous, has_pdl, jit, next_power_of_2, num_sms, shared_bytes, tl
from tracklayer.kernels.mla_hopper import KEYS, hopper_latent_attention, serves_latents

MAX_SPLITS = 128


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How the kernel is cut: rows of a program, keys of a block, its stages and warps, splits of a lone token's cache.

    None: by rule. part_dtype: what the splits' results are kept in until they are added. hopper: by mla_hopper.py where
    it serves, whose rows, keys and warps are its own (1.3 to 1.6 times as fast on an H200).
    """

    rows: int | None = None
    block: int | None = None
    stages: int | None = None
    warps: int | None = None
    splits: int | None = None
    part_dtype: torch.dtype = torch.float32
    hopper: bool = True


def latent_attention(
    q_TND: Tensor,
    k_SHD: Tensor,
    *,
    value_dim: int,
    slot_table_RC: Tensor,
    rows_B: Tensor,
    starts_B1: Tensor,
    lens_B: Tensor,
    max_query: int,
    max_len: int,
    scale: float,
    num_decodes: int = 0,
    schedule: Schedule | None = None,
) -> Tensor:
    """`paged_attention` over k_SHD [S, 1, >= D], whose first value_dim columns are the values: [T, N, value_dim].

    Arguments as there. Rows of a sequence with lens -1 hold anything, as do tokens outside every sequence.
    Raises ValueError when the widths do not fit together.
    """
    width = q_TND.shape[2]
    if k_SHD.shape[1] != 1 or not 0 < value_dim <= width <= k_SHD.shape[2]:
        raise ValueError(
            f"queries {width} wide with values of {value_dim} do not fit a cache of {tuple(k_SHD.shape[1:])} a slot"
        )
    where = dict(slot_table_RC=slot_table_RC, rows_B=rows_B, starts_B1=starts_B1, lens_B=lens_B)
    rule = dict(value_dim=value_dim, max_len=max_len, scale=scale)
    if not use_triton(q_TND):
        return latent_attention_ref(q_TND, k_SHD, max_query=max_query, **where, **rule)
    decodes = len(lens_B) if max_query == 1 else num_decodes
    return launch_latent_attention(q_TND, k_SHD, num_decodes=decodes, schedule=schedule, **where, **rule)


def latent_attention_ref(
    q_TND: Tensor,
    k_SHD: Tensor,
    *,
    value_dim: int,
    slot_table_RC: Tensor,
    rows_B: Tensor,
    starts_B1: Tensor,
    lens_B: Tensor,
    max_query: int,
    max_len: int,
    scale: float,
) -> Tensor:
    """The torch reference of `latent_attention`."""
    return paged_attention_ref(
        q_TND, k_SHD[..., : q_TND.shape[2]], k_SHD[..., :value_dim], Rule(scale), slot_table_RC=slot_table_RC,
        rows_B=rows_B, starts_B1=starts_B1, lens_B=lens_B, max_query=max_query, max_len=max_len,
    )  # fmt: skip


@jit
def _share(length, splits, L: tl.constexpr):
    """Blocks that one split takes of a sequence: two at least, one is not worth an addition."""
    blocks = (tl.maximum(length, 1) + L - 1) // L
    return tl.maximum((blocks + splits - 1) // splits, 2), blocks


@jit
def _sequence_of(block, starts_ptr, sequences, TOKENS: tl.constexpr):
    """Sequence b whose blocks of TOKENS tokens are numbered from starts[b] // TOKENS + b on, and its first block."""
    SEARCH: tl.constexpr = 128
    b = -1
    for base in range(0, sequences, SEARCH):
        i = base + tl.arange(0, SEARCH)
        begin = tl.load(starts_ptr + i, mask=i < sequences, other=0) // TOKENS + i
        b += tl.sum(((i < sequences) & (begin <= block)).to(tl.int32), 0)
    b = tl.maximum(b, 0)
    return b, tl.load(starts_ptr + b) // TOKENS + b


@jit(do_not_specialize=["sequences", "splits"])
def _latent_attention_kernel(
    q_ptr, k_ptr, out_ptr, sums_ptr, table_ptr, rows_ptr, starts_ptr, lens_ptr, sequences, splits,
    q_stride_t, q_stride_n, k_stride, out_stride_t, table_stride, scale,
    N: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, HB: tl.constexpr,
    TOKENS: tl.constexpr, L: tl.constexpr, LONE: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """LONE: sequence b is token b. SPLIT: results go to [b, n, split], each with its log-sum."""
    HEAD_BLOCKS: tl.constexpr = (N + HB - 1) // HB
    pid = tl.program_id(0)
    head_block = pid % HEAD_BLOCKS
    await_previous(PDL)
    if LONE:
        split = (pid // HEAD_BLOCKS) % splits
        b = pid // (HEAD_BLOCKS * splits)
        length = tl.load(lens_ptr + b)
        share, blocks = _share(length, splits, L)
        start = b
        count = 1
        token0 = 0
        lo = split * share * L
        hi = tl.minimum((split + 1) * share, blocks) * L
        if lo >= hi:
            return
    else:
        split = 0
        # Late blocks of a chunk see the most keys: they start first.
        block = tl.num_programs(0) // HEAD_BLOCKS - 1 - pid // HEAD_BLOCKS
        b, block0 = _sequence_of(block, starts_ptr, sequences, TOKENS)
        start = tl.load(starts_ptr + b)
        count = tl.load(starts_ptr + b + 1) - start
        token0 = (block - block0) * TOKENS
        length = tl.load(lens_ptr + b)
        if (token0 < 0) | (token0 >= count) | (length < 0):
            return
        lo = 0
        hi = length - count + tl.minimum(token0 + TOKENS, count)

    M: tl.constexpr = HB * TOKENS
    r = tl.arange(0, M)
    n = head_block * HB + r % HB
    token = token0 + r // HB
    r_ok = (n < N) & (token < count)
    last = length - count + tl.minimum(token, count - 1)  # position of each row's own token
    c = tl.arange(0, CP)
    d = C + tl.arange(0, RP)
    c_ok = c < C
    d_ok = d < C + R
    q_row = q_ptr + (start + token).to(tl.int64) * q_stride_t + n * q_stride_n
    q0 = tl.load(q_row[:, None] + c[None, :], mask=r_ok[:, None] & c_ok[None, :], other=0.0)
    q1 = tl.load(q_row[:, None] + d[None, :], mask=r_ok[:, None] & d_ok[None, :], other=0.0)
    table_row = table_ptr + tl.load(rows_ptr + b).to(tl.int64) * table_stride

    m = tl.full([M], -1e30, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, CP], tl.float32)
    for at in tl.range(lo, hi, L, num_stages=STAGES):
        position = at + tl.arange(0, L)
        ok = position < length
        slot = tl.load(table_row + position, mask=ok, other=0).to(tl.int64)
        k_row = k_ptr + slot * k_stride
        latent = tl.load(k_row[:, None] + c[None, :], mask=ok[:, None] & c_ok[None, :], other=0.0)
        turned = tl.load(k_row[:, None] + d[None, :], mask=ok[:, None] & d_ok[None, :], other=0.0)
        s = tl.dot(q0, tl.trans(latent), input_precision=PRECISION)
        s = tl.dot(q1, tl.trans(turned), s, input_precision=PRECISION) * scale
        if LONE:
            s = tl.where(ok[None, :], s, float("-inf"))
        else:
            s = tl.where(position[None, :] <= last[:, None], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        shrink = tl.exp2(m - m_new)
        p = tl.exp2(s - m_new[:, None])
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(latent.dtype), latent, acc * shrink[:, None], input_precision=PRECISION)
        m = m_new

    total = tl.maximum(total, 1e-30)
    acc = acc / total[:, None]
    if SPLIT:
        at = (b.to(tl.int64) * N + n) * splits + split
        tl.store(sums_ptr + at, m + tl.log2(total), mask=r_ok)
        out_row = out_ptr + at * C
    else:
        out_row = out_ptr + (start + token).to(tl.int64) * out_stride_t + n * C
    tl.store(out_row[:, None] + c[None, :], acc.to(out_ptr.dtype.element_ty), mask=r_ok[:, None] & c_ok[None, :])


@jit(do_not_specialize=["splits"])
def _add_splits_kernel(
    parts_ptr, sums_ptr, out_ptr, lens_ptr, splits, out_stride_t, N: tl.constexpr, C: tl.constexpr, CB: tl.constexpr,
    SP: tl.constexpr, SB: tl.constexpr, L: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program adds the splits of one head of a token, CB columns of them, SB splits at a time."""
    b = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1)
    c = tl.program_id(2) * CB + tl.arange(0, CB)
    await_previous(PDL)
    share, blocks = _share(tl.load(lens_ptr + b), splits, L)
    active = (blocks + share - 1) // share
    first = (b * N + n) * splits
    every = tl.arange(0, SP)
    sums = tl.load(sums_ptr + first + every, mask=every < active, other=float("-inf"))
    most = tl.max(sums, 0)
    whole = tl.sum(tl.exp2(sums - most), 0)
    acc = tl.zeros([CB], tl.float32)
    for base in range(0, active, SB):
        s = base + tl.arange(0, SB)
        weight = tl.exp2(tl.load(sums_ptr + first + s, mask=s < active, other=float("-inf")) - most)
        part = tl.load(parts_ptr + (first + s)[:, None] * C + c[None, :], mask=(s < active)[:, None] & (c < C)[None, :],
                       other=0.0)  # fmt: skip
        acc += tl.sum(part.to(tl.float32) * weight[:, None], 0)
    out_at = out_ptr + b * out_stride_t + n * C + c
    tl.store(out_at, (acc / whole).to(out_ptr.dtype.element_ty), mask=c < C)


@cache
def lone_splits(sequences: int, head_blocks: int, max_len: int, block: int, sms: int) -> int:
    """Splits from the host's bounds that end soonest, when a multiprocessor's shared memory admits one program.

    Counted in blocks of keys, at a context of 16,384 or the bound: a program's start and end cost two, what it leaves
    for the addition two more, the second launch two.
    """
    blocks, programs = -(-min(max_len, 16384) // block), sequences * head_blocks

    def cost(splits: int) -> int:
        turns = -(-programs * splits // sms)
        return turns * (-(-blocks // splits) + (4 if splits > 1 else 2)) + 2 * (splits > 1)

    return min(range(1, max(min(-(-max_len // (2 * block)), MAX_SPLITS), 1) + 1), key=cost)


def fitting(width: int, rows: int, itemsize: int, shared: int) -> tuple[int, int]:
    """(keys of a block, stages) of which a block's shared memory holds the most beside the queries."""
    tries = [(64, 3), (64, 2), (32, 3), (32, 2), (16, 2)]
    room = shared - rows * width * itemsize
    # Below 64 rows tensor cores read registers: five stages hold two blocks, and beat the kernel by hand (H200).
    if rows < 64 and (2 * 64 * width + rows * 64) * itemsize <= room:
        return 64, 5
    # What is in flight is one stage less than stages; the products' operands may pass through it too.
    fits = (t for t in tries if (t[0] * width * (t[1] - 1) + rows * t[0]) * itemsize <= room)
    return next(fits, (16, 1))


def launch_latent_attention(
    q_TND: Tensor,
    k_SHD: Tensor,
    *,
    value_dim: int,
    slot_table_RC: Tensor,
    rows_B: Tensor,
    starts_B1: Tensor,
    lens_B: Tensor,
    max_len: int,
    scale: float,
    num_decodes: int,
    schedule: Schedule | None = None,
) -> Tensor:
    """Triton launches of `latent_attention`: the first num_decodes sequences, split or not, then the others."""
    schedule = schedule or Schedule()
    out_TNC = q_TND.new_empty(*q_TND.shape[:2], value_dim)
    n, tokens = num_decodes, len(q_TND)
    common = dict(schedule=schedule, slot_table_RC=slot_table_RC, scale=scale)
    if n:
        _launch(q_TND[:n], k_SHD, out_TNC[:n], rows_B[:n], None, lens_B[:n], max_len=max_len, **common)
    if n < len(lens_B) and n < tokens:
        _launch(q_TND, k_SHD, out_TNC, rows_B[n:], starts_B1[n:], lens_B[n:], max_len=max_len, **common)
    return out_TNC


def _launch(
    q_TND: Tensor,
    k_SHD: Tensor,
    out_TNC: Tensor,
    rows_B: Tensor,
    starts_B1: Tensor | None,
    lens_B: Tensor,
    *,
    slot_table_RC: Tensor,
    max_len: int,
    scale: float,
    schedule: Schedule,
) -> None:
    """One of the two forms: sequences of one token each (starts_B1 None) or of any number."""
    tokens, heads, width = q_TND.shape
    sequences, latent, device = len(lens_B), out_TNC.shape[2], q_TND.device
    lone, itemsize = starts_B1 is None, q_TND.element_size()
    hopper = lone and schedule.hopper and serves_latents(q_TND, k_SHD, latent)
    rows = 64 if hopper else schedule.rows or (64 if itemsize == 2 else 16)
    per_block = min(max(next_power_of_2(heads), 16 if lone else 1), rows)
    token_rows = 1 if lone else rows // per_block
    head_blocks = -(-heads // per_block)
    padded = max(next_power_of_2(latent), 16) + max(next_power_of_2(width - latent), 16)
    block, stages = fitting(padded, per_block * token_rows, itemsize, shared_bytes(device))
    block, stages = KEYS if hopper else schedule.block or block, schedule.stages or stages
    splits = 1
    if lone:
        splits = schedule.splits or lone_splits(sequences, head_blocks, max_len, block, num_sms(device))
    target, sums = out_TNC, None
    if splits > 1:
        target = torch.empty(sequences * heads * splits, latent, dtype=schedule.part_dtype, device=device)
        sums = torch.empty(sequences * heads * splits, dtype=torch.float32, device=device)
    pdl = has_pdl(device)
    if hopper:
        hopper_latent_attention(
            q_TND, k_SHD, target, sums, slot_table_RC=slot_table_RC, rows_B=rows_B, lens_B=lens_B, splits=splits,
            out_stride=out_TNC.stride(0), scale=scale,
        )  # fmt: skip
    else:
        blocks = sequences * splits if lone else -(-tokens // token_rows) + sequences
        _latent_attention_kernel[(blocks * head_blocks,)](
            q_TND, k_SHD, target, sums, slot_table_RC, rows_B, starts_B1, lens_B, sequences, splits, q_TND.stride(0),
            q_TND.stride(1), k_SHD.stride(0), out_TNC.stride(0), slot_table_RC.stride(0), scale * LOG2E, N=heads,
            C=latent, CP=max(next_power_of_2(latent), 16), R=width - latent,
            RP=max(next_power_of_2(width - latent), 16), HB=per_block, TOKENS=token_rows, L=block, LONE=lone,
            SPLIT=splits > 1, PRECISION="ieee" if itemsize == 4 else "tf32", STAGES=stages, PDL=pdl, launch_pdl=pdl,
            num_warps=schedule.warps or (8 if latent > 256 else 4),
        )  # fmt: skip
    if splits > 1:
        columns = min(max(next_power_of_2(latent), 16), 256)
        _add_splits_kernel[(sequences, heads, -(-latent // columns))](
            target, sums, out_TNC, lens_B, splits, out_TNC.stride(0), N=heads, C=latent, CB=columns,
            SP=next_power_of_2(splits), SB=min(next_power_of_2(splits), 16), L=block, PDL=pdl, launch_pdl=pdl,
            num_warps=4,
        )  # fmt: skip
