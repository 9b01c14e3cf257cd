"""Reply bodies in the forms of OpenAI, streams included, and of vLLM's token endpoint."""

from __future__ import annotations

from typing import Any, Literal

from tracklayer.server.reply_bodies import MetaInfo, PackedRoutes, Reply, Usage, VersionSpan


class Metadata(Reply):
    weight_version: str
    weight_versions: list[VersionSpan]


class Extension(Reply):
    """sglext: of the first choice."""

    routed_experts: str | PackedRoutes | None = None
    routed_experts_start_len: int | None = None
    input_ids: list[int] | None = None
    output_ids: list[int] | None = None


class CompletionLogprobs(Reply):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str | None]
    top_logprobs: list[dict[str, float | None] | None]


class CompletionChoice(Reply):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "abort"] | None
    matched_stop: int | str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(Reply):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    metadata: Metadata
    sglext: Extension | None = None


class CompletionChunk(Reply):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    sglext: Extension | None = None


class TokenLogprob(Reply):
    token: str
    bytes: list[int]
    logprob: float


class ChosenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Reply):
    content: list[ChosenLogprob]


class Message(Reply):
    role: Literal["assistant"]
    content: str
    reasoning_content: str | None
    tool_calls: list[dict[str, Any]] | None


class ChatChoice(Reply):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "abort", "tool_calls"] | None
    matched_stop: int | str | None
    meta_info: MetaInfo | None = None
    response_token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class ChatCompletion(Reply):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metadata: Metadata
    sglext: Extension | None = None


class Delta(Reply):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatDelta(Reply):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "abort", "tool_calls"] | None
    matched_stop: int | str | None


class ChatChunk(Reply):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatDelta]
    usage: Usage | None = None
    sglext: Extension | None = None


class InferenceChoice(Reply):
    index: int
    token_ids: list[int]
    finish_reason: Literal["stop", "length", "abort"] | None
    logprobs: ChatLogprobs | None
    routed_experts: str | None


class Inference(Reply):
    """vLLM's; `routed_experts`: base64 of a .npy file."""

    request_id: str
    choices: list[InferenceChoice]
    prompt_logprobs: None
    kv_transfer_params: None
    usage: Usage


class Card(Reply):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class Cards(Reply):
    object: Literal["list"]
    data: list[Card]
