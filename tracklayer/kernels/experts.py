"""The routed experts of one MoE layer: y = add + scale * sum_k weight_k * expert_k(x).

T tokens, E experts, K chosen, D model width, F expert width, P = T * K (token, expert) pairs.

On CUDA three ways, by the number of tokens (kernels/tuning.py has the thresholds):
    few      experts_small.py: no sorting, each pair is work
    decode   route_sort.py, grouped_gemm.py with weights as the tall operand, combine.py: bound by weight bandwidth
    prefill  the same with tokens as the tall operand: bound by tensor cores
All are deterministic: float32 accumulators, no float atomics, the K terms of a token summed in the order of k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from tracklayer.kernels.combine import WeightedSum
from tracklayer.kernels.dispatch import use_triton
from tracklayer.kernels.topk import Routing

Activation = Literal["silu", "gelu_tanh", "gelu", "relu2", "swiglu_oai"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpec:
    """One family's expert, as data.

    gated            down(act(gate) * up); not gated: down(act(up))
    clamp_before     gate at most this and up within +- it, before the activation (GPT-OSS, DeepSeek-V4)
    clamp_after      act(gate) at most this and up within +- it, after the activation (Step)
    weight_on_input  the weight multiplies the expert's input, not its output (Llama 4)
    num_zero_experts ids in [E, E + Z) return their input times the weight (LongCat)
    scale            factor on the weighted sum
    """

    activation: Activation = "silu"
    gated: bool = True
    clamp_before: float | None = None
    clamp_after: float | None = None
    weight_on_input: bool = False
    num_zero_experts: int = 0
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.activation not in get_args(Activation):
            raise ValueError(f"unknown activation {self.activation!r}")
        if self.activation == "swiglu_oai" and not self.gated:
            raise ValueError("swiglu_oai needs gated=True: it is (up + 1) * gate * sigmoid(1.702 * gate)")
        if self.weight_on_input and self.num_zero_experts:
            raise ValueError("weight_on_input with zero experts is not defined")


def fused_experts(
    x_TD: Tensor,
    routing: Routing,
    w13_EFD: Tensor,
    w2_EDF: Tensor,
    spec: ExpertSpec,
    *,
    bias13: Tensor | None = None,
    bias2: Tensor | None = None,
    add_TD: Tensor | None = None,
) -> Tensor | WeightedSum:
    """(add_TD or 0) + scale * sum_k weight_k * expert_k(x), as [T, D] in x's dtype; on CUDA the sum may be left to do.

    w13_EFD [E, 2F, D], gate rows first then up rows ([E, F, D] when not gated), bias13 [E, 2F or F]; w2_EDF [E, D, F],
    bias2 [E, D]. Ids of -1 contribute nothing. Raises ValueError when shapes do not fit.
    """
    _check(x_TD, routing, w13_EFD, w2_EDF, spec, bias13, bias2, add_TD)
    run = fused_experts_ref
    if use_triton(x_TD):
        from tracklayer.kernels.experts_cuda import fused_experts_triton as run  # triton is needed on a GPU only
    return run(x_TD, routing, w13_EFD, w2_EDF, spec, bias13=bias13, bias2=bias2, add_TD=add_TD)


def fused_experts_ref(
    x_TD: Tensor,
    routing: Routing,
    w13_EFD: Tensor,
    w2_EDF: Tensor,
    spec: ExpertSpec,
    *,
    bias13: Tensor | None = None,
    bias2: Tensor | None = None,
    add_TD: Tensor | None = None,
) -> Tensor:
    """The torch path: what a CPU runs. Pairs are grouped by expert, one pair of products per expert that has any.

    Measured on one core (experts of 64 x 576 and 512 x 1024): 2 to 20 times faster than gathered weights and bmm.
    """
    ids_TK, weights_TK = routing.ids_TK, routing.weights_TK
    num_tokens, top_k = ids_TK.shape
    num_experts = w13_EFD.shape[0]
    order_P, runs = _runs(ids_TK, num_experts)
    rows_PD = x_TD.expand(top_k, -1) if order_P is None else x_TD[order_P // top_k]
    if spec.weight_on_input:
        weights_P1 = weights_TK.reshape(-1, 1) if order_P is None else weights_TK.reshape(-1, 1)[order_P]
        rows_PD = rows_PD * weights_P1.to(x_TD.dtype)
    inner_PF = rows_PD.new_zeros(len(rows_PD), w13_EFD.shape[1])
    for expert, start, end in runs:
        _product(rows_PD, w13_EFD, bias13, expert, inner_PF, start, end)
    hidden_PF = activate(inner_PF, spec)
    done_PD = torch.zeros_like(rows_PD)
    for expert, start, end in runs:
        _product(hidden_PF, w2_EDF, bias2, expert, done_PD, start, end)
    pairs_PD = done_PD
    if order_P is not None:
        pairs_PD = torch.empty_like(done_PD)
        pairs_PD[order_P] = done_PD
    pairs_TKD = pairs_PD.view(num_tokens, top_k, x_TD.shape[1])
    if spec.num_zero_experts:
        pairs_TKD = torch.where((ids_TK >= num_experts)[..., None], x_TD[:, None], pairs_TKD)
    weights_TK = torch.ones_like(weights_TK) if spec.weight_on_input else weights_TK
    y_TD = torch.bmm(weights_TK[:, None].float(), pairs_TKD.float())[:, 0]
    y_TD = y_TD if spec.scale == 1.0 else y_TD * spec.scale
    return (y_TD if add_TD is None else add_TD.float() + y_TD).to(x_TD.dtype)


def _product(a: Tensor, weights: Tensor, biases: Tensor | None, expert: int, out: Tensor, start: int, end: int) -> None:
    """out[start:end] = a[start:end] @ weights[expert].T (+ biases[expert])."""
    rows = out[start:end]
    torch.mm(a[start:end], weights[expert].t(), out=rows)
    if biases is not None:
        rows += biases[expert]


def _runs(ids_TK: Tensor, num_experts: int) -> tuple[Tensor | None, list[tuple[int, int, int]]]:
    """The order that groups pairs by expert (None: as they are) and (expert, start, end) of each group in it."""
    if len(ids_TK) == 1:
        return None, [(e, k, k + 1) for k, e in enumerate(ids_TK[0].tolist()) if 0 <= e < num_experts]
    ids_P = ids_TK.reshape(-1).long()
    ids_P = torch.where((ids_P < 0) | (ids_P >= num_experts), num_experts, ids_P)
    runs, start = [], 0
    for expert, count in enumerate(ids_P.bincount(minlength=num_experts)[:num_experts].tolist()):
        if count:
            runs.append((expert, start, start + count))
            start += count
    return ids_P.argsort(stable=True), runs


def activate(inner: Tensor, spec: ExpertSpec) -> Tensor:
    """[..., 2F] (gate, up) or [..., F] -> [..., F], with the clamps of the spec."""
    gate, up = inner.chunk(2, -1) if spec.gated else (inner, None)
    if spec.clamp_before is not None:
        gate = gate.clamp(max=spec.clamp_before)
        up = None if up is None else up.clamp(-spec.clamp_before, spec.clamp_before)
    match spec.activation:
        case "silu":
            out = F.silu(gate)
        case "gelu":
            out = F.gelu(gate)
        case "gelu_tanh":
            out = F.gelu(gate, approximate="tanh")
        case "relu2":
            out = F.relu(gate).square()
        case "swiglu_oai":
            out = gate * torch.sigmoid(1.702 * gate)
            up = up + 1 if up is not None else None
    if spec.clamp_after is not None:
        out = out.clamp(max=spec.clamp_after)
        up = None if up is None else up.clamp(-spec.clamp_after, spec.clamp_after)
    return out if up is None else out * up


def _check(
    x_TD: Tensor,
    routing: Routing,
    w13_EFD: Tensor,
    w2_EDF: Tensor,
    spec: ExpertSpec,
    bias13: Tensor | None,
    bias2: Tensor | None,
    add_TD: Tensor | None,
) -> None:
    """Shapes against each other; ValueError names both sides."""
    num_tokens, width = x_TD.shape
    experts, _, inner = w2_EDF.shape
    top_k = routing.ids_TK.shape[1]
    wanted = {
        "w13_EFD": (w13_EFD, (experts, inner * (2 if spec.gated else 1), width)),
        "w2_EDF": (w2_EDF, (experts, width, inner)),
        "ids_TK": (routing.ids_TK, (num_tokens, top_k)),
        "weights_TK": (routing.weights_TK, (num_tokens, top_k)),
        "bias13": (bias13, (experts, inner * (2 if spec.gated else 1))),
        "bias2": (bias2, (experts, width)),
        "add_TD": (add_TD, (num_tokens, width)),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} must be {list(shape)} beside x {list(x_TD.shape)}, got {list(tensor.shape)}")
