"""Reply bodies as the OpenAPI document declares them and the tests check them: what all share, and /generate's.

Replies are built as plain dicts. Those in OpenAI's and vLLM's forms are in reply_openai.py, the others and errors in
reply_control.py.
"""

from __future__ import annotations

from typing import Literal

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
