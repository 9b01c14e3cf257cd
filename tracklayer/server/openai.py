"""What the two OpenAI endpoints share: sampling parameters, usage, finish reasons, log-probabilities, metadata."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from fastapi import Request

from tracklayer.engine.reply import meta_info
from tracklayer.engine.sample import Sample, Triple
from tracklayer.errors import UserError
from tracklayer.server.errors import SchemaError
from tracklayer.server.io import event
from tracklayer.server.native import refuse_unavailable
from tracklayer.server.protocol import OpenAIBody
from tracklayer.server.service import Service, route_format

B = TypeVar("B", bound=OpenAIBody)

UNDER_EVERYTHING = -9999.0  # how OpenAI writes the log-probability of what can not happen

# our name -> name in the body, where they differ
RENAMED = {"min_new_tokens": "min_tokens", "sampling_seed": "seed"}
PASSED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "ignore_eos",
    "no_stop_trim",
    "skip_special_tokens",
    "logit_bias",
    "regex",
    "ebnf",
    "json_schema",
    "custom_params",
)


def require_json(request: Request) -> None:
    """OpenAI's endpoints take application/json alone. Raises SchemaError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise SchemaError(f"Content-Type must be application/json, got {kind or 'none'}")


def sampling_of(body: OpenAIBody) -> dict[str, Any]:
    """sampling_params of the body, only what it says; the response format becomes a grammar."""
    refuse_unavailable(body)
    params = {name: getattr(body, name) for name in PASSED if getattr(body, name) is not None}
    params |= {ours: getattr(body, name) for ours, name in RENAMED.items() if getattr(body, name) is not None}
    kind = (body.response_format or {}).get("type", "text")
    if kind == "json_object":
        params["json_schema"] = '{"type": "object"}'
    elif kind == "json_schema":
        schema = (body.response_format or {}).get("json_schema")
        if not isinstance(schema, dict) or "schema" not in schema:
            raise UserError("response_format.json_schema must hold name and schema")
        params["json_schema"] = json.dumps(schema["schema"])
    elif kind == "structural_tag":
        params["structural_tag"] = json.dumps(body.response_format)
    elif kind != "text":
        raise UserError(f"response_format.type {kind!r} is not known: text, json_object, json_schema or structural_tag")
    return params


def call_fields(body: OpenAIBody, request: Request, service: Service) -> dict[str, Any]:
    """Fields of GenerateCall that are not sampling: identity, cache namespace, routes."""
    rank = request.headers.get("x-data-parallel-rank")
    if rank not in (None, "0"):
        raise UserError(f"X-Data-Parallel-Rank must be 0: there is one replica, got {rank!r}")
    names = (
        "rid",
        "priority",
        "extra_key",
        "cache_salt",
        "return_routed_experts",
        "routed_experts_start_len",
        "stream",
    )
    by_default = {"return_routed_experts": service.config.return_routed_experts_by_default}
    return by_default | {name: value for name in names if (value := getattr(body, name)) is not None}


def wants_usage(body: OpenAIBody, service: Service) -> tuple[bool, bool]:
    """(a usage chunk at the end, usage in every chunk) of a stream."""
    options = body.stream_options
    last = options.include_usage if options else None
    if last is None:
        last = service.config.stream_response_default_include_usage
    return bool(last), bool(options and options.continuous_usage_stats)


def usage(samples: Iterable[Sample], n: int, service: Service, reasoning: int = 0) -> dict[str, Any]:
    """Token counts; a prompt counts once for its n samples. reasoning: how many output tokens are."""
    samples = list(samples)
    prompt = sum(s.prompt_tokens for s in samples[::n])
    completion = sum(len(s.output_ids) for s in samples)
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "reasoning_tokens": reasoning,
    }
    if service.config.enable_cache_report:
        counts["prompt_tokens_details"] = {"cached_tokens": sum(s.cached_tokens for s in samples[::n])}
    return counts


def finish_reason(sample: Sample) -> str | None:
    return sample.finish.type if sample.finish else None


def matched_stop(sample: Sample) -> int | str | None:
    return sample.finish.matched if sample.finish else None


def metadata(sample: Sample, service: Service) -> dict[str, Any]:
    meta = meta_info(sample, service.frontend.weight_version)
    return {"weight_version": meta["weight_version"], "weight_versions": meta.get("weight_versions", [])}


def sglext(sample: Sample, body: OpenAIBody, service: Service) -> dict[str, Any] | None:
    """The response-level extension object: routes (and ids, where asked) of the first choice; None if empty."""
    found: dict[str, Any] = {}
    if sample.routes is not None:
        found["routed_experts"] = service.wire_routes(sample.routes, route_format(body.routed_experts_format))
        if sample.request.routed_experts_start_len:
            found["routed_experts_start_len"] = sample.request.routed_experts_start_len
    if getattr(body, "return_input_ids_in_sglext", None):
        found["input_ids"] = sample.request.input_ids
    if getattr(body, "return_output_ids_in_sglext", None):
        found["output_ids"] = sample.output_ids
    return found or None


