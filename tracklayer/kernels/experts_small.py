"""Triton: experts for a few tokens without sorting: each (token, expert) pair is a matrix-vector product.

P pairs (T * K), D model width, F expert width, N weight rows of a tile, B columns of the reduction. Plain cores:
the tensor cores' smallest tile would be 1/16 full. Two launches; the second makes the weighted sum too.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracklayer.kernels.expert_tiles import activate_tile, activation_constants
from tracklayer.kernels.experts import ExpertSpec
from tracklayer.kernels.jit import await_previous, has_pdl
from tracklayer.kernels.topk import Routing


@triton.jit
def _gate_up_kernel(
    x_ptr, ids_ptr, weights_ptr, w_ptr, bias_ptr, h_ptr, x_stride, D: tl.constexpr, F: tl.constexpr, E: tl.constexpr,
    K: tl.constexpr, N: tl.constexpr, B: tl.constexpr, STAGES: tl.constexpr, ON_INPUT: tl.constexpr,
    GATED: tl.constexpr, ACT: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    row_N = tl.program_id(0) * N + tl.arange(0, N)
    await_previous(PDL)
    expert = tl.load(ids_ptr + pair)
    if (expert < 0) | (expert >= E):
        return
    x_at = x_ptr + (pair // K).to(tl.int64) * x_stride
    w_at = w_ptr + expert.to(tl.int64) * (D * F * (2 if GATED else 1)) + row_N[:, None] * D
    ok_N1 = (row_N < F)[:, None]
    gate_NB = tl.zeros([N, B], tl.float32)
    up_NB = tl.zeros([N, B], tl.float32)
    for d0 in tl.range(0, D, B, num_stages=STAGES):
        d = d0 + tl.arange(0, B)
        ok_NB = ok_N1 if D % B == 0 else ok_N1 & (d < D)[None, :]
        x_1B = tl.load(x_at + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        gate_NB += tl.load(w_at + d[None, :], mask=ok_NB, other=0.0).to(tl.float32) * x_1B
        if GATED:
            up_NB += tl.load(w_at + F * D + d[None, :], mask=ok_NB, other=0.0).to(tl.float32) * x_1B
    gate_N, up_N = tl.sum(gate_NB, 1), tl.sum(up_NB, 1)
    if ON_INPUT:
        weight = tl.load(weights_ptr + pair)
        gate_N *= weight
        up_N *= weight
    if bias_ptr is not None:
        bias_at = bias_ptr + expert * (F * (2 if GATED else 1)) + row_N
        gate_N += tl.load(bias_at, mask=row_N < F, other=0.0).to(tl.float32)
        if GATED:
            up_N += tl.load(bias_at + F, mask=row_N < F, other=0.0).to(tl.float32)
    h_N = activate_tile(gate_N, up_N, GATED, ACT, BEFORE, AFTER)
    tl.store(h_ptr + pair.to(tl.int64) * F + row_N, h_N.to(h_ptr.dtype.element_ty), mask=row_N < F)


@triton.jit
def _weighed_step(
    step, token, row_N, ok_N, h_ptr, ids_ptr, weights_ptr, w_ptr, D: tl.constexpr, F: tl.constexpr, E: tl.constexpr,
    K: tl.constexpr, B: tl.constexpr, STEPS: tl.constexpr, WEIGH: tl.constexpr,
):  # fmt: skip
    """weight * w2[expert] * h over the columns of one step: step // STEPS is the pair's k. float32 [N, B]."""
    pair = token * K + step // STEPS
    f = (step % STEPS) * B + tl.arange(0, B)
    expert = tl.load(ids_ptr + pair)
    known = (expert >= 0) & (expert < E)
    weight = tl.load(weights_ptr + pair) if WEIGH else 1.0
    w_at = w_ptr + tl.where(known, expert, 0).to(tl.int64) * (D * F) + row_N[:, None] * F + f[None, :]
    w_NB = tl.load(w_at, mask=ok_N[:, None] & (f < F)[None, :] & known, other=0.0).to(tl.float32)
    h_1B = tl.load(h_ptr + pair * F + f, mask=(f < F) & known, other=0.0).to(tl.float32)[None, :]
    return w_NB * (h_1B * weight)


