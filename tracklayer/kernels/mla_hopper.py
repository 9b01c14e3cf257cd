"""Gluon, for Hopper GPUs: attention of up to 64 heads of one token to latents 512 wide with 64 turned dims beside them.

As `_latent_attention_kernel` for sequences of one token, with the order of things by hand. Two groups of four warps
share a program's 64 rows: each makes the scores of half a block's keys, writes their weights to shared memory, and adds
up half of the values' columns. A block is copied while the one before is attended from its scores on.
"""

from __future__ import annotations

from torch import Tensor

from tracklayer.kernels.attention_hopper import is_hopper
from tracklayer.kernels.jit import LOG2E

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        warpgroup_mma,
        warpgroup_mma_init,
        warpgroup_mma_wait,
    )
except ImportError:  # no Triton, or one without Gluon: `serves_latents` says no
    gluon = None

LATENT, TURNED, ROWS, KEYS = 512, 64, 64, 64


def serves_latents(q_TND: Tensor, k_SHD: Tensor, value_dim: int) -> bool:
    """Whether `hopper_latent_attention` serves these: a Hopper GPU, 16 bits, 512 + 64 columns in aligned rows.

    And more than half of its 64 rows are used: with fewer heads `_latent_attention_kernel` is faster.
    """
    return (
        q_TND.is_cuda
        and is_hopper(q_TND.device)
        and q_TND.element_size() == 2
        and q_TND.shape[1] > ROWS // 2
        and k_SHD.dtype == q_TND.dtype
        and value_dim == LATENT
        and q_TND.shape[2] == LATENT + TURNED
        and k_SHD.stride(0) % 16 == 0
        and k_SHD.data_ptr() % 16 == 0
    )