def whole(
    kind: str,
    body: OpenAIBody,
    samples: list[Sample],
    choices: list[dict[str, Any]],
    service: Service,
    *,
    reasoning: int = 0,
    extended: bool = True,
) -> dict[str, Any]:
    """A reply that is no stream. `extended` False: the choices themselves hold what the extension object would."""
    first = samples[0]
    extra = sglext(first, body, service) if extended else None
    return {
        **head(kind, body.model, first.rid),
        "choices": choices,
        "usage": usage(samples, first.request.sampling.n, service, reasoning),
        "metadata": metadata(first, service),
        **({"sglext": extra} if extra else {}),
    }


def completion_logprobs(
    chosen: Sequence[Triple], top: Sequence[Sequence[Triple] | None], *, with_top: bool
) -> dict[str, Any]:
    """logprobs of /v1/completions from [log-probability, id, text] triples."""
    return {
        "text_offset": [-1] * len(chosen),
        "token_logprobs": [p for p, _, _ in chosen],
        "tokens": [text for _, _, text in chosen],
        "top_logprobs": [
            None if best is None else {text: p for p, _, text in reversed(best)}  # of equal texts the best stays
            for best in top
        ]
        if with_top
        else [None] * len(chosen),
    }


def chat_logprobs(chosen: Sequence[Triple], top: Sequence[Sequence[Triple]]) -> dict[str, Any]:
    """logprobs of /v1/chat/completions."""
    best: list[Sequence[Triple]] = list(top) if top else [[]] * len(chosen)
    return {
        "content": [{**_entry(c), "top_logprobs": [_entry(t) for t in b]} for c, b in zip(chosen, best, strict=True)]
    }


def _entry(triple: Triple) -> dict[str, Any]:
    logprob, _, text = triple
    return {
        "token": text or "",
        "bytes": list((text or "").encode()),
        "logprob": UNDER_EVERYTHING if logprob is None else logprob,
    }


def unasked(sample: Sample, body: OpenAIBody, service: Service) -> dict[str, Any]:
    """Routes by default ride on the first choice's end: clients that asked for nothing stumble over empty choices."""
    if sample.index or sample.finish is None or _asked_for_sglext(body):
        return {}
    extra = sglext(sample, body, service)
    return {"sglext": extra} if extra else {}


def _asked_for_sglext(body: OpenAIBody) -> bool:
    names = ("return_routed_experts", "return_input_ids_in_sglext", "return_output_ids_in_sglext")
    return any(getattr(body, name, None) for name in names)


def closing(
    base: dict[str, Any], samples: dict[int, Sample], body: OpenAIBody, service: Service, reasoning: int = 0
) -> Iterator[dict[str, Any]]:
    """The last chunks of a stream, without choices: the extension object, then usage, each where asked."""
    first = samples[0]
    extra = sglext(first, body, service) if _asked_for_sglext(body) else None
    if extra:
        yield {**base, "choices": [], "sglext": extra}
    if wants_usage(body, service)[0]:
        in_order = [samples[i] for i in sorted(samples)]
        yield {**base, "choices": [], "usage": usage(in_order, first.request.sampling.n, service, reasoning)}


def head(kind: str, model: str, rid: str) -> dict[str, Any]:
    """The keys that every OpenAI object begins with."""
    return {"id": rid, "object": kind, "created": int(time.time()), "model": model}


class OpenAIEvents(Generic[B]):
    """The events of a stream of `kind`: a choice each, then the extension object and usage where asked."""

    kind: str

    def __init__(self, service: Service, body: B) -> None:
        self.service, self.body = service, body
        self._every_usage = wants_usage(body, service)[1]
        self._samples: dict[int, Sample] = {}
        self._base: dict[str, Any] = {}

    def choice(self, sample: Sample, choice: dict[str, Any], *, extended: bool) -> bytes:
        """One event with one choice; `extended`: with what is told without being asked for."""
        self._base = self._base or head(self.kind, self.body.model, sample.rid)
        self._samples[sample.index] = sample
        chunk = {**self._base, "choices": [choice]}
        if extended:
            chunk |= unasked(sample, self.body, self.service)
        if self._every_usage:
            chunk["usage"] = usage([sample], 1, self.service, self.reasoning_tokens(sample))
        return event(chunk)

    def reasoning_tokens(self, sample: Sample) -> int:
        return 0

    def closing(self) -> bytes:
        reasoning = sum(self.reasoning_tokens(sample) for sample in self._samples.values())
        return b"".join(map(event, closing(self._base, self._samples, self.body, self.service, reasoning)))
