"""Triton: gate product, choice and store for a few tokens in one launch.

T tokens, E logits, D model width, BT rows of the token tile. A program per expert forms that expert's logit for all
tokens, so that the gate's bytes are read by E programs at once; the last program to arrive (an atomic counter, set
back to zero by it) makes the choice for all tokens. Each logit is one program's sum in a fixed order: deterministic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracklayer.kernels.jit import await_previous, counters, has_pdl
from tracklayer.kernels.norm import AddNorm, as_tensor, summed_token
from tracklayer.kernels.select import TL_DTYPE, choose_tile, rounded, rule_constants, store_arguments, write_tile
from tracklayer.kernels.topk import RouterSpec, RouteStore, Routing

MAX_TOKENS = 16


@triton.jit(do_not_specialize=["column", "T"])
def _route_few_kernel(
    x_ptr, gate_ptr, gate_bias_ptr, logits_ptr, count_ptr, bias_ptr, scale_ptr, ids_ptr, weights_ptr, pool_ptr,
    slots_ptr, num_tokens_ptr, delta_ptr, residual_ptr, norm_ptr, new_residual_ptr, eps, offset, norm_scale, column,
    pool_stride_s, pool_stride_l, T, x_stride, gate_stride, D: tl.constexpr, NORM: tl.constexpr, BT: tl.constexpr,
    BD: tl.constexpr, ROWS: tl.constexpr, LOGITS_DTYPE: tl.constexpr, PDL: tl.constexpr, E: tl.constexpr,
    K: tl.constexpr, N: tl.constexpr, KP: tl.constexpr, LARGEST: tl.constexpr, SCORE: tl.constexpr,
    AFTER: tl.constexpr, ON_LOGITS: tl.constexpr, G: tl.constexpr, KEEP: tl.constexpr, TOP2: tl.constexpr,
    MASK_CHOICE: tl.constexpr, MASK_SCORE: tl.constexpr, SOFTCAP: tl.constexpr, JITTER: tl.constexpr,
    SCORE_DTYPE: tl.constexpr, RENORM: tl.constexpr, EPS: tl.constexpr, LEAST: tl.constexpr, POWER: tl.constexpr,
    SCALE: tl.constexpr, OUT_DTYPE: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    row_T = tl.arange(0, BT)
    d = tl.arange(0, BD)
    gate_row = gate_ptr + expert.to(tl.int64) * gate_stride
    gate = tl.load(gate_row + d, mask=d < D, other=0.0).to(tl.float32)  # a weight: asked for before the wait
    await_previous(PDL)
    if NORM:
        x_D = summed_token(
            delta_ptr, residual_ptr, norm_ptr, eps, offset, norm_scale, x_ptr, new_residual_ptr, expert == 0, D, BD
        )
        acc = x_D[None, :] * gate[None, :]
    else:
        acc = tl.zeros([BT, BD], tl.float32)
        for d0 in tl.static_range(0, D, BD):
            at = d0 + d
            if d0 > 0:
                gate = tl.load(gate_row + at, mask=at < D, other=0.0).to(tl.float32)
            x_at = x_ptr + row_T[:, None] * x_stride + at[None, :]
            x = tl.load(x_at, mask=(row_T < T)[:, None] & (at < D)[None, :], other=0.0).to(tl.float32)
            acc += x * gate[None, :]
    z_T = tl.sum(acc, 1)
    # F.linear adds its bias in float32, before the one rounding.
    if gate_bias_ptr is not None:
        z_T += rounded(tl.load(gate_bias_ptr + expert), LOGITS_DTYPE)
    tl.store(logits_ptr + row_T * E + expert, rounded(z_T, LOGITS_DTYPE), mask=row_T < T)

    tl.debug_barrier()
    arrived = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu")
    if arrived == E - 1:
        tl.atomic_xchg(count_ptr, 0, sem="relaxed", scope="gpu")
        col_N = tl.arange(0, N)
        for start in range(0, T, ROWS):
            row_B = start + tl.arange(0, ROWS)
            ok_BN = (row_B < T)[:, None] & (col_N < E)[None, :]
            # .cg: the other programs' logits are in the L2 cache
            z_BN = tl.load(
                logits_ptr + row_B[:, None] * E + col_N[None, :], mask=ok_BN, other=0.0, cache_modifier=".cg"
            )
            ids_BK, weights_BK = choose_tile(
                z_BN, bias_ptr, scale_ptr, E, K, N, KP, LARGEST, SCORE, AFTER, ON_LOGITS, G, KEEP, TOP2, MASK_CHOICE,
                MASK_SCORE, SOFTCAP, JITTER, SCORE_DTYPE, RENORM, EPS, LEAST, POWER, SCALE, OUT_DTYPE,
            )  # fmt: skip
            write_tile(
                ids_BK, weights_BK, row_B, T, ids_ptr, weights_ptr, pool_ptr, slots_ptr, num_tokens_ptr, column,
                pool_stride_s, pool_stride_l, K, KP,
            )  # fmt: skip


def route_few(
    x: Tensor | AddNorm,
    gate_ED: Tensor,
    spec: RouterSpec,
    *,
    gate_bias_E: Tensor | None = None,
    bias_E: Tensor | None = None,
    expert_scale_E: Tensor | None = None,
    store: RouteStore | None = None,
    num_tokens_1: Tensor | None = None,
) -> Routing:
    """`route.route` for 1 to MAX_TOKENS tokens, as one launch; an AddNorm of one token is made by it."""
    fused = isinstance(x, AddNorm) and x.fusable and x.residual_TD.shape[1] <= 4096
    before: tuple = (None, None, None, None, 0.0, 0.0, 1.0)
    if fused:
        delta_TD, residual_TD = x.delta_TD, x.residual_TD
        x_TD, new_residual_TD = x.outputs()
        before = (delta_TD, residual_TD, x.weight_D, new_residual_TD, x.eps, x.offset, x.scale)
    else:
        x_TD = as_tensor(x)
    num_tokens, width = x_TD.shape
    assert 0 < num_tokens <= MAX_TOKENS, f"route_few takes 1 to {MAX_TOKENS} tokens, got {num_tokens}"
    assert x_TD.stride(1) == 1 and gate_ED.stride(1) == 1, f"strides {x_TD.stride()}, {gate_ED.stride()}"
    logits_dtype = x_TD.dtype if spec.gate_dtype == "model" else torch.float32
    constants = rule_constants(spec, logits_dtype)
    device = x_TD.device
    pdl = has_pdl(device)
    ids_TK = torch.empty(num_tokens, spec.top_k, dtype=torch.int32, device=device)
    weights_TK = torch.empty(num_tokens, spec.top_k, dtype=torch.float32, device=device)
    logits_TE = torch.empty(num_tokens, spec.num_logits, dtype=torch.float32, device=device)
    tile = triton.next_power_of_2(num_tokens)
    names = ("delta_ptr", "residual_ptr", "norm_ptr", "new_residual_ptr", "eps", "offset", "norm_scale")
    _route_few_kernel[(spec.num_logits,)](
        x_TD, gate_ED, gate_bias_E, logits_TE, counters(device, 1), bias_E, expert_scale_E, ids_TK, weights_TK,
        **store_arguments(store, num_tokens_1), **dict(zip(names, before, strict=True)), NORM=fused, T=num_tokens,
        D=width, x_stride=x_TD.stride(0),
        gate_stride=gate_ED.stride(0), BT=tile, BD=min(max(256, 4096 // tile), triton.next_power_of_2(width)),
        ROWS=min(tile, max(1, 2048 // constants["N"])), LOGITS_DTYPE=TL_DTYPE[logits_dtype], PDL=pdl, launch_pdl=pdl,
        num_warps=4, **constants,
    )  # fmt: skip
    return Routing(ids_TK, weights_TK)
