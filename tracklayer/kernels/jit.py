"""Triton where it is installed, and what every launcher needs to know of the device.

The torch references run without Triton (it has no wheel for some laptops), so kernels import `jit`, `tl` and `triton`
from here: without Triton a kernel is defined but never launched, because no tensor is on a CUDA device.
"""

from __future__ import annotations

from functools import cache

import torch

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:  # no Triton, hence no CUDA launch

    def jit(function=None, **options):  # type: ignore[no-untyped-def]
        return function or (lambda function: function)

    triton = tl = None  # type: ignore[assignment]


@jit
def await_previous(PDL: tl.constexpr):
    """Under programmatic dependent launch: let the next kernel start, then wait for the memory of the one before.

    What comes earlier in a kernel may read weights only. Every program must come here, so that kernels end in order.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


LOG2E = 1.4426950408889634


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= n (1 for n <= 1)."""
    return 1 << max(n - 1, 0).bit_length()


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 4 on a CPU, where kernels run in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a block of a CUDA device can have; on a CPU (the interpreter) that of a small GPU."""
    if device.type != "cuda":
        return 99 * 1024
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@cache
def has_pdl(device: torch.device) -> bool:
    """Programmatic dependent launch needs compute capability 9."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def counters(device: torch.device, size: int) -> torch.Tensor:
    """int32 zeros that outlive every launch: kernels count finished programs in them and leave them zero again.

    Launches that share them must be on one stream.
    """
    return torch.zeros(size, dtype=torch.int32, device=device)
