"""The CUDA path of `experts.fused_experts`: picks the form and strings its launches together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tracklayer.kernels.combine import WeightedSum
from tracklayer.kernels.experts import ExpertSpec
from tracklayer.kernels.experts_small import down_sum, gate_up
from tracklayer.kernels.grouped_gemm import grouped_gemm
from tracklayer.kernels.route_sort import route_sort
from tracklayer.kernels.topk import Routing
from tracklayer.kernels.tuning import pick


def fused_experts_triton(
    x_TD: Tensor,
    routing: Routing,
    w13_EFD: Tensor,
    w2_EDF: Tensor,
    spec: ExpertSpec,
    *,
    bias13: Tensor | None = None,
    bias2: Tensor | None = None,
    add_TD: Tensor | None = None,
    config: dict[str, Any] | None = None,
) -> Tensor | WeightedSum:
    """As `experts.fused_experts`: 2 launches for a few tokens; for more 3 and the sum. config: not the tuned one."""
    experts, width, inner = w2_EDF.shape
    if len(x_TD) == 0:
        return torch.empty_like(x_TD)
    config = config or pick(x_TD.device, (experts, width, inner), routing.ids_TK.shape[1], len(x_TD), x_TD.dtype)
    if config["form"] == "small":
        hidden_PF = gate_up(x_TD, routing, w13_EFD, spec, config["up"], bias13)
        return down_sum(hidden_PF, x_TD, routing, w2_EDF, spec, config["down"], bias2, add_TD)
    pairs = route_sort(routing.ids_TK, experts, config["up"]["m"])
    hidden_PF = grouped_gemm(
        x_TD, w13_EFD, pairs, routing.weights_TK, spec, config["up"], first=True, bias=bias13
    )  # fmt: skip
    rows_PD = grouped_gemm(
        hidden_PF, w2_EDF, pairs, routing.weights_TK, spec, config["down"], first=False, bias=bias2
    )  # fmt: skip
    return WeightedSum(
        rows_PD, routing, x_TD, experts, scale=spec.scale, weigh=not spec.weight_on_input,
        zero_experts=spec.num_zero_experts > 0, add_TD=add_TD,
    )  # fmt: skip