if gluon is not None:

    @gluon.jit
    def _copy_block(latents, turned, k_ptr, slot, ok, k_stride, copied: gl.constexpr):
        """Ask for a block's latents and turned dims; rows that are not `ok` become zeros."""
        C: gl.constexpr = latents.shape[1]
        R: gl.constexpr = turned.shape[1]
        row = k_ptr + slot.to(gl.int64) * k_stride
        c = gl.arange(0, C, layout=gl.SliceLayout(0, copied))
        d = C + gl.arange(0, R, layout=gl.SliceLayout(0, copied))
        async_copy.async_copy_global_to_shared(latents, row[:, None] + c[None, :], mask=ok[:, None])
        async_copy.async_copy_global_to_shared(turned, row[:, None] + d[None, :], mask=ok[:, None])
        async_copy.commit_group()

    @gluon.jit(do_not_specialize=["splits"])
    def _hopper_latent_kernel(
        q_ptr, k_ptr, out_ptr, sums_ptr, table_ptr, rows_ptr, lens_ptr, splits, q_stride_t, q_stride_n, k_stride,
        out_stride_t, table_stride, scale, N: gl.constexpr, C: gl.constexpr, R: gl.constexpr, M: gl.constexpr,
        L: gl.constexpr, SPLIT: gl.constexpr,
    ):  # fmt: skip
        HEAD_BLOCKS: gl.constexpr = (N + M - 1) // M
        scored: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, L // 2, 16])
        summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, C // 2, 16])
        copied: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
        pid = gl.program_id(0)
        head_block = pid % HEAD_BLOCKS
        split = (pid // HEAD_BLOCKS) % splits
        b = pid // (HEAD_BLOCKS * splits)
        length = gl.load(lens_ptr + b)
        blocks = (gl.maximum(length, 1) + L - 1) // L
        share = gl.maximum((blocks + splits - 1) // splits, 2)
        first = split * share
        end = gl.minimum(first + share, blocks)
        if first >= end:
            return

        dtype: gl.constexpr = q_ptr.dtype.element_ty
        wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([L, C], dtype)
        narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([L, R], dtype)
        q0_s = gl.allocate_shared_memory(dtype, [M, C], wide)
        q1_s = gl.allocate_shared_memory(dtype, [M, R], narrow)
        k0_s = gl.allocate_shared_memory(dtype, [2, L, C], wide)
        k1_s = gl.allocate_shared_memory(dtype, [2, L, R], narrow)
        p_s = gl.allocate_shared_memory(dtype, [M, L], narrow)

        table_row = table_ptr + gl.load(rows_ptr + b).to(gl.int64) * table_stride
        key = gl.arange(0, L, layout=gl.SliceLayout(1, copied))
        slot = gl.load(table_row + first * L + key, mask=first * L + key < length, other=0)
        _copy_block(k0_s.index(0), k1_s.index(0), k_ptr, slot, first * L + key < length, k_stride, copied)
        ahead = (first + 1) * L + key
        slot = gl.load(table_row + ahead, mask=ahead < length, other=0)

        row = gl.arange(0, M, layout=gl.SliceLayout(1, copied))
        c = gl.arange(0, C, layout=gl.SliceLayout(0, copied))
        d = C + gl.arange(0, R, layout=gl.SliceLayout(0, copied))
        head = head_block * M + row
        q_row = q_ptr + b.to(gl.int64) * q_stride_t + head * q_stride_n
        q0_s.store(gl.load(q_row[:, None] + c[None, :], mask=(head < N)[:, None], other=0.0))
        q1_s.store(gl.load(q_row[:, None] + d[None, :], mask=(head < N)[:, None], other=0.0))

        m = gl.full([M], -1e30, gl.float32, gl.SliceLayout(1, scored))
        total = gl.zeros([M], gl.float32, gl.SliceLayout(1, scored))
        acc = warpgroup_mma_init(gl.zeros([M, C], gl.float32, summed))
        zero = gl.zeros([M, L], gl.float32, scored)
        for block in range(first, end):
            now = (block - first) % 2
            async_copy.wait_group(0)
            fence_async_shared()
            gl.thread_barrier()
            s = warpgroup_mma(q0_s, k0_s.index(now).permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma(q1_s, k1_s.index(now).permute((1, 0)), s, is_async=True)
            acc = warpgroup_mma_wait(2, deps=[acc])  # the values of the block before are used: its place is free
            gl.thread_barrier()
            ahead = (block + 1) * L + key
            ok = (ahead < length) & (block + 1 < end)
            _copy_block(k0_s.index(1 - now), k1_s.index(1 - now), k_ptr, slot, ok, k_stride, copied)
            ahead += L
            slot = gl.load(table_row + ahead, mask=ahead < length, other=0)

            s = warpgroup_mma_wait(0, deps=[s])
            position = block * L + gl.arange(0, L, layout=gl.SliceLayout(0, scored))
            s = gl.where((position < length)[None, :], s * scale, float("-inf"))
            m_new = gl.maximum(m, gl.max(s, 1))
            shrink = gl.exp2(m - m_new)
            p = gl.exp2(s - m_new[:, None])
            total = total * shrink + gl.sum(p, 1)
            m = m_new
            p_s.store(p.to(dtype))
            fence_async_shared()
            gl.thread_barrier()
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, summed))[:, None]
            acc = warpgroup_mma(p_s, k0_s.index(now), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        async_copy.wait_group(0)

        total = gl.maximum(total, 1e-30)
        sums = m + gl.log2(total)
        acc = acc / gl.convert_layout(total, gl.SliceLayout(1, summed))[:, None]
        head = head_block * M + gl.arange(0, M, layout=gl.SliceLayout(1, summed))
        c = gl.arange(0, C, layout=gl.SliceLayout(0, summed))
        if SPLIT:
            at = (b.to(gl.int64) * N + head) * splits + split
            out_row = out_ptr + at * C
            gl.store(sums_ptr + at, gl.convert_layout(sums, gl.SliceLayout(1, summed)), mask=head < N)
        else:
            out_row = out_ptr + b.to(gl.int64) * out_stride_t + head * C
        gl.store(out_row[:, None] + c[None, :], acc.to(out_ptr.dtype.element_ty), mask=(head < N)[:, None])


def hopper_latent_attention(
    q_TND: Tensor,
    k_SHD: Tensor,
    out: Tensor,
    sums: Tensor | None,
    *,
    slot_table_RC: Tensor,
    rows_B: Tensor,
    lens_B: Tensor,
    splits: int,
    out_stride: int,
    scale: float,
) -> None:
    """One token a sequence, see `serves_latents`. splits 1: out is [T, N, 512]; else [T, N, splits, 512], and sums.

    Blocks of KEYS positions are shared among splits as `_latent_attention_kernel` does.
    """
    tokens, heads, _ = q_TND.shape
    _hopper_latent_kernel[(tokens * splits * -(-heads // ROWS),)](
        q_TND, k_SHD, out, sums, slot_table_RC, rows_B, lens_B, splits, q_TND.stride(0), q_TND.stride(1),
        k_SHD.stride(0), out_stride, slot_table_RC.stride(0), scale * LOG2E, N=heads, C=LATENT, R=TURNED, M=ROWS,
        L=KEYS, SPLIT=splits > 1, num_warps=8,
    )  # fmt: skip
