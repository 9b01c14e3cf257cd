"""Gluon, for Hopper GPUs: causal attention of whole prompts over the step's own keys and values, heads 128 wide.

B sequences, N query heads, H key heads (N = G * H), D = 128. A tile is 2 * R rows of one key head, R = 64: the G heads
of 2 * R / G tokens. One warp copies queries, keys and values to shared memory; two groups of four warps attend R rows
each, from the diagonal down. While a group's scores of a block come out of the tensor cores, they go on to weigh the
values of the block before, and the softmax of one group hides behind the products of the other.
Persistent: a program takes every P-th tile, and its copies run ahead into the next one.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tracklayer.kernels.attention_rule import Rule
from tracklayer.kernels.jit import LOG2E, num_sms

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
except ImportError:  # no Triton, or one without Gluon: `serves` says no
    gluon = None

WIDTH, ROWS, KEYS, STAGES = 128, 64, 128, 2


@functools.cache
def is_hopper(device: torch.device) -> bool:
    return gluon is not None and torch.cuda.get_device_capability(device) == (9, 0)


def serves(q_TND: Tensor, k_THD: Tensor, v_THE: Tensor, rule: Rule) -> bool:
    """Whether `hopper_attention` can take these: a Hopper GPU, 16 bits, heads 128 wide, a causal softmax rule."""
    return (
        q_TND.is_cuda
        and is_hopper(q_TND.device)
        and q_TND.element_size() == 2
        and q_TND.shape[2] == v_THE.shape[2] == WIDTH
        and q_TND.shape[1] // k_THD.shape[1] in (1, 2, 4, 8)
        and rule.causal
        and rule.softmax
        and all(t.stride(2) == 1 and t.stride(1) == WIDTH for t in (q_TND, k_THD, v_THE))
        and all(t.data_ptr() % 16 == 0 and t.stride(0) % 8 == 0 for t in (q_TND, k_THD, v_THE))
    )


if gluon is not None:

    @gluon.jit
    def _tile(tile, batch, H: gl.constexpr, TOKENS: gl.constexpr):
        """Key head, first token, its position and the sequence's length of a tile; length 0: nothing to do.

        Sequence b's blocks are numbered from starts[b] // TOKENS + b on. Late blocks see the most keys and come first.
        """
        starts_ptr, lens_ptr, sequences, steps, tiles = batch
        block = tiles // H - 1 - tile // H
        lo = 0
        hi = sequences
        for _ in range(steps):
            middle = gl.minimum((lo + hi) // 2, sequences - 1)
            if gl.load(starts_ptr + middle) // TOKENS + middle <= block:
                lo = gl.where(hi - lo > 1, middle, lo)
            else:
                hi = gl.where(hi - lo > 1, middle, hi)
        start = gl.load(starts_ptr + lo)
        length = gl.maximum(gl.load(lens_ptr + lo), 0)
        low = (block - (start // TOKENS + lo)) * TOKENS
        length = gl.where((low < 0) | (low >= length), 0, length)
        return tile % H, start, low, length

    @gluon.jit
    def _copy(tiles_s, q_bars, kv_bars, q_desc, k_desc, v_desc, batch, H: gl.constexpr, G: gl.constexpr,
              TOKENS: gl.constexpr):  # fmt: skip
        """The copying warp."""
        q_s, k_s, v_s = tiles_s
        q_full, q_empty, _ = q_bars
        k_full, k_empty, v_full, v_empty = kv_bars
        R: gl.constexpr = q_s.shape[1]
        L: gl.constexpr = k_s.shape[1]
        D: gl.constexpr = k_s.shape[2]
        N: gl.constexpr = k_s.shape[0]
        it = 0
        visits = 0
        for tile in range(gl.program_id(0), batch[4], gl.num_programs(0)):
            h, start, low, length = _tile(tile, batch, H, TOKENS)
            if length > 0:
                mbarrier.wait(q_empty, (visits & 1) ^ 1)
                mbarrier.expect(q_full, 2 * R * D * 2)
                for half in gl.static_range(2):
                    for g in gl.static_range(G):
                        tma.async_copy_global_to_shared(
                            q_desc, [start + low + half * (R // G), (h * G + g) * D], q_full,
                            q_s.index(half).slice(g * (R // G), R // G),
                        )  # fmt: skip
                last = (gl.minimum(low + TOKENS, length) - 1) // L
                for j in range(0, last + 1):
                    stage = it % N
                    phase = (it // N) & 1
                    row = start + (last - j) * L
                    mbarrier.wait(k_empty.index(stage), phase ^ 1)
                    mbarrier.expect(k_full.index(stage), L * D * 2)
                    tma.async_copy_global_to_shared(k_desc, [row, h * D], k_full.index(stage), k_s.index(stage))
                    mbarrier.wait(v_empty.index(stage), phase ^ 1)
                    mbarrier.expect(v_full.index(stage), L * D * 2)
                    tma.async_copy_global_to_shared(v_desc, [row, h * D], v_full.index(stage), v_s.index(stage))
                    it += 1
                visits += 1

    @gluon.jit
    def _softmax(s, m, total, scale, block, position_M, MASKED: gl.constexpr, layout: gl.constexpr):
        """Weights of a block's scores, and by how much earlier sums shrink."""
        L: gl.constexpr = s.shape[1]
        if MASKED:
            key = block * L + gl.arange(0, L, layout=gl.SliceLayout(0, layout))
            s = gl.where(key[None, :] <= position_M[:, None], s, float("-inf"))
        m_new = gl.maximum(m, gl.max(s, 1) * scale)
        shrink = gl.exp2(m - m_new)
        p = gl.exp2(s * scale - m_new[:, None])
        return p, m_new, total * shrink + gl.sum(p, 1), shrink

    @gluon.jit
    def _next(it, block, q, tiles_s, kv_bars, p, acc, m, total, scale, position_M, MASKED: gl.constexpr,
              layout: gl.constexpr, operand: gl.constexpr):  # fmt: skip
        """Scores and weights of block number `it`, while the weights of the one before meet their values."""
        _, k_s, v_s = tiles_s
        k_full, k_empty, v_full, v_empty = kv_bars
        N: gl.constexpr = k_s.shape[0]
        R: gl.constexpr = q.shape[0]
        L: gl.constexpr = k_s.shape[1]
        stage = it % N
        before = (it - 1) % N
        mbarrier.wait(k_full.index(stage), (it // N) & 1)
        zero = gl.zeros([R, L], gl.float32, layout)
        s = warpgroup_mma(q, k_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), ((it - 1) // N) & 1)
        acc = warpgroup_mma(p, v_s.index(before), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_empty.index(stage), count=1)
        weights, m, total, shrink = _softmax(s, m, total, scale, block, position_M, MASKED, layout)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        mbarrier.arrive(v_empty.index(before), count=1)
        acc = acc * shrink[:, None]
        return gl.convert_layout(weights.to(v_s.dtype), operand), acc, m, total

    @gluon.jit
    def _clear(v, block, length, WARPS: gl.constexpr):
        """Zero the rows of a block of values past the sequence's end: they are another's, and 0 * NaN is NaN."""
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
        PART: gl.constexpr = 32
        L: gl.constexpr = v.shape[0]
        for at in gl.static_range(0, L, PART):
            part = v.slice(at, PART)
            row = block * L + at + gl.arange(0, PART, layout=gl.SliceLayout(1, layout))
            part.store(gl.where((row < length)[:, None], part.load(layout), 0.0))
        fence_async_shared()
        gl.thread_barrier()

    @gluon.jit
    def _attend(HALF: gl.constexpr, tiles_s, q_bars, kv_bars, out_ptr, batch, scale, H: gl.constexpr, G: gl.constexpr,
                TOKENS: gl.constexpr):  # fmt: skip
        """One of the two attending groups."""
        q_s, k_s, v_s = tiles_s
        q_full, q_empty, cleared = q_bars
        k_full, k_empty, v_full, v_empty = kv_bars
        R: gl.constexpr = q_s.shape[1]
        L: gl.constexpr = k_s.shape[1]
        D: gl.constexpr = k_s.shape[2]
        N: gl.constexpr = k_s.shape[0]
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, L, 16])
        operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
        stored: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
        PER: gl.constexpr = R // G
        it = 0
        visits = 0
        for tile in range(gl.program_id(0), batch[4], gl.num_programs(0)):
            h, start, low, length = _tile(tile, batch, H, TOKENS)
            if length > 0:
                row = gl.arange(0, R, layout=gl.SliceLayout(1, layout))
                position_M = gl.minimum(low + HALF * PER + row % PER, length - 1)
                last = (gl.minimum(low + TOKENS, length) - 1) // L
                whole = gl.minimum((low + 1) // L, last)  # blocks before it are seen by every row
                q = q_s.index(HALF)
                m = gl.full([R], -1e30, gl.float32, gl.SliceLayout(1, layout))
                total = gl.zeros([R], gl.float32, gl.SliceLayout(1, layout))
                acc = gl.zeros([R, D], gl.float32, layout)
                mbarrier.wait(q_full, visits & 1)
                mbarrier.wait(k_full.index(it % N), (it // N) & 1)
                zero = gl.zeros([R, L], gl.float32, layout)
                s = warpgroup_mma(q, k_s.index(it % N).permute((1, 0)), zero, use_acc=False, is_async=True)
                s = warpgroup_mma_wait(0, deps=[s])
                mbarrier.arrive(k_empty.index(it % N), count=1)
                weights, m, total, _ = _softmax(s, m, total, scale, last, position_M, True, layout)
                p = gl.convert_layout(weights.to(v_s.dtype), operand)
                if HALF == 0:  # one group clears for both
                    if (last + 1) * L > length:
                        mbarrier.wait(v_full.index(it % N), (it // N) & 1)
                        _clear(v_s.index(it % N), last, length, 4)
                    mbarrier.arrive(cleared, count=1)
                else:
                    mbarrier.wait(cleared, visits & 1)
                for block in range(last - 1, whole - 1, -1):
                    it += 1
                    p, acc, m, total = _next(
                        it, block, q, tiles_s, kv_bars, p, acc, m, total, scale, position_M, True, layout, operand
                    )
                for block in range(whole - 1, -1, -1):
                    it += 1
                    p, acc, m, total = _next(
                        it, block, q, tiles_s, kv_bars, p, acc, m, total, scale, position_M, False, layout, operand
                    )
                mbarrier.arrive(q_empty, count=1)
                mbarrier.wait(v_full.index(it % N), (it // N) & 1)
                acc = warpgroup_mma(p, v_s.index(it % N), acc, is_async=True)
                acc, p = warpgroup_mma_wait(0, deps=[acc, p])
                mbarrier.arrive(v_empty.index(it % N), count=1)
                it += 1
                visits += 1
                acc = acc / total[:, None]
                out = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), stored)
                r = gl.arange(0, R, layout=gl.SliceLayout(1, stored))
                d = gl.arange(0, D, layout=gl.SliceLayout(0, stored))
                token = low + HALF * PER + r % PER
                at = ((start + token).to(gl.int64) * (H * G) + h * G + r // PER) * D
                gl.store(out_ptr + at[:, None] + d[None, :], out, mask=(token < length)[:, None])

    # The counts differ from step to step: no kernel of their own for 1 or for multiples of 16.
    @gluon.jit(do_not_specialize=["sequences", "steps", "tiles"])
    def _kernel(q_desc, k_desc, v_desc, out_ptr, starts_ptr, lens_ptr, sequences, steps, tiles, scale,
                H: gl.constexpr, G: gl.constexpr, R: gl.constexpr, L: gl.constexpr, N: gl.constexpr):  # fmt: skip
        D: gl.constexpr = k_desc.block_shape[1]
        TOKENS: gl.constexpr = 2 * R // G
        q_s = gl.allocate_shared_memory(q_desc.dtype, [2, R, D], q_desc.layout)
        k_s = gl.allocate_shared_memory(k_desc.dtype, [N, L, D], k_desc.layout)
        v_s = gl.allocate_shared_memory(v_desc.dtype, [N, L, D], v_desc.layout)
        q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        k_full = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
        k_empty = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
        v_full = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
        v_empty = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
        cleared = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(cleared, count=1)
        mbarrier.init(q_full, count=1)
        mbarrier.init(q_empty, count=2)
        for i in gl.static_range(N):
            mbarrier.init(k_full.index(i), count=1)
            mbarrier.init(k_empty.index(i), count=2)
            mbarrier.init(v_full.index(i), count=1)
            mbarrier.init(v_empty.index(i), count=2)
        fence_async_shared()
        tiles_s = (q_s, k_s, v_s)
        q_bars = (q_full, q_empty, cleared)
        kv_bars = (k_full, k_empty, v_full, v_empty)
        batch = (starts_ptr, lens_ptr, sequences, steps, tiles)
        gl.warp_specialize(
            [
                (_attend, (0, tiles_s, q_bars, kv_bars, out_ptr, batch, scale, H, G, TOKENS)),
                (_attend, (1, tiles_s, q_bars, kv_bars, out_ptr, batch, scale, H, G, TOKENS)),
                (_copy, (tiles_s, q_bars, kv_bars, q_desc, k_desc, v_desc, batch, H, G, TOKENS)),
            ],
            [4, 1],
            [240, 24],
        )


def hopper_attention(
    q_TND: Tensor, k_THD: Tensor, v_THE: Tensor, rule: Rule, *, starts_B1: Tensor, lens_B: Tensor, out_TNE: Tensor
) -> Tensor:
    """Causal attention of every sequence with lens_B > 0 over its own tokens; see `serves` for what it takes.

    starts_B1, lens_B int32: sequence b is tokens starts_B1[b] .. + lens_B[b]; others' rows of out_TNE are left alone.
    """
    tokens, heads, width = q_TND.shape
    kv_heads = k_THD.shape[1]
    per_group = heads // kv_heads
    sequences = len(lens_B)
    dtype = getattr(gl, str(q_TND.dtype).removeprefix("torch."))

    def desc(x: Tensor, rows: int) -> Any:
        layout = gl.NVMMASharedLayout.get_default_for([rows, width], dtype)
        return TensorDescriptor(x, [tokens, x.shape[1] * width], [x.stride(0), 1], [rows, width], layout)

    tiles = (-(-tokens * per_group // (2 * ROWS)) + sequences) * kv_heads
    _kernel[(min(tiles, num_sms(q_TND.device)),)](
        desc(q_TND, ROWS // per_group), desc(k_THD, KEYS), desc(v_THE, KEYS), out_TNE, starts_B1, lens_B, sequences,
        sequences.bit_length(), tiles, rule.scale * LOG2E, H=kv_heads, G=per_group, R=ROWS, L=KEYS, N=STAGES,
        num_warps=4, maxnreg=168,
    )  # fmt: skip
    return out_TNE
