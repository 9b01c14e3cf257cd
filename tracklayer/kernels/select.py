"""Triton: choice of experts from router logits, and the store of their ids into the route pool. One launch.

T tokens, E logits, K chosen, N = next power of two of E, B token rows of a tile. The rule is data: every field of
RouterSpec is a compile-time constant, so a family pays for what it uses. `choose_tile` is shared with route_few.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracklayer.kernels.topk import RouterSpec, RouteStore, Routing, chooses_on_logits, masked_choice

SMALLEST = tl.constexpr(-(1 << 63))


@triton.jit
def order_keys(choice_BN, col_N, allowed_BN):
    """int64 [B, N] that orders like (choice score descending, id ascending); not allowed: below everything."""
    choice_BN = tl.where(choice_BN == 0.0, 0.0, choice_BN)  # -0.0 and 0.0 tie
    bits = choice_BN.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(allowed_BN, (ordered.to(tl.int64) << 32) | (0xFFFF - col_N)[None, :].to(tl.int64), SMALLEST)


@triton.jit
def best_id(key_BN):
    """int32 [B]: the id of the largest key."""
    return (0xFFFF - (tl.max(key_BN, 1) & 0xFFFFFFFF)).to(tl.int32)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """float32 x, rounded to the nearest value of DTYPE."""
    return x.to(tl.float32).to(DTYPE).to(tl.float32)


@triton.jit
def score_tile(z_BN, valid_BN, SCORE: tl.constexpr, FLOAT64: tl.constexpr):
    """Scores of the valid columns, float32; formed in float64 when they decide the choice."""
    z = z_BN.to(tl.float64) if FLOAT64 else z_BN
    if SCORE == "softmax":
        z = tl.where(valid_BN, z, float("-inf"))
        best = tl.max(z, 1)[:, None]
        dead = best == float("-inf")
        e = tl.exp(tl.where(dead, 0.0, z - tl.where(dead, 0.0, best)))
        e = tl.where(valid_BN, e, 0.0)
        z = e / tl.sum(e, 1)[:, None]
    elif SCORE == "sigmoid":
        z = 1.0 / (1.0 + tl.exp(-z))
    elif SCORE == "sqrt_softplus":
        z = z_BN.to(tl.float64)
        e = tl.exp(tl.minimum(z, 30.0))
        log1p = tl.where(e < 1e-4, e - e * e * 0.5 + e * e * e / 3.0, tl.log(1.0 + e))
        z = tl.sqrt(tl.where(z > 20.0, z, log1p))
    return z.to(tl.float32)


@triton.jit
def kept_groups(choice_BN, col_N, valid_BN, E: tl.constexpr, G: tl.constexpr, KEEP: tl.constexpr, TOP2: tl.constexpr):
    """bool [B, N]: columns whose group is among the best KEEP of G, by its maximum or the sum of its top 2."""
    SIZE: tl.constexpr = E // G
    GP: tl.constexpr = triton.next_power_of_2(G)
    groups = tl.arange(0, GP)
    score_BG = tl.full([choice_BN.shape[0], GP], float("-inf"), tl.float32)
    for g in tl.static_range(G):
        inside = valid_BN & (col_N // SIZE == g)[None, :]
        mine = tl.where(inside, choice_BN, float("-inf"))
        score = tl.max(mine, 1)
        if TOP2:
            first = tl.min(tl.where(inside & (mine == score[:, None]), col_N[None, :], E), 1)
            score += tl.max(tl.where(col_N[None, :] == first[:, None], float("-inf"), mine), 1)
        score_BG = tl.where((groups == g)[None, :], score[:, None], score_BG)
    key_BG = order_keys(score_BG, groups, (groups < G)[None, :])
    keep_BN = choice_BN != choice_BN
    for _ in tl.static_range(KEEP):
        chosen = best_id(key_BG)
        keep_BN = keep_BN | ((col_N // SIZE)[None, :] == chosen[:, None])
        key_BG = tl.where(groups[None, :] == chosen[:, None], SMALLEST, key_BG)
    return keep_BN & valid_BN


@triton.jit
def sparsemixer_tile(z_BN, col_N, valid_BN, E: tl.constexpr, KP: tl.constexpr, JITTER: tl.constexpr):
    """PhiMoE's two choices: ids int32 and weights float32 [B, KP]."""
    ks = tl.arange(0, KP)
    ids_BK = tl.zeros([z_BN.shape[0], KP], tl.int32)
    weights_BK = tl.zeros([z_BN.shape[0], KP], tl.float32)
    left_BN = tl.where(valid_BN, z_BN, float("-inf"))
    key_BN = order_keys(z_BN, col_N, valid_BN)
    for k in tl.static_range(2):
        chosen = best_id(key_BN)
        here = col_N[None, :] == chosen[:, None]
        best_B = tl.max(tl.where(here, z_BN, float("-inf")), 1)
        best = best_B[:, None]
        far = tl.div_rn(best - z_BN, tl.maximum(tl.abs(z_BN), best)) > 2 * JITTER
        near = tl.where(far, float("-inf"), left_BN)
        dead = best == float("-inf")
        e = tl.exp(tl.where(dead, near, near - tl.where(dead, 0.0, best)))
        weight = tl.where(best_B == float("-inf"), 1.0 / E, 1.0 / tl.sum(e, 1))
        ids_BK = tl.where((ks == k)[None, :], chosen[:, None], ids_BK)
        weights_BK = tl.where((ks == k)[None, :], weight[:, None], weights_BK)
        left_BN = tl.where(here, float("-inf"), left_BN)
        key_BN = tl.where(here, SMALLEST, key_BN)
    return ids_BK, weights_BK


