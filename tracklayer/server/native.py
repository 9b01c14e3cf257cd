"""POST /generate: SGLang's native interface, and our own additions (routed_experts_format, msgpack replies)."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tracklayer.engine.intake import GenerateCall
from tracklayer.engine.reply import Shown, reply
from tracklayer.engine.sample import Sample
from tracklayer.errors import UserError
from tracklayer.server.docs import body_of
from tracklayer.server.io import DirectRoute, answer, event, read_body, unless_gone, wants_msgpack
from tracklayer.server.native_events import PlainEvents
from tracklayer.server.protocol import GenerateBody
from tracklayer.server.push import EventStream
from tracklayer.server.service import Service, route_format, service_of

log = logging.getLogger(__name__)
router = APIRouter(route_class=DirectRoute)

# Fields that must be absent, null or empty: what they ask for is not there.
NOT_HERE = {
    "input_embeds": "embeddings as input are not available: send text or input_ids",
    "image_data": "this model takes text only: leave image_data out",
    "video_data": "this model takes text only: leave video_data out",
    "audio_data": "this model takes text only: leave audio_data out",
    "lora_path": "adapters are not available: leave lora_path out",
    "session_params": "sessions are not available: leave session_params out",
    "custom_logit_processor": "custom logit processors are not available",
    "suffix": "completing in front of a suffix is not available: leave suffix out",
    "features": "this model takes text only: leave features out",
}


def refuse_unavailable(body: Any) -> None:
    """Raise UserError for what a request asks and this server has not, rather than dropping it in silence."""
    for name, message in NOT_HERE.items():
        if getattr(body, name, None):
            raise UserError(message)
    for name, value in (body.model_extra or {}).items():
        if name.startswith("return_") and value:
            raise UserError(f"{name} is not available in this server; leave it out")
    for name in ("routed_dp_rank", "data_parallel_rank"):
        rank = getattr(body, name, None)
        if rank is not None and rank != 0:
            raise UserError(f"{name} must be 0: there is one replica, got {rank}")


def to_call(body: GenerateBody, service: Service) -> GenerateCall:
    """The call of a /generate body."""
    refuse_unavailable(body)
    if body.return_routed_experts is None:
        body.return_routed_experts = service.config.return_routed_experts_by_default
    names = set(GenerateCall.__dataclass_fields__) & set(GenerateBody.model_fields)
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    return GenerateCall(**given)


def to_wire(service: Service, answer_dict: dict[str, Any], form: str, *, binary: bool = False) -> dict[str, Any]:
    """Encode the routes of a reply in place."""
    meta = answer_dict["meta_info"]
    if "routed_experts" in meta:
        meta["routed_experts"] = service.wire_routes(meta["routed_experts"], form, binary=binary)
    return answer_dict


@router.api_route("/generate", methods=["POST", "PUT"], openapi_extra=body_of(GenerateBody), tags=["generate"])
async def generate(request: Request) -> Response:
    """Generate from text or token ids; streams when asked."""
    service = service_of(request)
    body = await read_body(request, GenerateBody, limit_bytes=service.config.max_body_bytes)
    call, form, binary = to_call(body, service), route_format(body.routed_experts_format), wants_msgpack(request)
    if call.stream:
        running = await service.frontend.start(call)
        return EventStream(service.frontend, running, GenerateEvents(service, call, form), request.url.path)
    samples = await unless_gone(request, service.frontend.generate(call))
    answers = [to_wire(service, _reply(service, s, call), form, binary=binary) for s in samples]
    whole = answers if call.batched or len(answers) > 1 else answers[0]
    return answer(whole, binary=binary)


def _reply(service: Service, sample: Sample, call: GenerateCall, shown: Shown | None = None) -> dict[str, Any]:
    version = service.frontend.weight_version
    return reply(sample, version, prompt_ids=call.return_prompt_token_ids, shown=shown)


class GenerateEvents:
    """One event for each piece of news: everything so far, or with --incremental-streaming-output what is new."""

    def __init__(self, service: Service, call: GenerateCall, form: str) -> None:
        self._service, self._call, self._form = service, call, form
        self._incremental = service.config.incremental_streaming_output
        self._shown: dict[int, Shown] = {}
        self._plain: dict[int, PlainEvents] = {}

    def news(self, sample: Sample) -> bytes:
        service, call, at = self._service, self._call, sample.index
        if sample.finish is None and (kept := self._plain.get(at)) is not None:
            return kept.event(sample, service.frontend.weight_version)
        indexed = call.batched or sample.request.sampling.n > 1
        if sample.finish is None and not self._incremental and PlainEvents.fits(call, sample):
            kept = self._plain[at] = PlainEvents(sample, indexed=indexed)
            return kept.event(sample, service.frontend.weight_version)
        part = self._shown.setdefault(at, Shown()) if self._incremental else None
        answered = to_wire(service, _reply(service, sample, call, part), self._form)
        if indexed:
            answered["index"] = at
        return event(answered)

    def closing(self) -> bytes:
        return b""
