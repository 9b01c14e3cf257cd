"""Driving an EngineCore step by step in tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tracklayer.config import EngineConfig
from tracklayer.engine.engine import EngineCore
from tracklayer.engine.record import join_logprobs
from tracklayer.types import EngineRequest, FinishReason, RequestOutput, SamplingParams, TokenLogprobs

SMALL: dict[str, Any] = {
    "enable_return_routed_experts": True,
    "max_total_tokens": 600,
    "max_running_requests": 8,
    "chunked_prefill_size": 64,
    "random_seed": 0,
    "device": "cpu",
}


@dataclass
class Result:
    """Everything that came back for one request."""

    tokens: list[int] = field(default_factory=list)
    routes: np.ndarray | None = None
    finish: FinishReason | None = None
    cached_tokens: int = 0
    retractions: int = 0
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    output_logprobs: TokenLogprobs | None = None
    input_logprobs: TokenLogprobs | None = None
    news: int = 0

    def add(self, output: RequestOutput) -> None:
        self.news += 1
        self.tokens += output.new_token_ids
        for name in ("output_logprobs", "input_logprobs"):
            pieces = [piece for piece in (getattr(self, name), getattr(output, name)) if piece is not None]
            setattr(self, name, join_logprobs(pieces))
        if output.finish is not None:
            assert self.finish is None, "a request ended twice"
            self.finish, self.routes, self.spans = output.finish, output.routes, output.weight_spans
            self.cached_tokens, self.retractions = output.cached_tokens, output.num_retractions


def make_core(folder: Path, **config: Any) -> EngineCore:
    return EngineCore(EngineConfig(model_path=str(folder), **{**SMALL, **config}))


def request(
    rid: str, prompt: list[int], *, tokens: int = 8, sampling: dict[str, Any] | None = None, **fields: Any
) -> EngineRequest:
    params = SamplingParams(**{"temperature": 0.0, "max_new_tokens": tokens, **(sampling or {})})
    return EngineRequest(
        **{"rid": rid, "input_ids": prompt, "sampling": params, "return_routed_experts": True, **fields}
    )


def run(
    core: EngineCore,
    requests: list[EngineRequest],
    *,
    between: Callable[[EngineCore, int], None] | None = None,
    most_steps: int = 2000,
) -> dict[str, Result]:
    """Add the requests together and step until all have ended; `between(core, step)` runs after each step."""
    results = {r.rid: Result() for r in requests}
    for one in requests:
        core.add(one)
    for step in range(most_steps):
        if all(r.finish for r in results.values()) and not core.has_work:
            core.scheduler.check_integrity()
            return results
        for output in core.step():
            results[output.rid].add(output)
        if between is not None:
            between(core, step)
    raise AssertionError(f"still running after {most_steps} steps: {[r for r, v in results.items() if not v.finish]}")


def prompts(count: int, lengths: tuple[int, ...] = (5, 23, 40), vocab: int = 97, seed: int = 5) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocab, lengths[i % len(lengths)]).tolist() for i in range(count)]