@triton.jit
def _down_kernel(
    h_ptr, ids_ptr, weights_ptr, w_ptr, bias_ptr, x_ptr, add_ptr, y_ptr, x_stride, add_stride, scale,
    D: tl.constexpr, F: tl.constexpr, E: tl.constexpr, K: tl.constexpr, N: tl.constexpr, B: tl.constexpr,
    STAGES: tl.constexpr, WEIGH: tl.constexpr, ZERO: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1).to(tl.int64)
    row_N = tl.program_id(0) * N + tl.arange(0, N)
    ok_N = row_N < D
    STEPS: tl.constexpr = (F + B - 1) // B
    await_previous(PDL)
    acc_NB = tl.zeros([N, B], tl.float32)
    plain_N = tl.zeros([N], tl.float32)
    if STAGES == 0:  # all steps unrolled: every weight of the program is asked for at once
        for step in tl.static_range(K * STEPS):
            acc_NB += _weighed_step(
                step, token, row_N, ok_N, h_ptr, ids_ptr, weights_ptr, w_ptr, D, F, E, K, B, STEPS, WEIGH
            )
    else:
        for step in tl.range(0, K * STEPS, num_stages=STAGES):
            acc_NB += _weighed_step(
                step, token, row_N, ok_N, h_ptr, ids_ptr, weights_ptr, w_ptr, D, F, E, K, B, STEPS, WEIGH
            )
    for k in tl.static_range(K if ZERO or bias_ptr is not None else 0):
        expert = tl.load(ids_ptr + token * K + k)
        weight = tl.load(weights_ptr + token * K + k) if WEIGH else 1.0
        if bias_ptr is not None:
            known = (expert >= 0) & (expert < E)
            plain_N += weight * tl.load(bias_ptr + expert * D + row_N, mask=ok_N & known, other=0.0).to(tl.float32)
        if ZERO:
            own = tl.load(x_ptr + token * x_stride + row_N, mask=ok_N & (expert >= E), other=0.0)
            plain_N += weight * own.to(tl.float32)
    y_N = (tl.sum(acc_NB, 1) + plain_N) * scale
    if add_ptr is not None:
        y_N += tl.load(add_ptr + token * add_stride + row_N, mask=ok_N, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * D + row_N, y_N.to(y_ptr.dtype.element_ty), mask=ok_N)


def gate_up(
    x_TD: Tensor,
    routing: Routing,
    w13_EFD: Tensor,
    spec: ExpertSpec,
    config: dict[str, Any],
    bias13: Tensor | None = None,
) -> Tensor:
    """act(w13[expert] @ x[token]) of each pair, [P, F] in x's dtype; rows of ids without an expert are unwritten."""
    width, top_k = x_TD.shape[1], routing.ids_TK.shape[1]
    experts, inner = w13_EFD.shape[0], w13_EFD.shape[1] // (2 if spec.gated else 1)
    h_PF = torch.empty(routing.ids_TK.numel(), inner, dtype=x_TD.dtype, device=x_TD.device)
    pdl = has_pdl(x_TD.device)
    _gate_up_kernel[(triton.cdiv(inner, config["n"]), len(h_PF))](
        x_TD, routing.ids_TK, routing.weights_TK, w13_EFD, bias13, h_PF, x_TD.stride(0), D=width, F=inner, E=experts,
        K=top_k, N=config["n"], B=min(config["b"], triton.next_power_of_2(width)), STAGES=config["stages"],
        ON_INPUT=spec.weight_on_input, **activation_constants(spec), PDL=pdl, launch_pdl=pdl,
        num_warps=config["warps"],
    )  # fmt: skip
    return h_PF


def down_sum(
    h_PF: Tensor,
    x_TD: Tensor,
    routing: Routing,
    w2_EDF: Tensor,
    spec: ExpertSpec,
    config: dict[str, Any],
    bias2: Tensor | None = None,
    add_TD: Tensor | None = None,
) -> Tensor:
    """add + scale * sum_k weight_k * (w2[expert_k] @ h[pair]), [T, D] in x's dtype."""
    num_tokens, width = x_TD.shape
    experts, _, inner = w2_EDF.shape
    y_TD = torch.empty(num_tokens, width, dtype=x_TD.dtype, device=x_TD.device)
    pdl = has_pdl(x_TD.device)
    _down_kernel[(triton.cdiv(width, config["n"]), num_tokens)](
        h_PF, routing.ids_TK, routing.weights_TK, w2_EDF, bias2, x_TD, add_TD, y_TD, x_TD.stride(0),
        0 if add_TD is None else add_TD.stride(0), spec.scale, D=width, F=inner, E=experts,
        K=routing.ids_TK.shape[1], N=config["n"], B=min(config["b"], triton.next_power_of_2(inner)),
        STAGES=config["stages"], WEIGH=not spec.weight_on_input, ZERO=spec.num_zero_experts > 0, PDL=pdl,
        launch_pdl=pdl, num_warps=config["warps"],
    )  # fmt: skip
    return y_TD