@triton.jit
def finish_tile(
    weights_BK, ids_BK, chosen_BK, scale_ptr, K: tl.constexpr, RENORM: tl.constexpr, EPS: tl.constexpr,
    LEAST: tl.constexpr, POWER: tl.constexpr, SCALE: tl.constexpr, OUT_DTYPE: tl.constexpr,
):  # fmt: skip
    """Renormalise, scale and round the chosen scores."""
    weights_BK = tl.where(chosen_BK, weights_BK, 0.0)
    if RENORM:
        if POWER == 1.0:
            total = tl.sum(weights_BK, 1)
        elif POWER == 2.0:
            total = tl.sqrt(tl.sum(weights_BK * weights_BK, 1))
        else:
            powered = tl.exp2(tl.log2(tl.maximum(tl.abs(weights_BK), 1e-38)) * POWER)
            total = tl.exp2(tl.log2(tl.sum(tl.where(chosen_BK, powered, 0.0), 1)) / POWER)
        total = tl.maximum(total + EPS, LEAST)[:, None]
        weights_BK = tl.where(total > 0, weights_BK / tl.maximum(total, 1e-38), 1.0 / K)
    if scale_ptr is not None:
        weights_BK *= tl.load(scale_ptr + ids_BK, mask=chosen_BK, other=0.0).to(tl.float32)
    return rounded(weights_BK * SCALE, OUT_DTYPE)


