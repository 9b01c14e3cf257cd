"""Activations of dense MLPs, gated (act(gate) * up) and plain.

T tokens, F width of the MLP. Arithmetic is float32, results have the input's dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu2")


def act_mul(gate_up_TF: Tensor, activation: str, *, gated: bool = True) -> Tensor:
    """act(gate) * up of [T, 2F] (gate columns first) -> [T, F]; not gated: act(x) of [T, F] -> [T, F].

    Raises ValueError for an unknown activation or an odd gated width.
    """
    _check(gate_up_TF, activation, gated)
    return act_mul_ref(gate_up_TF, activation, gated=gated)


def _check(gate_up_TF: Tensor, activation: str, gated: bool) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}, expected one of {', '.join(ACTIVATIONS)}")
    if gated and gate_up_TF.shape[-1] % 2:
        raise ValueError(f"a gated activation needs an even width (gate and up), got {gate_up_TF.shape[-1]}")


def act_mul_ref(gate_up_TF: Tensor, activation: str, *, gated: bool = True) -> Tensor:
    """The torch reference of `act_mul`."""
    if not gated:
        return _act(gate_up_TF.float(), activation).to(gate_up_TF.dtype)
    gate_TF, up_TF = gate_up_TF.float().chunk(2, -1)
    return (_act(gate_TF, activation) * up_TF).to(gate_up_TF.dtype)


def _act(x: Tensor, activation: str) -> Tensor:
    match activation:
        case "silu":
            return F.silu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "gelu":
            return F.gelu(x)
        case "relu2":
            return torch.relu(x).square()
    raise ValueError(f"unknown activation {activation!r}")
