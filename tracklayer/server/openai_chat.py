"""POST /v1/chat/completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tracklayer.engine.intake import GenerateCall
from tracklayer.engine.reply import meta_info
from tracklayer.engine.sample import Sample
from tracklayer.errors import UserError
from tracklayer.server import openai
from tracklayer.server.chat_reply import ReplyReader, reply_params
from tracklayer.server.docs import body_of
from tracklayer.server.io import DirectRoute, answer, read_body, unless_gone
from tracklayer.server.protocol import ChatBody
from tracklayer.server.push import EventStream
from tracklayer.server.service import Service, route_format, service_of
from tracklayer.types import GRAMMARS

router = APIRouter(route_class=DirectRoute)
OBJECT, CHUNK = "chat.completion", "chat.completion.chunk"
NOT_STREAMED = ("return_meta_info", "return_token_ids", "return_prompt_token_ids")


def to_call(body: ChatBody, request: Request, service: Service) -> GenerateCall:
    """The call of a chat body: its messages through the template, or its input_ids as they are."""
    route_format(body.routed_experts_format)
    if body.stream:
        for name in NOT_STREAMED:
            if getattr(body, name):
                raise UserError(f"{name} can not be combined with stream: true")
    asked, needed = openai.sampling_of(body), reply_params(body, service)
    both = [name for name in GRAMMARS if asked.get(name) and "json_schema" in needed]
    if both:
        raise UserError(f"tool_choice {body.tool_choice!r:.80} and {both[0]} (or response_format) exclude each other")
    params = {**service.chat_defaults, **asked, **needed}
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if limit is not None and limit < 1:
        raise UserError(f"max_completion_tokens must be at least 1, got {limit}")
    params["max_new_tokens"] = limit
    fields = openai.call_fields(body, request, service)
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= 20:
        raise UserError(f"top_logprobs must be in 0..20, got {body.top_logprobs}")
    if body.logprobs:
        fields |= {"return_logprob": True, "return_text_in_logprobs": True}
        fields["top_logprobs_num"] = body.top_logprobs or 0
    ids = body.input_ids if body.input_ids is not None else _render(body, service)
    return GenerateCall(input_ids=ids, sampling_params=params, **fields)


def _render(body: ChatBody, service: Service) -> list[int]:
    arguments = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", body.reasoning_effort)
    return service.tokenizer().chat_ids(
        body.messages,
        tools=body.tools if body.tool_choice != "none" else None,
        continue_final_message=bool(body.continue_final_message),
        template_arguments=arguments,
    )


@router.post("/v1/chat/completions", openapi_extra=body_of(ChatBody), tags=["openai"])
async def chat(request: Request) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    openai.require_json(request)
    body = await read_body(request, ChatBody, limit_bytes=service.config.max_body_bytes)
    call = to_call(body, request, service)
    if call.stream:
        running = await service.frontend.start(call)
        return EventStream(service.frontend, running, ChatEvents(service, body), request.url.path)
    samples = await unless_gone(request, service.frontend.generate(call))
    readers = [ReplyReader(body, service, s.request) for s in samples]
    choices = [_choice(service, s, body, reader) for s, reader in zip(samples, readers, strict=True)]
    reasoning = sum(r.reasoning_tokens(s.output_ids) for r, s in zip(readers, samples, strict=True))
    extended = not body.return_meta_info  # then the routes are in each choice's meta_info
    return answer(openai.whole(OBJECT, body, samples, choices, service, reasoning=reasoning, extended=extended))


def _choice(service: Service, sample: Sample, body: ChatBody, reader: ReplyReader) -> dict[str, Any]:
    part = reader.read(sample.text or "", last=True)
    choice: dict[str, Any] = {
        "index": sample.index,
        "message": {
            "role": "assistant",
            "content": part.content,
            "reasoning_content": part.reasoning or None,
            "tool_calls": [call.wire() for call in part.calls] or None,
        },
        "logprobs": openai.chat_logprobs(sample.output_logprobs, sample.output_top) if body.logprobs else None,
        "finish_reason": _finish_reason(sample, reader),
        "matched_stop": openai.matched_stop(sample),
    }
    if body.return_meta_info:
        meta = meta_info(sample, service.frontend.weight_version)
        meta["reasoning_tokens"] = reader.reasoning_tokens(sample.output_ids)
        if "routed_experts" in meta:
            form = route_format(body.routed_experts_format)
            meta["routed_experts"] = service.wire_routes(meta["routed_experts"], form)
        choice["meta_info"] = meta
    if body.return_token_ids:
        choice["response_token_ids"] = sample.output_ids
    if body.return_prompt_token_ids:
        choice["prompt_token_ids"] = sample.request.input_ids
    return choice


def _finish_reason(sample: Sample, reader: ReplyReader) -> str | None:
    reason = openai.finish_reason(sample)
    return "tool_calls" if reason == "stop" and reader.num_calls else reason


@dataclass(slots=True)
class Told:
    """What a stream has told of one sample."""

    reader: ReplyReader
    tokens: int = 0


def _delta(
    index: int, content: str | None = None, *, reasoning: str | None = None, role: str | None = None
) -> dict[str, Any]:
    told = content is not None or reasoning is not None
    delta: dict[str, Any] = {"content": content, "reasoning_content": reasoning} if told else {}
    if role is not None:
        delta["role"] = role
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, "matched_stop": None}


class ChatEvents(openai.OpenAIEvents[ChatBody]):
    """Role, content deltas and an end for each index."""

    kind = CHUNK

    def __init__(self, service: Service, body: ChatBody) -> None:
        super().__init__(service, body)
        self._told: dict[int, Told] = {}

    def news(self, sample: Sample) -> bytes:
        parts = []
        if (told := self._told.get(sample.index)) is None:
            told = self._told[sample.index] = Told(ReplyReader(self.body, self.service, sample.request))
            parts.append(_delta(sample.index, "", role="assistant"))
        parts += _parts(sample, self.body, told)
        return b"".join(self.choice(sample, part, extended=part["finish_reason"] is not None) for part in parts)

    def reasoning_tokens(self, sample: Sample) -> int:
        return self._told[sample.index].reader.reasoning_tokens(sample.output_ids)


def _parts(sample: Sample, body: ChatBody, told: Told) -> list[dict[str, Any]]:
    """The choices to send for a sample's news: reasoning, content, calls, and the end."""
    index, count, reader = sample.index, len(sample.output_ids), told.reader
    news = reader.read(sample.text or "", last=sample.finish is not None)
    parts = [_delta(index, reasoning=news.reasoning)] if news.reasoning else []
    parts += [_delta(index, news.content)] if news.content else []
    number = reader.num_calls - 1 - sum(call.name is not None for call in news.calls)
    for call in news.calls:
        number += call.name is not None
        parts.append(_delta(index))
        parts[-1]["delta"] = {"tool_calls": [call.wire(number)]}
    if body.logprobs and count > told.tokens:
        parts = parts or [_delta(index, "")]
        new = slice(told.tokens, count)
        parts[0]["logprobs"] = openai.chat_logprobs(sample.output_logprobs[new], sample.output_top[new])
        told.tokens = count
    if sample.finish is not None:
        end = _delta(index)
        end["finish_reason"], end["matched_stop"] = _finish_reason(sample, reader), openai.matched_stop(sample)
        parts.append(end)
    return parts
