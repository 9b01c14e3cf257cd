"""Triton: products of grouped rows with their expert's weights, and the activation of the first one.

P pairs grouped by expert (route_sort.py), Q output columns, R reduction length, M pair rows of a tile, N output
columns of a tile, B columns of the reduction per step.

Two kernels over the same data, because two things bound them:
    tall weights  few rows per expert: the weights' tile is the tall operand of the tensor cores and streams through
                  shared memory, a program per (expert, column tile) reads its weights once whatever the rows
    tall rows     many rows per expert: a program per (block of rows, column tile)
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tracklayer.kernels.expert_tiles import activate_tile, activation_constants
from tracklayer.kernels.experts import ExpertSpec, activate
from tracklayer.kernels.jit import await_previous, has_pdl
from tracklayer.kernels.route_sort import SortedPairs


@triton.jit
def _weights_tile(
    w_ptr, w_desc, expert, row0, col0, Q: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr,
    B: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """[N, B] of the expert's weights [ROWS, R], from row0, col0; zero past R. Rows past the end are never stored."""
    if TMA:
        return w_desc.load([expert, row0, col0]).reshape(N, B)
    row = row0 + tl.arange(0, N)
    col = col0 + tl.arange(0, B)
    at = w_ptr + expert.to(tl.int64) * (ROWS * R) + row[:, None] * R + col[None, :]
    if R % B == 0 and Q % N == 0:
        return tl.load(at)
    return tl.load(at, mask=(row < ROWS)[:, None] & (col < R)[None, :], other=0.0)


@triton.jit
def _rows_tile(a_ptr, source_M, ok_M, a_stride, col0, R: tl.constexpr, B: tl.constexpr):
    """[M, B] of the gathered rows, zero past R and in rows that are not there."""
    col = col0 + tl.arange(0, B)
    at = a_ptr + source_M.to(tl.int64)[:, None] * a_stride + col[None, :]
    mask = ok_M[:, None] if R % B == 0 else ok_M[:, None] & (col < R)[None, :]
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def _finish(
    acc, acc_up, bias_ptr, weights_ptr, expert, pair, col, ok, Q: tl.constexpr, ROWS: tl.constexpr,
    ON_INPUT: tl.constexpr, FIRST: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
):  # fmt: skip
    """Input weight, bias and activation; pair and col broadcast against the accumulators."""
    if ON_INPUT:
        weight = tl.load(weights_ptr + pair, mask=ok, other=0.0)
        acc *= weight
        acc_up *= weight
    if bias_ptr is not None:
        bias_at = bias_ptr + expert * ROWS + col
        acc += tl.load(bias_at, mask=col < Q, other=0.0).to(tl.float32)
        if FIRST and GATED:
            acc_up += tl.load(bias_at + Q, mask=col < Q, other=0.0).to(tl.float32)
    return activate_tile(acc, acc_up, GATED, ACT, BEFORE, AFTER) if FIRST else acc


