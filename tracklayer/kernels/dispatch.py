"""Which form of an op runs: the Triton kernel for CUDA tensors, the torch reference otherwise or when asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_REFERENCE: ContextVar[bool] = ContextVar("reference_kernels", default=False)


def use_triton(x: Tensor) -> bool:
    """True when the op over `x` should run as a Triton kernel."""
    return x.is_cuda and not _REFERENCE.get()


@contextmanager
def reference_kernels() -> Iterator[None]:
    """Run the torch references, on any device, inside this block."""
    token = _REFERENCE.set(True)
    try:
        yield
    finally:
        _REFERENCE.reset(token)
