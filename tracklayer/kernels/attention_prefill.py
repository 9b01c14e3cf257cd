"""Triton: paged attention of any number of query tokens a sequence (prefill, chunks, mixed steps).

B sequences, N query heads, H key heads (N = G * H), D key width, E value width, M rows of a query block, L positions
of a key block. A query block packs tokens and their G heads of one key head: row r is token r // G, head r % G, so
that keys are read once for all G heads and short sequences waste little. The grid is the host's bound
T * G / M + B on the number of blocks; a program finds its sequence from starts_B1 on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracklayer.kernels.attention_decode import split_width
from tracklayer.kernels.attention_rule import Rule
from tracklayer.kernels.jit import LOG2E, jit, next_power_of_2, shared_bytes, tl


@jit
def _accumulate(
    m, total, acc, q0, q1, k_ptr, v_ptr, table_row, position_M, length, lo, hi,
    k_stride_s, k_stride_h, v_stride_s, v_stride_h, h, scale, softcap, window, chunk,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, L: tl.constexpr,
    PAGED: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax over the positions lo .. hi (hi - lo a multiple of L unless MASKED)."""
    d0 = tl.arange(0, D0)
    e = tl.arange(0, EP)
    for block in tl.range(lo, hi, L, num_stages=STAGES):
        position = block + tl.arange(0, L)
        ok = position < length
        if PAGED:
            if MASKED:
                slot = tl.load(table_row + position, mask=ok, other=0).to(tl.int64)
            else:
                slot = tl.load(table_row + position).to(tl.int64)
        else:
            slot = position.to(tl.int64)
        k_row = k_ptr + slot * k_stride_s + h * k_stride_h
        v_at = v_ptr + slot[:, None] * v_stride_s + h * v_stride_h + e[None, :]
        if MASKED:
            k0 = tl.load(k_row[:, None] + d0[None, :], mask=ok[:, None], other=0.0)
        else:
            k0 = tl.load(k_row[:, None] + d0[None, :])
        s = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
        if D1 > 0:
            d1 = D0 + tl.arange(0, D1)
            k1 = tl.load(k_row[:, None] + d1[None, :], mask=ok[:, None] & (d1 < D)[None, :], other=0.0)
            s = tl.dot(q1, tl.trans(k1), s, input_precision=PRECISION)
        s = s * scale
        if SOFTCAP:
            s = softcap * (1.0 - 2.0 / (tl.exp2(s * (2.0 * 1.4426950408889634 / softcap)) + 1.0)) * 1.4426950408889634
        if MASKED:
            seen = ok[None, :] & (position[None, :] <= position_M[:, None])
            if WINDOW:
                seen = seen & (position[None, :] > position_M[:, None] - window)
            if CHUNK:
                seen = seen & (position[None, :] >= (position_M // chunk * chunk)[:, None])
            s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        if MASKED:
            m_new = tl.maximum(m_new, -1e30)  # a row may see nothing of this block
        shrink = tl.exp2(m - m_new)
        p = tl.exp2(s - m_new[:, None])
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(v_at, mask=ok[:, None] & (e < E)[None, :], other=0.0) if MASKED or E < EP else tl.load(v_at)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        m = m_new
    return m, total, acc


@jit(do_not_specialize=["sequences"])
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, rows_ptr, starts_ptr, lens_ptr, sinks_ptr, sequences,
    q_stride_t, q_stride_n, k_stride_s, k_stride_h, v_stride_s, v_stride_h, table_stride, scale, softcap, window, chunk,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr,
    EP: tl.constexpr, M: tl.constexpr, L: tl.constexpr, PAGED: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    SINKS: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    SEARCH: tl.constexpr = 128
    pid = tl.program_id(0)
    h = pid % H
    # Late blocks of a prompt see the most keys: they start first.
    block = tl.num_programs(0) // H - 1 - pid // H
    # Sequence b's blocks are numbered from starts[b] * G // M + b on: never overlapping, at most one number unused.
    b = -1
    for base in range(0, sequences, SEARCH):
        i = base + tl.arange(0, SEARCH)
        begin = tl.load(starts_ptr + i, mask=i < sequences, other=0) * G // M + i
        b += tl.sum(((i < sequences) & (begin <= block)).to(tl.int32), 0)
    b = tl.maximum(b, 0)  # blocks of tokens before the first sequence are left out below
    start = tl.load(starts_ptr + b)
    count = tl.load(starts_ptr + b + 1) - start
    row0 = (block - (start * G // M + b)) * M
    length = tl.load(lens_ptr + b)
    if (row0 < 0) | (row0 >= count * G) | (length < 0):
        return

    r = row0 + tl.arange(0, M)
    r_ok = r < count * G
    token = start + r // G
    n = h * G + r % G
    # Rows past the end repeat the last token's position: their results are not stored.
    position_M = length - count + tl.minimum(r // G, count - 1)
    if BLOCK > 1:  # a token sees its block of BLOCK positions to the end
        position_M = tl.minimum(position_M // BLOCK * BLOCK + BLOCK - 1, length - 1)
    d0 = tl.arange(0, D0)
    e = tl.arange(0, EP)
    q_row = q_ptr + token.to(tl.int64) * q_stride_t + n * q_stride_n
    q0 = tl.load(q_row[:, None] + d0[None, :], mask=r_ok[:, None], other=0.0)
    q1 = q0
    if D1 > 0:
        d1 = D0 + tl.arange(0, D1)
        q1 = tl.load(q_row[:, None] + d1[None, :], mask=r_ok[:, None] & (d1 < D)[None, :], other=0.0)
    if PAGED:
        table_row = table_ptr + tl.load(rows_ptr + b).to(tl.int64) * table_stride
    else:
        table_row = table_ptr
        k_ptr += start.to(tl.int64) * k_stride_s
        v_ptr += start.to(tl.int64) * v_stride_s

    low = length - count + row0 // G  # position of the first token, and of the last one of this block
    high = length - count + tl.minimum((row0 + M - 1) // G, count - 1)
    if BLOCK > 1:
        high = tl.minimum(high // BLOCK * BLOCK + BLOCK - 1, length - 1)
    first = 0
    if WINDOW:
        first = tl.maximum(first, low - window + 1)  # nothing before it is read: its slots may be another's
    if CHUNK:
        first = tl.maximum(first, low // chunk * chunk)
    whole = first if WINDOW or CHUNK else (low + 1) // L * L  # blocks before it need no mask
    m = tl.full([M], -1e30, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, EP], tl.float32)
    m, total, acc = _accumulate(
        m, total, acc, q0, q1, k_ptr, v_ptr, table_row, position_M, length, first, whole,
        k_stride_s, k_stride_h, v_stride_s, v_stride_h, h, scale, softcap, window, chunk,
        D, D0, D1, E, EP, L, PAGED, False, WINDOW, CHUNK, SOFTCAP, PRECISION, STAGES,
    )  # fmt: skip
    m, total, acc = _accumulate(
        m, total, acc, q0, q1, k_ptr, v_ptr, table_row, position_M, length, whole, high + 1,
        k_stride_s, k_stride_h, v_stride_s, v_stride_h, h, scale, softcap, window, chunk,
        D, D0, D1, E, EP, L, PAGED, True, WINDOW, CHUNK, SOFTCAP, PRECISION, STAGES,
    )  # fmt: skip
    if SINKS:
        total += tl.exp2(tl.load(sinks_ptr + n).to(tl.float32) * 1.4426950408889634 - m)
    acc = acc / tl.maximum(total, 1e-30)[:, None]
    out_at = out_ptr + (token.to(tl.int64) * (H * G) + n)[:, None] * E + e[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=r_ok[:, None] & (e < E)[None, :])


def _fitting(row_bytes: int, query_bytes: int, shared: int, narrow: bool) -> tuple[int, int]:
    """(key positions at once, stages) whose keys, values and queries fit in a block's shared memory; best first."""
    tries = [(128, 3), (64, 3), (64, 2), (32, 2), (16, 2)]
    fits = (t for t in tries if t[0] * t[1] * row_bytes + query_bytes <= shared and (narrow or t[0] < 128))
    return next(fits, (16, 1))


def paged_prefill(
    q_TND: Tensor,
    k_SHD: Tensor,
    v_SHE: Tensor,
    rule: Rule,
    *,
    slot_table_RC: Tensor | None,
    rows_B: Tensor | None,
    starts_B1: Tensor,
    lens_B: Tensor,
    block_m: int | None = None,
    block_l: int | None = None,
    warps: int | None = None,
    stages: int = 3,
    out_TNE: Tensor | None = None,
) -> Tensor:
    """Launch: arguments as in `paged_attention`; block_m .. stages steer the schedule. Returns [T, N, E].

    block_m, block_l: rows of a query block, positions of a key block.
    Rows of a sequence with lens -1 are left alone.
    slot_table_RC None: nothing is cached, k and v are the step's own [T, H, D], [T, H, E].
    """
    tokens, heads, width = q_TND.shape
    kv_heads, value_width = k_SHD.shape[1], v_SHE.shape[2]
    if width < 16:
        raise ValueError(f"the attention kernel needs heads of at least 16 dims, got {width}")
    out = q_TND.new_empty(tokens, heads, value_width) if out_TNE is None else out_TNE
    sequences = len(lens_B)
    if tokens == 0 or sequences == 0:
        return out
    per_group = heads // kv_heads
    paged = slot_table_RC is not None
    narrow = value_width <= 128 and q_TND.element_size() == 2
    if block_m is None:
        block_m = 128 if narrow else 64 if value_width <= 256 else 16
    if block_l is None and not paged:
        row_bytes = (width + value_width) * q_TND.element_size()
        query_bytes = block_m * width * q_TND.element_size()
        block_l, stages = _fitting(row_bytes, query_bytes, shared_bytes(q_TND.device), narrow)
    elif block_l is None:
        block_l = 64 if q_TND.element_size() == 2 else 32
    if warps is None:
        warps = 8 if not paged or not narrow else 4
    d0, d1 = split_width(width)
    blocks = -(-tokens * per_group // block_m) + sequences
    _prefill_kernel[(blocks * kv_heads,)](
        q_TND, k_SHD, v_SHE, out, slot_table_RC, rows_B, starts_B1, lens_B, rule.sinks_N, sequences,
        q_TND.stride(0), q_TND.stride(1), k_SHD.stride(0), k_SHD.stride(1), v_SHE.stride(0), v_SHE.stride(1),
        slot_table_RC.stride(0) if paged else 0, rule.scale if rule.softcap else rule.scale * LOG2E,
        rule.softcap or 0.0, rule.window or 0, rule.chunk or 1,
        H=kv_heads, G=per_group, D=width, D0=d0, D1=d1, E=value_width, EP=max(next_power_of_2(value_width), 16),
        M=block_m, L=block_l, PAGED=paged, WINDOW=rule.window is not None, CHUNK=rule.chunk is not None,
        BLOCK=rule.block or 1, SINKS=rule.sinks_N is not None, SOFTCAP=rule.softcap is not None,
        PRECISION="ieee" if q_TND.dtype == torch.float32 else "tf32", STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return out
