"""Tracklayer: a Mixture-of-Experts inference engine that returns, exactly, which experts every token went through.

    Engine            a model in this process (tracklayer.engine.llm)
    SamplingParams    how a request is sampled
    Routes            the experts of each token of one sequence; needs numpy alone

Names load on first use, so that reading routes needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracklayer.engine.llm import Engine
    from tracklayer.routes.record import Routes
    from tracklayer.types import SamplingParams

__all__ = ["Engine", "Routes", "SamplingParams"]
__version__ = "0.1.0"

_HOMES = {
    "Engine": "tracklayer.engine.llm",
    "Routes": "tracklayer.routes.record",
    "SamplingParams": "tracklayer.types",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tracklayer' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