@triton.jit
def choose_tile(
    z_BN, bias_ptr, scale_ptr, E: tl.constexpr, K: tl.constexpr, N: tl.constexpr, KP: tl.constexpr,
    LARGEST: tl.constexpr, SCORE: tl.constexpr, AFTER: tl.constexpr, ON_LOGITS: tl.constexpr, G: tl.constexpr,
    KEEP: tl.constexpr, TOP2: tl.constexpr, MASK_CHOICE: tl.constexpr, MASK_SCORE: tl.constexpr,
    SOFTCAP: tl.constexpr, JITTER: tl.constexpr, SCORE_DTYPE: tl.constexpr, RENORM: tl.constexpr, EPS: tl.constexpr,
    LEAST: tl.constexpr, POWER: tl.constexpr, SCALE: tl.constexpr, OUT_DTYPE: tl.constexpr,
):  # fmt: skip
    """float32 logits [B, N] -> ids int32 and weights float32 [B, KP]; only the first K columns mean anything."""
    col_N = tl.arange(0, N)
    ks = tl.arange(0, KP)
    valid_BN = tl.broadcast_to((col_N < E)[None, :], z_BN.shape)
    z_BN = tl.where(z_BN != z_BN, float("-inf"), tl.minimum(z_BN, LARGEST))
    raw_BN = z_BN
    if SOFTCAP is not None:
        z_BN = SOFTCAP * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * (z_BN / SOFTCAP))))
    if SCORE == "sparsemixer":
        ids_BK, weights_BK = sparsemixer_tile(z_BN, col_N, valid_BN, E, KP, JITTER)
    else:
        score_BN = z_BN
        if not AFTER:
            score_BN = rounded(score_tile(z_BN, valid_BN, SCORE, not ON_LOGITS), SCORE_DTYPE)
        choice_BN = raw_BN if ON_LOGITS else score_BN
        if bias_ptr is not None:
            choice_BN += tl.load(bias_ptr + col_N, mask=col_N < E, other=0.0).to(tl.float32)[None, :]
            choice_BN = tl.where(choice_BN != choice_BN, float("-inf"), tl.minimum(choice_BN, 3.4028234663852886e38))
        if G > 1:
            keep_BN = kept_groups(choice_BN, col_N, valid_BN, E, G, KEEP, TOP2)
            choice_BN = tl.where(keep_BN, choice_BN, MASK_CHOICE)
            if MASK_SCORE:
                score_BN = tl.where(keep_BN, score_BN, 0.0)
        key_BN = order_keys(choice_BN, col_N, valid_BN)
        ids_BK = tl.zeros([z_BN.shape[0], KP], tl.int32)
        weights_BK = tl.zeros([z_BN.shape[0], KP], tl.float32)
        for k in tl.static_range(K):
            chosen = best_id(key_BN)
            here = col_N[None, :] == chosen[:, None]
            weight = tl.max(tl.where(here, score_BN, float("-inf")), 1)
            ids_BK = tl.where((ks == k)[None, :], chosen[:, None], ids_BK)
            weights_BK = tl.where((ks == k)[None, :], weight[:, None], weights_BK)
            key_BN = tl.where(here, SMALLEST, key_BN)
        if AFTER:
            weights_BK = rounded(score_tile(weights_BK, (ks < K)[None, :], SCORE, False), SCORE_DTYPE)
    chosen_BK = (ks < K)[None, :] & (ids_BK >= 0)
    weights_BK = finish_tile(
        weights_BK, ids_BK, chosen_BK, scale_ptr, K, RENORM, EPS, LEAST, POWER, SCALE, OUT_DTYPE
    )  # fmt: skip
    return ids_BK, weights_BK


