"""Gate product and choice of experts: hidden states in, Routing out, ids stored on the way.

T tokens, E logits (routed and zero experts), D model width.

On CUDA a few tokens take one launch: a program per expert forms that expert's logits for all tokens (the gate's
bytes are read by many multiprocessors), and the last program to finish makes the choice. More tokens take a matrix
product and the select kernel. The gate product is deterministic either way.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tracklayer.kernels.dispatch import use_triton
from tracklayer.kernels.norm import AddNorm, as_tensor
from tracklayer.kernels.topk import (
    RouterSpec,
    RouteStore,
    Routing,
    check_router_inputs,
    select_experts,
    select_experts_ref,
)


def route(
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
    """Choose experts for x [T, D] (model dtype) by the gate [num_logits, D]; the rest as in `topk.select_experts`.

    An AddNorm of one token is made inside the one launch.
    The product is accumulated in float32; spec.gate_dtype "model" rounds it to x's dtype, "float32" keeps it.
    Raises ValueError when shapes do not fit.
    """
    num_tokens, width = (x.residual_TD if isinstance(x, AddNorm) else x).shape
    if gate_ED.shape != (spec.num_logits, width):
        raise ValueError(f"the gate must be [{spec.num_logits}, {width}], got {list(gate_ED.shape)}")
    rest = {"bias_E": bias_E, "expert_scale_E": expert_scale_E, "store": store, "num_tokens_1": num_tokens_1}
    if use_triton(gate_ED):
        from tracklayer.kernels.route_few import MAX_TOKENS, route_few  # triton is needed on a GPU only

        if 0 < num_tokens <= MAX_TOKENS:
            check_router_inputs(torch.Size((num_tokens, len(gate_ED))), spec, bias_E, expert_scale_E, store)
            return route_few(x, gate_ED, spec, gate_bias_E=gate_bias_E, **rest)
    return select_experts(gate_logits(as_tensor(x), gate_ED, gate_bias_E, spec), spec, **rest)


def gate_logits(x_TD: Tensor, gate_ED: Tensor, gate_bias_E: Tensor | None, spec: RouterSpec) -> Tensor:
    """The gate product [T, E] in the dtype that the spec says."""
    if spec.gate_dtype == "model":
        gate_bias_E = None if gate_bias_E is None else gate_bias_E.to(x_TD.dtype)
        return F.linear(x_TD, gate_ED.to(x_TD.dtype), gate_bias_E)
    if x_TD.is_cuda and x_TD.dtype == gate_ED.dtype and x_TD.dtype != torch.float32:
        # Products of bf16 or fp16 operands are exact in float32: the tensor cores give the float32 product.
        logits_TE = torch.mm(x_TD, gate_ED.t(), out_dtype=torch.float32)
        return logits_TE if gate_bias_E is None else logits_TE + gate_bias_E.float()
    return F.linear(x_TD.float(), gate_ED.float(), None if gate_bias_E is None else gate_bias_E.float())


def route_ref(
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
    """The torch reference of `route`: same arguments, same result."""
    logits_TE = gate_logits(as_tensor(x), gate_ED, gate_bias_E, spec)
    return select_experts_ref(
        logits_TE, spec, bias_E=bias_E, expert_scale_E=expert_scale_E, store=store, num_tokens_1=num_tokens_1
    )
