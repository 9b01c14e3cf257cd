"""Triton: paged attention of one query token a sequence, split over programs and merged in the same launch.

B sequences, N query heads, H key heads (N = G * H), D key width, E value width, S splits, L positions of a block.
The grid depends on B, H and host bounds only, never on lens: CUDA-graph safe. Each split takes an equal share of the
blocks that the sequence sees, splits without a share leave at once, and the last one to finish merges all partial
results in split order, so the sum is deterministic. Sequence-major order: neighbours that share a prefix run together
and find each other's keys in the L2 cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracklayer.kernels.attention_rule import Rule
from tracklayer.kernels.jit import LOG2E, await_previous, counters, has_pdl, jit, next_power_of_2, num_sms, tl

MAX_SPLITS = 32


@jit
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, acc_ptr, ml_ptr, done_ptr, table_ptr, rows_ptr, lens_ptr, sinks_ptr,
    q_stride_t, q_stride_n, k_stride_s, k_stride_h, v_stride_s, v_stride_h, table_stride, scale, softcap, window, chunk,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr,
    EP: tl.constexpr, GP: tl.constexpr, SPLITS: tl.constexpr, L: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, SINKS: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    HEAD_BLOCKS: tl.constexpr = (G + GP - 1) // GP
    pid = tl.program_id(0)
    split = pid % SPLITS
    group = pid // SPLITS
    head_block = group % HEAD_BLOCKS
    h = (group // HEAD_BLOCKS) % H
    b = group // (HEAD_BLOCKS * H)

    await_previous(PDL)
    length = tl.load(lens_ptr + b)
    first = 0
    if WINDOW:
        first = tl.maximum(first, length - window)
    if CHUNK:
        first = tl.maximum(first, (length - 1) // chunk * chunk)
    blocks = (tl.maximum(length, 1) - first + L - 1) // L
    share = tl.maximum((blocks + SPLITS - 1) // SPLITS, 2)  # one block is not worth a merge
    active = (blocks + share - 1) // share
    if split >= active:
        return

    g = head_block * GP + tl.arange(0, GP)
    g_ok = g < G
    n = h * G + g
    d0 = tl.arange(0, D0)
    e = tl.arange(0, EP)
    q_row = q_ptr + b.to(tl.int64) * q_stride_t + n * q_stride_n
    q0 = tl.load(q_row[:, None] + d0[None, :], mask=g_ok[:, None], other=0.0)
    if D1 > 0:
        d1 = D0 + tl.arange(0, D1)
        q1 = tl.load(q_row[:, None] + d1[None, :], mask=g_ok[:, None] & (d1 < D)[None, :], other=0.0)
    table_row = table_ptr + tl.load(rows_ptr + b).to(tl.int64) * table_stride

    m = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, EP], tl.float32)
    for block in tl.range(split * share, tl.minimum((split + 1) * share, blocks), num_stages=STAGES):
        position = first + block * L + tl.arange(0, L)
        ok = position < length
        slot = tl.load(table_row + position, mask=ok, other=0).to(tl.int64)
        k_row = k_ptr + slot * k_stride_s + h * k_stride_h
        k0 = tl.load(k_row[:, None] + d0[None, :], mask=ok[:, None], other=0.0)
        s = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
        if D1 > 0:
            k1 = tl.load(k_row[:, None] + d1[None, :], mask=ok[:, None] & (d1 < D)[None, :], other=0.0)
            s = tl.dot(q1, tl.trans(k1), s, input_precision=PRECISION)
        s = s * scale
        if SOFTCAP:
            s = softcap * (1.0 - 2.0 / (tl.exp2(s * (2.0 * 1.4426950408889634 / softcap)) + 1.0)) * 1.4426950408889634
        s = tl.where(ok[None, :], s, float("-inf"))
        # Every block but that of an empty sequence has a visible position, so m is finite from here on.
        m_new = tl.maximum(tl.maximum(m, tl.max(s, 1)), -1e30)
        shrink = tl.exp2(m - m_new)
        p = tl.exp2(s - m_new[:, None])
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(v_ptr + slot[:, None] * v_stride_s + h * v_stride_h + e[None, :],
                    mask=ok[:, None] & (e < E)[None, :], other=0.0)  # fmt: skip
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        m = m_new

    out_at = out_ptr + (b.to(tl.int64) * (H * G) + n[:, None]) * E + e[None, :]
    out_ok = g_ok[:, None] & (e < E)[None, :]
    if active > 1:
        at = (group * SPLITS + split).to(tl.int64) * GP + tl.arange(0, GP)
        tl.store(acc_ptr + at[:, None] * EP + e[None, :], acc, mask=out_ok)
        tl.store(ml_ptr + at * 2, m)
        tl.store(ml_ptr + at * 2 + 1, total)
        tl.debug_barrier()
        if tl.atomic_add(done_ptr + group, 1, sem="acq_rel") != active - 1:
            return
        tl.store(done_ptr + group, 0)
        # The last to finish takes the parts in split order, a few loads in flight at a time.
        PIECES: tl.constexpr = 4
        m = tl.full([GP], -1e30, tl.float32)
        total = tl.zeros([GP], tl.float32)
        acc = tl.zeros([GP, EP], tl.float32)
        for base in range(0, active, PIECES):
            for piece in tl.static_range(PIECES):
                ok = base + piece < active
                at = (group.to(tl.int64) * SPLITS + base + piece) * GP + tl.arange(0, GP)
                m_part = tl.load(ml_ptr + at * 2, mask=ok & g_ok, other=-1e30, cache_modifier=".cg")
                l_part = tl.load(ml_ptr + at * 2 + 1, mask=ok & g_ok, other=0.0, cache_modifier=".cg")
                part = tl.load(acc_ptr + at[:, None] * EP + e[None, :], mask=ok & out_ok, other=0.0,
                               cache_modifier=".cg")  # fmt: skip
                m_new = tl.maximum(m, m_part)
                shrink = tl.exp2(m - m_new)
                grow = tl.exp2(m_part - m_new)
                total = total * shrink + l_part * grow
                acc = acc * shrink[:, None] + part * grow[:, None]
                m = m_new
    if SINKS:
        total += tl.exp2(tl.load(sinks_ptr + n, mask=g_ok, other=0.0).to(tl.float32) * 1.4426950408889634 - m)
    acc = acc / tl.maximum(total, 1e-30)[:, None]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=out_ok)


def split_width(width: int) -> tuple[int, int]:
    """(power of two <= width, padded rest): 128 -> (128, 0), 192 -> (128, 64), 576 -> (512, 64), 80 -> (64, 16)."""
    whole = 1 << (width.bit_length() - 1)
    return max(whole, 16), 0 if width == whole else max(next_power_of_2(width - whole), 16)


def num_splits(sequences: int, groups: int, max_len: int, block: int, sms: int) -> int:
    """A power of two from the host's bounds: enough programs to fill the device several times over."""
    wanted = max(4 * sms // max(sequences * groups, 1), 1)
    useful = -(-max_len // block)
    return min(next_power_of_2(wanted), next_power_of_2(useful), MAX_SPLITS)


def paged_decode(
    q_TND: Tensor,
    k_SHD: Tensor,
    v_SHE: Tensor,
    rule: Rule,
    *,
    slot_table_RC: Tensor,
    rows_B: Tensor,
    lens_B: Tensor,
    max_len: int,
    block_l: int = 64,
    warps: int | None = None,
    stages: int = 3,
    splits: int | None = None,
    out_TNE: Tensor | None = None,
) -> Tensor:
    """Launch: arguments as in `paged_attention` with T == B; block_l .. splits steer the schedule. Returns [T, N, E].

    block_l: positions of a key block. The rule has no `block`: those have more than one query token.
    """
    sequences, heads, width = q_TND.shape
    kv_heads, value_width = k_SHD.shape[1], v_SHE.shape[2]
    if width < 16:
        raise ValueError(f"the attention kernel needs heads of at least 16 dims, got {width}")
    out = q_TND.new_empty(sequences, heads, value_width) if out_TNE is None else out_TNE
    if sequences == 0:
        return out
    per_group = heads // kv_heads
    rows = min(max(next_power_of_2(per_group), 16), 64 if value_width <= 256 else 32)
    groups = kv_heads * -(-per_group // rows)
    if splits is None:
        splits = num_splits(sequences, groups, max_len, block_l, num_sms(q_TND.device))
    padded = max(next_power_of_2(value_width), 16)
    parts = sequences * groups * splits * rows if splits > 1 else 0
    acc = torch.empty(parts * padded, dtype=torch.float32, device=q_TND.device)
    ml = torch.empty(parts * 2, dtype=torch.float32, device=q_TND.device)
    pdl = has_pdl(q_TND.device)
    done = counters(q_TND.device, max(next_power_of_2(sequences * groups), 4096))
    d0, d1 = split_width(width)
    _decode_kernel[(sequences * groups * splits,)](
        q_TND, k_SHD, v_SHE, out, acc, ml, done, slot_table_RC, rows_B, lens_B, rule.sinks_N,
        q_TND.stride(0), q_TND.stride(1), k_SHD.stride(0), k_SHD.stride(1), v_SHE.stride(0), v_SHE.stride(1),
        slot_table_RC.stride(0), rule.scale if rule.softcap else rule.scale * LOG2E,
        rule.softcap or 0.0, rule.window or 0, rule.chunk or 1,
        H=kv_heads, G=per_group, D=width, D0=d0, D1=d1, E=value_width, EP=padded, GP=rows, SPLITS=splits, L=block_l,
        WINDOW=rule.window is not None, CHUNK=rule.chunk is not None, SINKS=rule.sinks_N is not None,
        SOFTCAP=rule.softcap is not None,
        PRECISION="ieee" if q_TND.dtype == torch.float32 else "tf32", STAGES=stages, PDL=pdl,
        launch_pdl=pdl, num_warps=warps or (4 if value_width <= 256 else 8),
    )  # fmt: skip
    return out
