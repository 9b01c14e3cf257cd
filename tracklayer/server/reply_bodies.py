"""Reply bodies as the OpenAPI document declares them and the tests check them. Replies are built as plain dicts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Triple = tuple[float | None, int, str | None]


class Reply(BaseModel):
    """No key that is not named here."""

    model_config = ConfigDict(strict=True, extra="forbid")


class OpenReply(BaseModel):
    """The keys that clients rely on; more may come with them."""

    model_config = ConfigDict(strict=True, extra="allow")


class FinishReason(Reply):
    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None
    status_code: int | None = None
    err_type: str | None = None


class VersionSpan(Reply):
    version: str
    start: int
    end: int


class PackedRoutes(Reply):
    """routed_experts_format: packed. `data`: base64 of a C-contiguous array."""

    format: str
    dtype: str
    shape: list[int]
    start: int
    layer_ids: list[int]
    num_experts: int
    layer_top_k: list[int] | None = None
    data: str


class MetaInfo(Reply):
    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    num_retractions: int
    weight_version: str
    weight_versions: list[VersionSpan] | None = None
    e2e_latency: float | None = None
    input_token_logprobs: list[Triple] | None = None
    output_token_logprobs: list[Triple] | None = None
    output_token_logprobs_length: int | None = None
    input_top_logprobs: list[list[Triple] | None] | None = None
    output_top_logprobs: list[list[Triple] | None] | None = None
    input_token_ids_logprobs: list[list[Triple] | None] | None = None
    output_token_ids_logprobs: list[list[Triple] | None] | None = None
    routed_experts: str | PackedRoutes | None = None
    routed_experts_start_len: int | None = None


class Generated(Reply):
    """One sample of /generate; `text` is absent without a tokenizer."""

    text: str | None = None
    output_ids: list[int]
    prompt_token_ids: list[int] | None = None
    meta_info: MetaInfo


class GeneratedChunk(Generated):
    """An event of a /generate stream; `index` where there are several samples."""

    index: int | None = None


class CachedTokens(Reply):
    cached_tokens: int


class Usage(Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    reasoning_tokens: int
    prompt_tokens_details: CachedTokens | None = None


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


class Tokens(Reply):
    tokens: list[int] | list[list[int]]
    count: int | list[int]
    max_model_len: int


class Text(Reply):
    text: str | list[str]
    prompt: str | list[str]


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


class Done(Reply):
    message: str
    status: Literal["ok"]


class Status(Reply):
    status: Literal["paused", "resumed"]


class IsPaused(Reply):
    is_paused: bool


class IsSleeping(Reply):
    is_sleeping: bool


class WorldSize(Reply):
    world_size: int


class Outcome(OpenReply):
    success: bool
    message: str


class Version(Reply):
    weight_version: str


class ModelInfo(OpenReply):
    model_path: str
    served_model_name: str
    tokenizer_path: str
    is_generation: bool
    weight_version: str
    model_type: str
    architectures: list[str]


class ServerInfo(OpenReply):
    model_path: str
    served_model_name: str
    tp_size: int
    dp_size: int
    pp_size: int
    ep_size: int
    enable_return_routed_experts: bool
    max_total_num_tokens: int
    max_req_input_len: int
    version: str
    internal_states: list[dict[str, Any]]


class Load(OpenReply):
    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    gen_throughput: float


class Loads(Reply):
    timestamp: float
    version: str
    loads: list[Load]


class OldLoad(Reply):
    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int


class ExpertCounts(Reply):
    layer_ids: list[int]
    num_experts: int
    rows: int
    counts: list[list[int]]


class FlatError(Reply):
    """SGLang's body for wrong types, and OpenAI's for everything."""

    object: Literal["error"]
    message: str
    type: str
    param: None
    code: int


class ErrorMessage(Reply):
    """`type`, `param` and `code` are there where a model was not found."""

    message: str
    type: str | None = None
    param: str | None = None
    code: str | None = None


class ErrorBody(Reply):
    """`error` is text for unknown sampling parameters and for missing or wrong keys."""

    error: str | ErrorMessage


class StreamFault(Reply):
    message: str
    type: str
    code: int
    retryable: bool


class StreamError(Reply):
    """The event of an error after the first byte."""

    error: StreamFault | FlatError
