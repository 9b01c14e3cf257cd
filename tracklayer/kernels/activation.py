"""Activations of dense MLPs, gated (act(gate) * up) and plain.

T tokens, F width of the MLP. Arithmetic is float32, results have the input's dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tracklayer.kernels.dispatch import use_triton
from tracklayer.kernels.jit import await_previous, has_pdl, jit, next_power_of_2, tl

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu2")


def act_mul(gate_up_TF: Tensor, activation: str, *, gated: bool = True) -> Tensor:
    """act(gate) * up of [T, 2F] (gate columns first) -> [T, F]; not gated: act(x) of [T, F] -> [T, F].

    Raises ValueError for an unknown activation or an odd gated width.
    """
    _check(gate_up_TF, activation, gated)
    if use_triton(gate_up_TF):
        return launch_act_mul(gate_up_TF, activation, gated=gated)
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


@jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation on float32 values, for this and for kernels that fuse it."""
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 x (1 + tanh(u)) = x sigmoid(2u)
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "relu2")
        positive = tl.maximum(x, 0.0)
        return positive * positive


@jit
def _act_mul_kernel(
    x_ptr, out_ptr, x_stride, F: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = f < F
    await_previous(PDL)
    y = activate(tl.load(x_ptr + t * x_stride + f, mask=ok, other=0.0).to(tl.float32), ACTIVATION)
    if GATED:
        y *= tl.load(x_ptr + t * x_stride + F + f, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * F + f, y.to(out_ptr.dtype.element_ty), mask=ok)


def launch_act_mul(gate_up_TF: Tensor, activation: str, *, gated: bool = True) -> Tensor:
    """Triton launch of `act_mul`; the last axis must be contiguous."""
    rows = gate_up_TF.reshape(-1, gate_up_TF.shape[-1])
    width = rows.shape[1] // 2 if gated else rows.shape[1]
    out = torch.empty(*gate_up_TF.shape[:-1], width, dtype=gate_up_TF.dtype, device=gate_up_TF.device)
    if out.numel() == 0:
        return out
    block = min(next_power_of_2(width), 1024)
    pdl = has_pdl(gate_up_TF.device)
    _act_mul_kernel[(len(rows), -(-width // block))](
        rows, out, rows.stride(0), F=width, BLOCK=block, ACTIVATION=activation, GATED=gated, PDL=pdl, launch_pdl=pdl,
        num_warps=4 if block >= 512 else 1,
    )  # fmt: skip
    return out
