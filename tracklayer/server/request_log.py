"""--log-requests: one line when a request comes and one when it ends, as key=value pairs that begin with its id."""

from __future__ import annotations

import json
import logging

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
        parts = [f"rid={sample.rid}", "event=submitted", f"prompt_tokens={sample.prompt_tokens}"]
        if request.return_routed_experts:
            parts.append(f"routes_from={request.routed_experts_start_len}")
        if self._level >= 1:
            params = request.sampling
            default = type(params)()
            changed = {
                name: value
                for name in type(params).__dataclass_fields__
                if (value := getattr(params, name)) != getattr(default, name)
            }
            parts.append(f"sampling={json.dumps(changed, default=str)}")
        log.info(" ".join(parts))

    def finished(self, sample: Sample) -> None:
        reason = sample.finish.type if sample.finish else None
        parts = [f"rid={sample.rid}", "event=finished", f"reason={reason}", f"output_tokens={len(sample.output_ids)}"]
        parts.append(f"cached_tokens={sample.cached_tokens}")
        if sample.first_token_at is not None:
            parts.append(f"first_token_s={sample.first_token_at - sample.arrived:.4f}")
        if sample.ended_at is not None:
            parts.append(f"total_s={sample.ended_at - sample.arrived:.4f}")
        if sample.routes is not None:
            parts.append(f"route_rows={len(sample.routes)}")
        if sample.error is not None:
            parts.append(f"error={json.dumps(str(sample.error))}")
        if self._level >= 2 and sample.text:
            parts.append(f"text={json.dumps(sample.text[:SHOWN_CHARACTERS], ensure_ascii=False)}")
        log.info(" ".join(parts))


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
