"""How a module tells the loader what it is made of.

A *part* is a named, writable view of a parameter: the `k` rows of a fused qkv weight, the gate rows of expert 3.
Checkpoint tensors are copied into parts, whichever way the checkpoint cuts them; the parts of one cut are disjoint,
so that counting elements shows whether a parameter is whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

Part = tuple[str, Tensor, nn.Parameter]


def parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """An uninitialised parameter (the loader fills it); on the default device and dtype of the moment."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


def prefixed(prefix: str, parts: Iterator[Part]) -> Iterator[Part]:
    for name, view, owner in parts:
        yield f"{prefix}.{name}", view, owner
