"""Prometheus metrics under SGLang's names, and our own about routes. A registry per server, nothing global."""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tracklayer.engine.frontend import Observer
from tracklayer.engine.sample import Sample
from tracklayer.routes.record import Routes

SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
# gauge name -> (key of the engine's loads, text)
GAUGES = {
    "sglang:num_running_reqs": ("num_running_reqs", "requests that run"),
    "sglang:num_queue_reqs": ("num_waiting_reqs", "requests that wait"),
    "sglang:num_used_tokens": ("num_used_tokens", "KV slots in use"),
    "sglang:max_total_num_tokens": ("max_total_num_tokens", "KV slots there are"),
    "sglang:token_usage": ("token_usage", "share of the KV slots in use"),
    "sglang:gen_throughput": ("gen_throughput", "output tokens per second"),
    "sglang:num_retracted_reqs": ("retractions", "requests put back because pages ran out, since start"),
    "tracklayer:route_rows_total": ("route_rows", "route rows (tokens) gathered, since start"),
    "tracklayer:route_gather_bytes_total": ("route_bytes", "bytes of routes gathered, since start"),
    "tracklayer:incomplete_route_rows_total": ("incomplete_rows", "route rows that were never recorded, since start"),
    "tracklayer:route_gather_seconds_total": ("gather_s", "host seconds spent bringing route rows home, since start"),
    "tracklayer:route_wait_seconds_total": ("route_wait_s", "seconds that ended requests waited for rows, since start"),
    "tracklayer:steps_total": ("steps", "forwards, since start"),
    "tracklayer:paused": ("paused", "1 while generation is paused"),
    "sglang:num_paused_reqs": ("num_paused_reqs", "requests that a pause holds"),
    "sglang:weight_load_duration_seconds": ("weight_load_s", "seconds that the last loading of weights took"),
    "sglang:spec_accept_length": ("", "tokens a step with speculation, which there is none of: 0"),
    "sglang:spec_accept_rate": ("", "share of drafted tokens taken: 0"),
}


class Metrics(Observer):
    """Watches the front end; `text` adds the engine's numbers of the moment."""

    def __init__(self, model_name: str, route_selftest: str = "off") -> None:
        self.registry = CollectorRegistry()
        self._label = {"model_name": model_name}
        self._gauges = {name: self._make(Gauge, name, text) for name, (_, text) in GAUGES.items()}
        self._hit_rate = self._make(Gauge, "sglang:cache_hit_rate", "share of prompt tokens found in the prefix cache")
        self._prompt = self._make(Counter, "sglang:prompt_tokens", "prompt tokens")
        self._generation = self._make(Counter, "sglang:generation_tokens", "output tokens")
        self._cached = self._make(Counter, "sglang:cached_tokens", "prompt tokens found in the prefix cache")
        self._requests = self._make(Counter, "sglang:num_requests", "requests that ended")
        self._aborted = self._make(Counter, "sglang:num_aborted_requests", "requests that were aborted")
        self._rows = self._make(Counter, "tracklayer:route_rows_returned", "route rows (tokens) returned")
        self._bytes = self._make(
            Counter, "tracklayer:route_bytes_returned", "bytes of routes returned, before encoding"
        )
        self._ttft = self._make(Histogram, "sglang:time_to_first_token_seconds", "arrival to first token", SECONDS)
        self._itl = self._make(Histogram, "sglang:inter_token_latency_seconds", "between two tokens", SECONDS)
        self._e2e = self._make(Histogram, "sglang:e2e_request_latency_seconds", "arrival to end", SECONDS)
        self._queue = self._make(Histogram, "sglang:queue_time_seconds", "arrival in the queue to first step", SECONDS)
        self._utilization = self._make(Gauge, "sglang:utilization", "of rows or KV slots, whichever is fuller")
        tested = self._make(Gauge, "tracklayer:route_selftest_passed", "1: routes were checked at the start")
        tested.set(route_selftest == "passed")
        self._released = self._make(Gauge, "tracklayer:released_memory", "kinds of memory that are on loan, 0 to 3")
        self._last_token: dict[str, float] = {}
        self._totals = [0, 0]  # prompt tokens, of these cached

    def _make(self, kind: type, name: str, text: str, buckets: tuple[float, ...] | None = None) -> Any:
        extra = {"buckets": buckets} if buckets else {}
        return kind(name, text, list(self._label), registry=self.registry, **extra).labels(**self._label)

    def progressed(self, sample: Sample, new_tokens: int) -> None:
        if not new_tokens:
            return
        now = time.perf_counter()
        self._generation.inc(new_tokens)
        before = self._last_token.get(sample.rid)
        if before is None:
            self._ttft.observe(now - sample.arrived)
        else:
            self._itl.observe((now - before) / new_tokens)
        self._last_token[sample.rid] = now

    def finished(self, sample: Sample) -> None:
        self._last_token.pop(sample.rid, None)
        self._requests.inc()
        self._prompt.inc(sample.prompt_tokens)
        self._cached.inc(sample.cached_tokens)
        self._totals[0] += sample.prompt_tokens
        self._totals[1] += sample.cached_tokens
        if sample.finish is not None and sample.finish.type == "abort":
            self._aborted.inc()
        self._queue.observe(sample.queue_s)
        if sample.ended_at is not None:
            self._e2e.observe(sample.ended_at - sample.arrived)

    def routes_sent(self, routes: Routes) -> None:
        self._rows.inc(len(routes))
        self._bytes.inc(routes.nbytes)

    def text(self, loads: dict[str, Any]) -> bytes:
        """The exposition text; `loads` is what the engine says of this moment."""
        for name, (key, _) in GAUGES.items():
            self._gauges[name].set(loads.get(key, 0))
        self._hit_rate.set(self._totals[1] / max(1, self._totals[0]))
        rows = loads.get("num_running_reqs", 0) / max(1, loads.get("max_running_requests", 1))
        self._utilization.set(max(rows, loads.get("token_usage", 0)))
        self._released.set(len(loads.get("released_memory", ())))
        return bytes(generate_latest(self.registry))