@triton.jit
def write_tile(
    ids_BK, weights_BK, row_B, T, ids_ptr, weights_ptr, pool_ptr, slots_ptr, num_tokens_ptr, column, pool_stride_s,
    pool_stride_l, K: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Ids to the pool at (slot, column), then the Routing, with padding rows as -1 and 0."""
    ks = tl.arange(0, KP)
    ok_BK = (row_B < T)[:, None] & (ks < K)[None, :]
    if pool_ptr is not None:
        slot_B = tl.load(slots_ptr + row_B, mask=row_B < T, other=0).to(tl.int64)
        at_BK = pool_ptr + slot_B[:, None] * pool_stride_s + column * pool_stride_l + ks[None, :]
        tl.store(at_BK, ids_BK.to(pool_ptr.dtype.element_ty), mask=ok_BK)
    if num_tokens_ptr is not None:
        real_B1 = (row_B < tl.load(num_tokens_ptr))[:, None]
        ids_BK = tl.where(real_B1, ids_BK, -1)
        weights_BK = tl.where(real_B1, weights_BK, 0.0)
    at_BK = row_B[:, None] * K + ks[None, :]
    tl.store(ids_ptr + at_BK, ids_BK, mask=ok_BK)
    tl.store(weights_ptr + at_BK, weights_BK, mask=ok_BK)


@triton.jit(do_not_specialize=["column", "T"])
def _select_kernel(
    logits_ptr, bias_ptr, scale_ptr, ids_ptr, weights_ptr, pool_ptr, slots_ptr, num_tokens_ptr, column, pool_stride_s,
    pool_stride_l, T, logits_stride, B: tl.constexpr, E: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    KP: tl.constexpr, LARGEST: tl.constexpr, SCORE: tl.constexpr, AFTER: tl.constexpr, ON_LOGITS: tl.constexpr,
    G: tl.constexpr, KEEP: tl.constexpr, TOP2: tl.constexpr, MASK_CHOICE: tl.constexpr, MASK_SCORE: tl.constexpr,
    SOFTCAP: tl.constexpr, JITTER: tl.constexpr, SCORE_DTYPE: tl.constexpr, RENORM: tl.constexpr, EPS: tl.constexpr,
    LEAST: tl.constexpr, POWER: tl.constexpr, SCALE: tl.constexpr, OUT_DTYPE: tl.constexpr,
):  # fmt: skip
    row_B = tl.program_id(0) * B + tl.arange(0, B)
    col_N = tl.arange(0, N)
    at_BN = logits_ptr + row_B.to(tl.int64)[:, None] * logits_stride + col_N[None, :]
    z_BN = tl.load(at_BN, mask=(row_B < T)[:, None] & (col_N < E)[None, :], other=0.0).to(tl.float32)
    ids_BK, weights_BK = choose_tile(
        z_BN, bias_ptr, scale_ptr, E, K, N, KP, LARGEST, SCORE, AFTER, ON_LOGITS, G, KEEP, TOP2, MASK_CHOICE,
        MASK_SCORE, SOFTCAP, JITTER, SCORE_DTYPE, RENORM, EPS, LEAST, POWER, SCALE, OUT_DTYPE,
    )  # fmt: skip
    write_tile(
        ids_BK, weights_BK, row_B, T, ids_ptr, weights_ptr, pool_ptr, slots_ptr, num_tokens_ptr, column,
        pool_stride_s, pool_stride_l, K, KP,
    )  # fmt: skip


TL_DTYPE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def rule_constants(spec: RouterSpec, logits_dtype: torch.dtype) -> dict[str, Any]:
    """The compile-time arguments of `choose_tile`; logits_dtype is the dtype that the gate product ends in."""
    model = TL_DTYPE[logits_dtype]
    return {
        "E": spec.num_logits,
        "K": spec.top_k,
        "N": max(2, triton.next_power_of_2(spec.num_logits)),
        "KP": max(2, triton.next_power_of_2(spec.top_k)),
        "LARGEST": torch.finfo(logits_dtype).max,
        "SCORE": spec.score,
        "AFTER": spec.after_topk,
        "ON_LOGITS": chooses_on_logits(spec),
        "G": spec.num_groups,
        "KEEP": spec.topk_groups,
        "TOP2": spec.group_score == "top2",
        "MASK_CHOICE": masked_choice(spec),
        "MASK_SCORE": spec.group_mask == 0.0,
        "SOFTCAP": spec.softcap,
        "JITTER": spec.jitter,
        "SCORE_DTYPE": model if spec.score_dtype == "model" else tl.float32,
        "RENORM": spec.renormalize,
        "EPS": spec.renorm_eps,
        "LEAST": spec.renorm_min,
        "POWER": spec.renorm_p,
        "SCALE": 1.0 if spec.scale_output else spec.scale,
        "OUT_DTYPE": model if spec.weights_dtype == "model" else tl.float32,
    }


def store_arguments(store: RouteStore | None, num_tokens_1: Tensor | None) -> dict[str, Any]:
    """The arguments of `write_tile` that say where ids go; all None compiles the store away."""
    pool = None if store is None else store.pool_SLK
    return {
        "pool_ptr": pool,
        "slots_ptr": None if store is None else store.slots_T,
        "num_tokens_ptr": num_tokens_1,
        "column": 0 if store is None else store.column,
        "pool_stride_s": 0 if pool is None else pool.stride(0),
        "pool_stride_l": 0 if pool is None else pool.stride(1),
    }


def select_experts_triton(
    logits_TE: Tensor,
    spec: RouterSpec,
    *,
    bias_E: Tensor | None = None,
    expert_scale_E: Tensor | None = None,
    store: RouteStore | None = None,
    num_tokens_1: Tensor | None = None,
) -> Routing:
    """`topk.select_experts` as one Triton launch (none for zero tokens)."""
    num_tokens, top_k = len(logits_TE), spec.top_k
    assert logits_TE.stride(1) == 1, f"logits must be contiguous along experts, strides are {logits_TE.stride()}"
    ids_TK = torch.empty(num_tokens, top_k, dtype=torch.int32, device=logits_TE.device)
    weights_TK = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits_TE.device)
    constants = rule_constants(spec, logits_TE.dtype)
    if num_tokens:
        rows = 1 if num_tokens < 64 else max(1, min(8, 2048 // constants["N"]))
        _select_kernel[(triton.cdiv(num_tokens, rows),)](
            logits_TE, bias_E, expert_scale_E, ids_TK, weights_TK, **store_arguments(store, num_tokens_1),
            T=num_tokens, logits_stride=logits_TE.stride(0), B=rows, num_warps=1 if rows == 1 else 4, **constants,
        )  # fmt: skip
    return Routing(ids_TK, weights_TK)