@triton.jit
def _tall_weights_kernel(
    a_ptr, w_ptr, w_desc, bias_ptr, weights_ptr, out_ptr, pairs_ptr, starts_ptr, a_stride, Q: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr, M: tl.constexpr, N: tl.constexpr, B: tl.constexpr, FIRST: tl.constexpr,
    DUAL: tl.constexpr, ON_INPUT: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    GATED: tl.constexpr, ACT: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (Q + N - 1) // N
    ROWS: tl.constexpr = Q * (2 if DUAL else 1)
    expert = tl.program_id(0) // TILES
    col0 = (tl.program_id(0) % TILES) * N
    await_previous(PDL)
    start = tl.load(starts_ptr + expert)
    end = tl.load(starts_ptr + expert + 1)
    for first in range(start, end, M):
        place_M = first + tl.arange(0, M)
        ok_M = place_M < end
        pair_M = tl.load(pairs_ptr + place_M, mask=ok_M, other=0)
        source_M = pair_M // K if FIRST else place_M
        acc_NM = tl.zeros([N, M], tl.float32)
        up_NM = tl.zeros([N, M], tl.float32)
        for r in tl.range(0, R, B, num_stages=STAGES):
            a_BM = _rows_tile(a_ptr, source_M, ok_M, a_stride, r, R, B).T
            w_NB = _weights_tile(w_ptr, w_desc, expert, col0, r, Q, R, ROWS, N, B, TMA)
            acc_NM = tl.dot(w_NB, a_BM, acc_NM, input_precision=PRECISION)
            if DUAL:
                u_NB = _weights_tile(w_ptr, w_desc, expert, col0 + Q, r, Q, R, ROWS, N, B, TMA)
                up_NM = tl.dot(u_NB, a_BM, up_NM, input_precision=PRECISION)
        col = (col0 + tl.arange(0, N))[:, None]
        out_NM = _finish(
            acc_NM, up_NM, bias_ptr, weights_ptr, expert, pair_M[None, :], col, ok_M[None, :], Q, ROWS, ON_INPUT,
            FIRST, GATED, ACT, BEFORE, AFTER,
        )  # fmt: skip
        target_M = place_M if FIRST else pair_M
        out_at = out_ptr + target_M.to(tl.int64)[:, None] * Q + col0 + tl.arange(0, N)[None, :]
        ok_MN = ok_M[:, None] & (col0 + tl.arange(0, N) < Q)[None, :]
        tl.store(out_at, out_NM.to(out_ptr.dtype.element_ty).T, mask=ok_MN)


@triton.jit
def _tall_rows_tile(
    a_ptr, w_ptr, w_desc, bias_ptr, weights_ptr, out_ptr, pairs_ptr, a_stride, expert, first, end, col0,
    Q: tl.constexpr, R: tl.constexpr, K: tl.constexpr, M: tl.constexpr, N: tl.constexpr, B: tl.constexpr,
    FIRST: tl.constexpr, DUAL: tl.constexpr, ON_INPUT: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    """Places first .. min(first + M, end) of one expert against N columns."""
    ROWS: tl.constexpr = Q * (2 if DUAL else 1)
    place_M = first + tl.arange(0, M)
    ok_M = place_M < end
    pair_M = tl.load(pairs_ptr + place_M, mask=ok_M, other=0)
    source_M = pair_M // K if FIRST else place_M
    acc_MN = tl.zeros([M, N], tl.float32)
    up_MN = tl.zeros([M, N], tl.float32)
    for r in tl.range(0, R, B, num_stages=STAGES):
        a_MB = _rows_tile(a_ptr, source_M, ok_M, a_stride, r, R, B)
        w_NB = _weights_tile(w_ptr, w_desc, expert, col0, r, Q, R, ROWS, N, B, TMA)
        acc_MN = tl.dot(a_MB, w_NB.T, acc_MN, input_precision=PRECISION)
        if DUAL:
            u_NB = _weights_tile(w_ptr, w_desc, expert, col0 + Q, r, Q, R, ROWS, N, B, TMA)
            up_MN = tl.dot(a_MB, u_NB.T, up_MN, input_precision=PRECISION)
    col = (col0 + tl.arange(0, N))[None, :]
    out_MN = _finish(
        acc_MN, up_MN, bias_ptr, weights_ptr, expert, pair_M[:, None], col, ok_M[:, None], Q, ROWS, ON_INPUT, FIRST,
        GATED, ACT, BEFORE, AFTER,
    )  # fmt: skip
    target_M = place_M if FIRST else pair_M
    out_at = out_ptr + target_M.to(tl.int64)[:, None] * Q + col
    tl.store(out_at, out_MN.to(out_ptr.dtype.element_ty), mask=ok_M[:, None] & (col < Q))


@triton.jit(do_not_specialize=["max_blocks"])
def _tall_rows_kernel(
    a_ptr, w_ptr, w_desc, bias_ptr, weights_ptr, out_ptr, pairs_ptr, starts_ptr, blocks_ptr, num_blocks_ptr,
    max_blocks, a_stride, Q: tl.constexpr, R: tl.constexpr, K: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    B: tl.constexpr, GROUP: tl.constexpr, HALVES: tl.constexpr, FIRST: tl.constexpr, DUAL: tl.constexpr,
    ON_INPUT: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, GATED: tl.constexpr,
    ACT: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (Q + N - 1) // N
    await_previous(PDL)
    num_blocks = tl.load(num_blocks_ptr)
    # GROUP blocks of rows share the weights' tile while it is in the L2 cache.
    pid = tl.program_id(0)
    group = pid // (GROUP * TILES)
    height = tl.minimum(num_blocks - group * GROUP, GROUP)
    if height <= 0:
        return
    inside = pid - group * GROUP * TILES
    block = group * GROUP + inside % height
    col0 = inside // height * N
    if col0 >= Q:
        return
    expert = tl.load(blocks_ptr + block)
    first = tl.load(blocks_ptr + max_blocks + block)
    end = tl.load(starts_ptr + expert + 1)
    # An expert's last block is half empty or more every second time.
    if HALVES and end - first <= M // 2:
        _tall_rows_tile(
            a_ptr, w_ptr, w_desc, bias_ptr, weights_ptr, out_ptr, pairs_ptr, a_stride, expert, first, end, col0, Q, R,
            K, M // 2, N, B, FIRST, DUAL, ON_INPUT, TMA, STAGES, PRECISION, GATED, ACT, BEFORE, AFTER,
        )  # fmt: skip
    else:
        _tall_rows_tile(
            a_ptr, w_ptr, w_desc, bias_ptr, weights_ptr, out_ptr, pairs_ptr, a_stride, expert, first, end, col0, Q, R,
            K, M, N, B, FIRST, DUAL, ON_INPUT, TMA, STAGES, PRECISION, GATED, ACT, BEFORE, AFTER,
        )  # fmt: skip


def grouped_gemm(
    a: Tensor,
    w_EQR: Tensor,
    pairs: SortedPairs,
    weights_TK: Tensor,
    spec: ExpertSpec,
    config: dict[str, Any],
    *,
    first: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """One of the two products of the experts, for all pairs.

    first: a is x_TD; out[i] = act(w[expert] @ x[token]) [P, F] at the pair's place in the grouped order.
    second: a is that [P, F]; out[pair] = w[expert] @ a[place] [P, D] at the pair's own number t * K + k.
    Rows of pairs without an expert are unwritten. config: tall ("weights" or "rows"), m, n, b, stages, warps, tma,
    group and halves (tall rows only: blocks side by side, half-height tiles for an expert's last rows).
    """
    top_k, num_pairs = weights_TK.shape[1], weights_TK.numel()
    experts, rows, reduction = w_EQR.shape
    dual = first and spec.gated
    columns = rows // 2 if dual else rows
    assert a.stride(1) == 1 and w_EQR.is_contiguous(), f"strides {a.stride()}, {w_EQR.stride()}"
    out = torch.empty(num_pairs, columns, dtype=a.dtype, device=a.device)
    n, b = config["n"], config["b"]
    # The copy engine wants 16-byte rows; other widths take ordinary loads.
    tma = bool(config["tma"]) and reduction * w_EQR.element_size() % 16 == 0
    pdl = has_pdl(a.device)
    common: dict[str, Any] = dict(
        a_ptr=a, w_ptr=w_EQR, w_desc=TensorDescriptor.from_tensor(w_EQR, [1, n, b]) if tma else None, bias_ptr=bias,
        weights_ptr=weights_TK, out_ptr=out, pairs_ptr=pairs.pairs_P, starts_ptr=pairs.starts_E1,
        a_stride=a.stride(0), Q=columns, R=reduction, K=top_k, M=config["m"], N=n, B=b, FIRST=first, DUAL=dual,
        ON_INPUT=first and spec.weight_on_input, TMA=tma, STAGES=config["stages"],
        PRECISION="ieee" if a.dtype == torch.float32 else "tf32", **activation_constants(spec), PDL=pdl,
        launch_pdl=pdl, num_warps=config["warps"],
    )  # fmt: skip
    tiles = triton.cdiv(columns, n)
    if config["tall"] == "weights":
        _tall_weights_kernel[(experts * tiles,)](**common)
    else:
        assert pairs.block_rows == config["m"], f"sorted for {pairs.block_rows} rows, tiles have {config['m']}"
        max_blocks, group = pairs.blocks_2B.shape[1], config["group"]
        _tall_rows_kernel[(triton.cdiv(max_blocks, group) * group * tiles,)](
            blocks_ptr=pairs.blocks_2B,
            num_blocks_ptr=pairs.num_blocks_1,
            max_blocks=max_blocks,
            GROUP=group,
            HALVES=config.get("halves", False),
            **common,
        )
    return out


def grouped_gemm_ref(
    a: Tensor,
    w_EQR: Tensor,
    pairs: SortedPairs,
    weights_TK: Tensor,
    spec: ExpertSpec,
    *,
    first: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """The torch reference of `grouped_gemm`, in float64; rows without an expert are NaN."""
    top_k, starts = weights_TK.shape[1], pairs.starts_E1.tolist()
    columns = w_EQR.shape[1] // (2 if first and spec.gated else 1)
    out = torch.full((weights_TK.numel(), columns), float("nan"), dtype=torch.float64, device=a.device)
    for expert in range(len(w_EQR)):
        places = slice(starts[expert], starts[expert + 1])
        mine = pairs.pairs_P[places].long()
        rows = a[mine // top_k].double() if first else a[places].double()
        if first and spec.weight_on_input:
            rows = rows * weights_TK.reshape(-1)[mine].double()[:, None]
        rows = rows @ w_EQR[expert].double().t()
        rows = rows if bias is None else rows + bias[expert].double()
        if first:
            out[places] = activate(rows, spec)
        else:
            out[mine] = rows
    return out
