"""Triton: the weighted sum of each token's K expert rows, in the order of k, in float32.

T tokens, K chosen, D model width, E experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracklayer.kernels.jit import await_previous, has_pdl
from tracklayer.kernels.topk import Routing


@triton.jit
def _combine_kernel(
    pairs_ptr, ids_ptr, weights_ptr, x_ptr, add_ptr, y_ptr, D, x_stride, add_stride, scale, E: tl.constexpr,
    K: tl.constexpr, WEIGH: tl.constexpr, ZERO: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    await_previous(PDL)
    acc = tl.zeros([BD], tl.float32)
    for k in tl.static_range(K):
        expert = tl.load(ids_ptr + token * K + k)
        weight = tl.load(weights_ptr + token * K + k) if WEIGH else 1.0
        known = (expert >= 0) & (expert < E)
        row = tl.load(pairs_ptr + (token * K + k) * D + d, mask=(d < D) & known, other=0.0).to(tl.float32)
        if ZERO:
            row += tl.load(x_ptr + token * x_stride + d, mask=(d < D) & (expert >= E), other=0.0).to(tl.float32)
        acc += weight * row
    acc *= scale
    if add_ptr is not None:
        acc += tl.load(add_ptr + token * add_stride + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * D + d, acc.to(y_ptr.dtype.element_ty), mask=d < D)


def combine(
    pairs_PD: Tensor,
    routing: Routing,
    x_TD: Tensor,
    num_experts: int,
    *,
    scale: float = 1.0,
    weigh: bool = True,
    zero_experts: bool = False,
    add_TD: Tensor | None = None,
) -> Tensor:
    """add + scale * sum_k weight_k * row_k as [T, D] in x's dtype.

    pairs_PD [T * K, D] holds row t * K + k; rows of ids outside [0, num_experts) are never read. With zero_experts
    ids above stand for the token's own x_TD. weigh=False: the weights are already in the rows.
    """
    num_tokens, width = x_TD.shape
    top_k = routing.ids_TK.shape[1]
    y_TD = torch.empty(num_tokens, width, dtype=x_TD.dtype, device=x_TD.device)
    block = min(1024, triton.next_power_of_2(width))
    pdl = has_pdl(x_TD.device)
    _combine_kernel[(num_tokens, triton.cdiv(width, block))](
        pairs_PD, routing.ids_TK, routing.weights_TK, x_TD, add_TD, y_TD, width, x_TD.stride(0),
        0 if add_TD is None else add_TD.stride(0), scale, E=num_experts, K=top_k, WEIGH=weigh, ZERO=zero_experts,
        BD=block, PDL=pdl, launch_pdl=pdl, num_warps=4,
    )  # fmt: skip
    return y_TD


def combine_ref(
    pairs_PD: Tensor,
    routing: Routing,
    x_TD: Tensor,
    num_experts: int,
    *,
    scale: float = 1.0,
    weigh: bool = True,
    zero_experts: bool = False,
    add_TD: Tensor | None = None,
) -> Tensor:
    """The torch reference of `combine`."""
    ids_TK1 = routing.ids_TK[..., None]
    rows_TKD = pairs_PD.view(*routing.ids_TK.shape, -1)
    other_T1D = x_TD[:, None] if zero_experts else torch.zeros_like(x_TD[:, None])
    rows_TKD = torch.where(ids_TK1 >= num_experts, other_T1D, rows_TKD).float()
    rows_TKD = torch.where(ids_TK1 < 0, 0.0, rows_TKD)
    weights_TK1 = routing.weights_TK[..., None] if weigh else torch.ones_like(routing.weights_TK[..., None])
    y_TD = (rows_TKD * weights_TK1).sum(1) * scale
    return (y_TD if add_TD is None else y_TD + add_TD.float()).to(x_TD.dtype)
