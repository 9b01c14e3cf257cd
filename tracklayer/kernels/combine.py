"""The weighted sum of each token's K expert rows, in the order of k, in float32: alone, or with the next norm.

T tokens, K chosen, D model width, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tracklayer.kernels.jit import await_previous, has_pdl, jit, next_power_of_2, tl
from tracklayer.kernels.topk import Routing


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """add + scale * sum_k weight_k * row_k [T, D] in x's dtype, not made yet: whoever reads it makes it.

    pairs_PD [T * K, D] holds row t * K + k; rows of ids outside [0, num_experts) are never read. With zero_experts
    ids above stand for the token's own x_TD. weigh=False: the weights are already in the rows.
    """

    pairs_PD: Tensor
    routing: Routing
    x_TD: Tensor
    num_experts: int
    scale: float = 1.0
    weigh: bool = True
    zero_experts: bool = False
    add_TD: Tensor | None = None

    def tensor(self) -> Tensor:
        """The sum, [T, D]."""
        return combine(self)

    def add_rms_norm(self, residual_TD: Tensor, weight_D: Tensor, eps: float, offset: float, scale: float) -> Tensor:
        """`norm.add_rms_norm` of the sum, rounded as the tensor would be, by one launch; the same arguments."""
        y_TD = torch.empty(self.x_TD.shape, dtype=self.x_TD.dtype, device=self.x_TD.device)
        width = y_TD.shape[1]
        block = next_power_of_2(width)
        if len(y_TD):
            _combine_norm_kernel[(len(y_TD),)](
                y_TD, residual_TD, residual_TD.stride(0), weight_D, eps, offset, scale, width, BD=block,
                num_warps=min(max(block // 512, 1), 8), **self.arguments(),
            )  # fmt: skip
        return y_TD

    def arguments(self) -> dict[str, object]:
        """What both kernels are told of it."""
        pdl, add = has_pdl(self.x_TD.device), self.add_TD
        return dict(
            pairs_ptr=self.pairs_PD, ids_ptr=self.routing.ids_TK, weights_ptr=self.routing.weights_TK,
            x_ptr=self.x_TD, x_stride=self.x_TD.stride(0), add_ptr=add, add_stride=0 if add is None else add.stride(0),
            sum_scale=self.scale, E=self.num_experts, K=self.routing.ids_TK.shape[1], WEIGH=self.weigh,
            ZERO=self.zero_experts, PDL=pdl, launch_pdl=pdl,
        )  # fmt: skip


def combine(rows: WeightedSum) -> Tensor:
    """The sum, by one launch."""
    y_TD = torch.empty(rows.x_TD.shape, dtype=rows.x_TD.dtype, device=rows.x_TD.device)
    width = y_TD.shape[1]
    block = min(1024, next_power_of_2(width))
    if len(y_TD):
        _combine_kernel[(len(y_TD), -(-width // block))](y_TD, width, BD=block, num_warps=4, **rows.arguments())
    return y_TD


def combine_ref(rows: WeightedSum) -> Tensor:
    """The torch reference of `combine`."""
    ids_TK1, x_TD = rows.routing.ids_TK[..., None], rows.x_TD
    rows_TKD = rows.pairs_PD.view(*rows.routing.ids_TK.shape, -1)
    other_T1D = x_TD[:, None] if rows.zero_experts else torch.zeros_like(x_TD[:, None])
    rows_TKD = torch.where(ids_TK1 >= rows.num_experts, other_T1D, rows_TKD).float()
    rows_TKD = torch.where(ids_TK1 < 0, 0.0, rows_TKD)
    weights_TK1 = rows.routing.weights_TK[..., None]
    y_TD = (rows_TKD * (weights_TK1 if rows.weigh else torch.ones_like(weights_TK1))).sum(1) * rows.scale
    return (y_TD if rows.add_TD is None else y_TD + rows.add_TD.float()).to(x_TD.dtype)


@jit
def _sum(
    token, d, D, pairs_ptr, ids_ptr, weights_ptr, x_ptr, x_stride, add_ptr, add_stride, sum_scale, E: tl.constexpr,
    K: tl.constexpr, WEIGH: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """Columns d of one token's sum, float32 [BD]."""
    acc = tl.zeros(d.shape, tl.float32)
    for k in tl.static_range(K):
        expert = tl.load(ids_ptr + token * K + k)
        weight = tl.load(weights_ptr + token * K + k) if WEIGH else 1.0
        known = (expert >= 0) & (expert < E)
        row = tl.load(pairs_ptr + (token * K + k) * D + d, mask=(d < D) & known, other=0.0).to(tl.float32)
        if ZERO:
            row += tl.load(x_ptr + token * x_stride + d, mask=(d < D) & (expert >= E), other=0.0).to(tl.float32)
        acc += weight * row
    acc *= sum_scale
    if add_ptr is not None:
        acc += tl.load(add_ptr + token * add_stride + d, mask=d < D, other=0.0).to(tl.float32)
    return acc


@jit
def _combine_kernel(
    y_ptr, D, pairs_ptr, ids_ptr, weights_ptr, x_ptr, x_stride, add_ptr, add_stride, sum_scale, E: tl.constexpr,
    K: tl.constexpr, WEIGH: tl.constexpr, ZERO: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    await_previous(PDL)
    acc = _sum(token, d, D, pairs_ptr, ids_ptr, weights_ptr, x_ptr, x_stride, add_ptr, add_stride, sum_scale, E, K,
               WEIGH, ZERO)  # fmt: skip
    tl.store(y_ptr + token * D + d, acc.to(y_ptr.dtype.element_ty), mask=d < D)


@jit
def _combine_norm_kernel(
    y_ptr, residual_ptr, residual_stride, norm_ptr, eps, offset, scale, D, pairs_ptr, ids_ptr, weights_ptr, x_ptr,
    x_stride, add_ptr, add_stride, sum_scale, E: tl.constexpr, K: tl.constexpr, WEIGH: tl.constexpr,
    ZERO: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    ok = d < D
    norm = tl.load(norm_ptr + d, mask=ok, other=0.0).to(tl.float32) + offset
    await_previous(PDL)
    at = residual_ptr + token * residual_stride + d
    residual = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    acc = _sum(token, d, D, pairs_ptr, ids_ptr, weights_ptr, x_ptr, x_stride, add_ptr, add_stride, sum_scale, E, K,
               WEIGH, ZERO)  # fmt: skip
    x = (residual + acc.to(y_ptr.dtype.element_ty).to(tl.float32) * scale).to(residual_ptr.dtype.element_ty)
    tl.store(at, x, mask=ok)
    x = x.to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / D + eps) * norm
    tl.store(y_ptr + token * D + d, y.to(y_ptr.dtype.element_ty), mask=ok)
