"""Sums since start, for /metrics and the log."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """route_rows, route_bytes: returned. incomplete_rows: (token, layer) rows that no router had written.

    gather_s: host seconds spent bringing route rows home. route_wait_s: seconds that ended requests waited for theirs.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    retractions: int = 0
    steps: int = 0
    route_rows: int = 0
    route_bytes: int = 0
    incomplete_rows: int = 0
    gather_s: float = 0.0
    route_wait_s: float = 0.0
