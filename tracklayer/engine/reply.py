"""A Sample as the dict that SGLang's /generate answers; routes stay a `Routes` object for the caller to encode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tracklayer.engine.sample import Sample
from tracklayer.types import FinishReason


@dataclass(slots=True)
class Shown:
    """How much of a sample an incremental stream has sent already: characters and tokens."""

    characters: int = 0
    tokens: int = 0


def finish_json(reason: FinishReason | None) -> dict[str, Any] | None:
    """finish_reason in SGLang's shape."""
    if reason is None:
        return None
    if reason.type == "stop":
        return {"type": "stop", "matched": reason.matched}
    if reason.type == "length":
        return {"type": "length", "length": reason.length}
    kinds = {400: "BadRequestError", 500: "InternalServerError", 503: "ServiceUnavailableError"}
    return {
        "type": "abort",
        "message": reason.message or "Aborted",
        "status_code": reason.status,
        "err_type": kinds.get(reason.status) if reason.status else None,
    }


def reply(
    sample: Sample, weight_version: str, *, prompt_ids: bool = False, shown: Shown | None = None
) -> dict[str, Any]:
    """The sample as known now: cumulative, or, with `shown`, only what is new since the last call (and updates it).

    `weight_version` is what to say before the engine has said which weights made the output.
    """
    text, count = sample.text, len(sample.output_ids)
    first, start = (shown.characters, shown.tokens) if shown else (0, 0)
    answer: dict[str, Any] = {} if text is None else {"text": text[first:]}
    answer["output_ids"] = sample.output_ids[start:]
    answer["meta_info"] = meta_info(sample, weight_version, start)
    if prompt_ids:
        answer["prompt_token_ids"] = list(sample.request.input_ids)
    if shown is not None:
        shown.characters, shown.tokens = len(text or ""), count
    return answer


def meta_info(sample: Sample, weight_version: str, start: int = 0) -> dict[str, Any]:
    """meta_info of a sample; `start`: first output token whose log-probabilities are listed."""
    request, spans = sample.request, sample.weight_spans
    meta: dict[str, Any] = {
        "id": sample.rid,
        "finish_reason": finish_json(sample.finish),
        "prompt_tokens": sample.prompt_tokens,
        "completion_tokens": len(sample.output_ids),
        "cached_tokens": sample.cached_tokens,
        "reasoning_tokens": 0,
        "num_retractions": sample.num_retractions,
        "weight_version": spans[-1][0] if spans else weight_version,
    }
    if request.return_logprob:
        meta["input_token_logprobs"] = sample.input_logprobs
        meta["output_token_logprobs"] = sample.output_logprobs[start:]
        meta["output_token_logprobs_length"] = len(sample.output_logprobs)
    if request.top_logprobs_num:
        meta["input_top_logprobs"] = sample.input_top
        meta["output_top_logprobs"] = sample.output_top[start:]
    if request.token_ids_logprob:
        meta["input_token_ids_logprobs"] = sample.input_given
        meta["output_token_ids_logprobs"] = sample.output_given[start:]
    if sample.finish is not None and sample.ended_at is not None:
        meta["weight_versions"] = [{"version": v, "start": a, "end": b} for v, a, b in spans]
        meta["e2e_latency"] = sample.ended_at - sample.arrived
        if sample.routes is not None:
            meta["routed_experts"] = sample.routes
            if request.routed_experts_start_len:
                meta["routed_experts_start_len"] = request.routed_experts_start_len
    return meta
