"""Measure an engine in this process, through the offline API; rows are returned to the caller when recording is on."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from tracklayer.bench.workloads import Workload
from tracklayer.engine.client import EngineClient
from tracklayer.engine.llm import Engine
from tracklayer.types import EngineRequest, FinishReason, RequestOutput


class Stopwatch:
    """An EngineClient around another that notes when each request was submitted and when its tokens came."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.info = client.info
        self.submitted: dict[str, float] = {}
        self.arrivals: dict[str, list[tuple[float, int]]] = {}

    def reset(self) -> None:
        self.submitted.clear()
        self.arrivals.clear()

    def listen(self, consumer: Callable[[list[RequestOutput]], None]) -> None:
        def timed(outputs: list[RequestOutput]) -> None:
            now = time.perf_counter()
            for output in outputs:
                if output.new_token_ids:
                    self.arrivals.setdefault(output.rid, []).append((now, len(output.new_token_ids)))
            consumer(outputs)

        self.client.listen(timed)

    def submit(self, requests: list[EngineRequest]) -> None:
        now = time.perf_counter()
        self.submitted.update((request.rid, now) for request in requests)
        self.client.submit(requests)

    def abort(self, rid: str) -> None:
        self.client.abort(rid)

    def finish(self, rid: str, keep: int, reason: FinishReason) -> None:
        self.client.finish(rid, keep, reason)

    def control(self, name: str, **arguments: Any) -> Future[Any]:
        return self.client.control(name, **arguments)

    def alive(self) -> bool:
        return self.client.alive()

    def shutdown(self) -> None:
        self.client.shutdown()


@dataclass(slots=True)
class Measurement:
    """One run of one workload. Times in seconds; latencies are percentiles 50, 90, 99 in milliseconds."""

    workload: str
    recording: bool
    seconds: float
    output_tokens: int
    total_tokens: int
    cached_tokens: int
    route_rows: int
    ttft_ms: tuple[float, float, float]
    itl_ms: tuple[float, float, float]
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def total_tokens_per_s(self) -> float:
        return self.total_tokens / self.seconds

    def value(self, metric: str) -> float:
        return float(getattr(self, metric))


def percentiles(values: list[float]) -> tuple[float, float, float]:
    if not values:
        return (0.0, 0.0, 0.0)
    p50, p90, p99 = np.percentile(np.array(values) * 1e3, [50, 90, 99])
    return (round(float(p50), 3), round(float(p90), 3), round(float(p99), 3))


def measure(engine: Engine, watch: Stopwatch, workload: Workload, seed: int, *, recording: bool) -> Measurement:
    """Flush the prefix cache, send all requests at once, wait for all; checks tokens and rows of each answer."""
    assert engine.flush_cache().success
    prompts = workload.prompts(watch.info.vocab_size, seed)
    watch.reset()
    sampling = {"temperature": 0.0, "max_new_tokens": workload.output_tokens, "ignore_eos": True}
    began = time.perf_counter()
    answers = engine.generate(
        input_ids=prompts, sampling_params=sampling, return_routed_experts=recording, progress=False
    )
    seconds = time.perf_counter() - began
    infos = [answer["meta_info"] for answer in answers]
    for answer, info in zip(answers, infos, strict=True):
        assert len(answer["output_ids"]) == workload.output_tokens, info
        if recording:
            rows = info["routed_experts"]
            assert len(rows) == workload.input_tokens + workload.output_tokens - 1, rows
    first = [arrived[0][0] - watch.submitted[rid] for rid, arrived in watch.arrivals.items()]
    between = [
        (later[0] - sooner[0]) / later[1] for arrived in watch.arrivals.values() for sooner, later in pairwise(arrived)
    ]
    output = sum(info["completion_tokens"] for info in infos)
    return Measurement(
        workload=workload.name,
        recording=recording,
        seconds=seconds,
        output_tokens=output,
        total_tokens=output + sum(info["prompt_tokens"] for info in infos),
        cached_tokens=sum(info["cached_tokens"] for info in infos),
        route_rows=sum(len(info["routed_experts"]) for info in infos) if recording else 0,
        ttft_ms=percentiles(first),
        itl_ms=percentiles(between),
    )
