"""What families with Mamba layers share: the names of their tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def mamba_names(theirs: str, ours: str) -> dict[str, str]:
    """Names of one Mamba mixer's tensors, first or second kind, below the prefixes `theirs` and `ours`."""
    words = {
        "in_proj.weight": "in.weight",
        "in_proj.bias": "in.bias",
        "out_proj.weight": "o.weight",
        "out_proj.bias": "o.bias",
        "conv1d.weight": "conv.weight",
        "conv1d.bias": "conv.bias",
        "norm.weight": "out_norm.weight",
        "dt_proj.weight": "dt.weight",
        "dt_proj.bias": "dt.bias",
        "dt_layernorm.weight": "dt_norm.weight",
        "b_layernorm.weight": "b_norm.weight",
        "c_layernorm.weight": "c_norm.weight",
        **{name: name for name in ("A_log", "D", "dt_bias", "x_proj.weight")},
    }
    return {f"{theirs}.{t}": f"{ours}.{o}" for t, o in words.items()}


def conv_transform(ours: str) -> dict[str, Callable[[Any, Any], Any]]:
    """Checkpoints keep a convolution's weight as [X, 1, K]."""
    return {f"{ours}.conv.weight": lambda weight, shape: weight.view(shape)}
