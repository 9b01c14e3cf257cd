"""POST /inference/v1/generate: vLLM's token-in, token-out interface, with routes where vLLM puts them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tracklayer.engine.intake import GenerateCall
from tracklayer.engine.sample import Sample, Triple
from tracklayer.errors import UserError
from tracklayer.server import openai
from tracklayer.server.docs import body_of
from tracklayer.server.io import answer, read_body, unless_gone
from tracklayer.server.native import refuse_unavailable
from tracklayer.server.protocol import InferenceBody
from tracklayer.server.service import Service, service_of

router = APIRouter(tags=["vllm"])

# vLLM's sampling parameter -> ours, where the names differ
RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
SAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "logit_bias",
)  # fmt: skip
OTHERWISE_READ = ("logprobs", "prompt_logprobs", "routed_experts_prompt_start")
IGNORED = (
    "detokenize",
    "output_kind",
    "include_stop_str_in_output",
    "extra_args",
    "skip_clone",
)


def to_call(body: InferenceBody, service: Service) -> GenerateCall:
    """The call of the body. Raises UserError for a sampling parameter that would be dropped in silence."""
    if body.stream:
        raise UserError("this endpoint does not stream: set stream to false, or use /generate")
    refuse_unavailable(body)
    given = {key: value for key, value in (body.sampling_params or {}).items() if value is not None}
    known = (*RENAMED, *SAME, *OTHERWISE_READ, *IGNORED)
    for key, value in given.items():
        if key not in known and value not in (False, [], {}):
            raise UserError(f"sampling_params.{key} is not available here; known: {', '.join(sorted(known))}")
    params = {name: given[name] for name in SAME if name in given}
    params |= {ours: given[name] for name, ours in RENAMED.items() if name in given}
    params.setdefault("max_new_tokens", 16)
    if params.get("top_k") == 0:  # vLLM's word for all
        params["top_k"] = -1
    logprobs, start = given.get("logprobs"), given.get("routed_experts_prompt_start", 0)
    for name, value in (("logprobs", logprobs or 0), ("routed_experts_prompt_start", start)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UserError(f"sampling_params.{name} must be 0 or more, got {value!r}")
    return GenerateCall(
        input_ids=body.token_ids,
        sampling_params=params,
        rid=body.request_id,
        priority=body.priority,
        cache_salt=body.cache_salt,
        return_logprob=logprobs is not None,
        top_logprobs_num=logprobs or 0,
        return_routed_experts=service.info.recording,
        routed_experts_start_len=start if service.info.recording else 0,
    )


@router.post("/inference/v1/generate", openapi_extra=body_of(InferenceBody))
async def generate(request: Request) -> Response:
    """Generate from token ids; routes come with every choice when the server records them."""
    service = service_of(request)
    body = await read_body(request, InferenceBody, limit_bytes=service.config.max_body_bytes)
    call = to_call(body, service)
    samples = await unless_gone(request, service.frontend.generate(call))
    return answer(
        {
            "request_id": body.request_id or samples[0].rid,
            "choices": [_choice(service, sample, call) for sample in samples],
            "prompt_logprobs": None,
            "kv_transfer_params": None,
            "usage": openai.usage(samples, len(samples), service),
        }
    )


def _choice(service: Service, sample: Sample, call: GenerateCall) -> dict[str, Any]:
    routes = sample.routes if sample.routes is not None and len(sample.routes) else None
    return {
        "index": sample.index,
        "token_ids": sample.output_ids,
        "finish_reason": openai.finish_reason(sample),
        "logprobs": _logprobs(sample) if call.return_logprob else None,
        "routed_experts": service.wire_routes(routes, "npy") if routes is not None else None,
    }


def _logprobs(sample: Sample) -> dict[str, Any]:
    """As chat's, with token ids for names: there is no text here."""

    def named(triple: Triple) -> Triple:
        return [triple[0], triple[1], f"token_id:{triple[1]}"]

    top = [[named(t) for t in best] for best in sample.output_top]
    return openai.chat_logprobs([named(t) for t in sample.output_logprobs], top)
