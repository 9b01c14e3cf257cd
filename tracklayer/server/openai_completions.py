"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tracklayer.engine.intake import GenerateCall
from tracklayer.engine.reply import Shown
from tracklayer.engine.sample import Sample, Triple
from tracklayer.errors import UserError
from tracklayer.server import openai
from tracklayer.server.docs import body_of
from tracklayer.server.io import DirectRoute, answer, read_body, unless_gone
from tracklayer.server.protocol import CompletionBody
from tracklayer.server.push import EventStream
from tracklayer.server.service import Service, route_format, service_of

router = APIRouter(route_class=DirectRoute)
OBJECT = "text_completion"


def to_call(body: CompletionBody, request: Request, service: Service) -> GenerateCall:
    """The call of a /v1/completions body."""
    route_format(body.routed_experts_format)
    params = openai.sampling_of(body)
    params["max_new_tokens"] = 16 if body.max_tokens is None else body.max_tokens
    if params["max_new_tokens"] < 1:
        raise UserError(f"max_tokens must be at least 1, got {body.max_tokens}")
    if body.best_of is not None and body.best_of > (body.n or 1):
        raise UserError(f"best_of {body.best_of} is more than n {body.n or 1}: every sample is returned; use n")
    fields = openai.call_fields(body, request, service)
    if body.logprobs is not None:
        if body.logprobs < 0:
            raise UserError(f"logprobs must be 0 or more, got {body.logprobs}")
        fields |= {"return_logprob": True, "top_logprobs_num": body.logprobs, "return_text_in_logprobs": True}
        fields["logprob_start_len"] = 0 if body.echo else -1
    prompt = body.prompt
    tokens = isinstance(prompt, list) and (not prompt or not isinstance(prompt[0], str))
    fields["input_ids" if tokens else "text"] = prompt
    return GenerateCall(sampling_params=params, **fields)


@router.post("/v1/completions", openapi_extra=body_of(CompletionBody), tags=["openai"])
async def completions(request: Request) -> Response:
    """Complete text or token ids."""
    service = service_of(request)
    openai.require_json(request)
    body = await read_body(request, CompletionBody, limit_bytes=service.config.max_body_bytes)
    call = to_call(body, request, service)
    if call.stream:
        running = await service.frontend.start(call)
        return EventStream(service.frontend, running, CompletionEvents(service, body), request.url.path)
    samples = await unless_gone(request, service.frontend.generate(call))
    choices = [_choice(service, s, body, Shown()) for s in samples]
    return answer(openai.whole(OBJECT, body, samples, choices, service))


def _choice(service: Service, sample: Sample, body: CompletionBody, shown: Shown) -> dict[str, Any]:
    """A choice with what is new since `shown`, which moves on; echo and prompt ids come with the first part."""
    text, count, begins = sample.text or "", len(sample.output_ids), shown.tokens == 0 and shown.characters == 0
    part, start = text[shown.characters :], shown.tokens
    chosen = sample.output_logprobs[start:]
    top: list[list[Triple] | None] = [*sample.output_top[start:]]
    if body.echo and begins:
        part = _prompt_text(service, sample) + part
        chosen, top = [*sample.input_logprobs, *chosen], [*sample.input_top, *top]
    choice: dict[str, Any] = {
        "index": sample.index,
        "text": part,
        "logprobs": None,
        "finish_reason": openai.finish_reason(sample),
        "matched_stop": openai.matched_stop(sample),
    }
    if body.logprobs is not None:
        choice["logprobs"] = openai.completion_logprobs(chosen, top, with_top=body.logprobs > 0)
    if body.return_token_ids:
        choice["token_ids"] = sample.output_ids[start:]
        if begins:
            choice["prompt_token_ids"] = sample.request.input_ids
    shown.characters, shown.tokens = len(text), count
    return choice


def _prompt_text(service: Service, sample: Sample) -> str:
    tokenizer = service.frontend.tokenizer
    return tokenizer.decode(sample.request.input_ids) if tokenizer else ""


class CompletionEvents(openai.OpenAIEvents[CompletionBody]):
    """A choice's new part for each piece of news."""

    kind = OBJECT

    def __init__(self, service: Service, body: CompletionBody) -> None:
        super().__init__(service, body)
        self._shown: dict[int, Shown] = {}

    def news(self, sample: Sample) -> bytes:
        shown = self._shown.setdefault(sample.index, Shown())
        return self.choice(sample, _choice(self.service, sample, self.body, shown), extended=True)
