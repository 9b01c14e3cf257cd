"""--log-requests: one entry when a request comes and one when it ends; each names its request's id first."""

from __future__ import annotations

import json
import logging
from typing import Any

from tracklayer.engine.frontend import Observer
from tracklayer.engine.sample import Sample

log = logging.getLogger("tracklayer.requests")
SHOWN_CHARACTERS = 2000


class RequestLog(Observer):
    """level 0: sizes and times; 1: the sampling parameters that differ from the defaults too; 2: output text too."""

    def __init__(self, level: int) -> None:
        self._level = level

    def submitted(self, sample: Sample) -> None:
        request = sample.request
        fields: dict[str, Any] = {"rid": sample.rid, "event": "submitted", "prompt_tokens": sample.prompt_tokens}
        if request.return_routed_experts:
            fields["routes_from"] = request.routed_experts_start_len
        if self._level >= 1:
            params = request.sampling
            default = type(params)()
            fields["sampling"] = {
                name: value
                for name in type(params).__dataclass_fields__
                if (value := getattr(params, name)) != getattr(default, name)
            }
        _say(fields)

    def finished(self, sample: Sample) -> None:
        fields: dict[str, Any] = {
            "rid": sample.rid,
            "event": "finished",
            "reason": sample.finish.type if sample.finish else None,
            "output_tokens": len(sample.output_ids),
            "cached_tokens": sample.cached_tokens,
            "queue_s": round(sample.queue_s, 4),
        }
        if sample.first_token_at is not None:
            fields["first_token_s"] = round(sample.first_token_at - sample.arrived, 4)
        if sample.ended_at is not None:
            fields["total_s"] = round(sample.ended_at - sample.arrived, 4)
        if sample.routes is not None:
            fields["route_rows"] = len(sample.routes)
        if sample.error is not None:
            fields["error"] = str(sample.error)
        if self._level >= 2 and sample.text:
            fields["text"] = sample.text[:SHOWN_CHARACTERS]
        _say(fields)


def _say(fields: dict[str, Any]) -> None:
    """As key=value pairs for lines of text; whole for JSON lines."""
    log.info(" ".join(f"{name}={_shown(name, value)}" for name, value in fields.items()), extra={"fields": fields})


def _shown(name: str, value: Any) -> str:
    quoted = name in ("sampling", "error", "text")
    return json.dumps(value, default=str, ensure_ascii=False) if quoted else str(value)


class Observers(Observer):
    """Several observers as one."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def submitted(self, sample: Sample) -> None:
        for observer in self._observers:
            observer.submitted(sample)

    def progressed(self, sample: Sample, new_tokens: int) -> None:
        for observer in self._observers:
            observer.progressed(sample, new_tokens)

    def finished(self, sample: Sample) -> None:
        for observer in self._observers:
            observer.finished(sample)

    def close(self) -> None:
        for observer in self._observers:
            observer.close()
