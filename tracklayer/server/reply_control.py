"""Reply bodies of what says or changes the server's state, of the tokenizer's endpoints, and of errors."""

from __future__ import annotations

from typing import Any, Literal

from tracklayer.server.reply_bodies import OpenReply, Reply


class Tokens(Reply):
    tokens: list[int] | list[list[int]]
    count: int | list[int]
    max_model_len: int


class Text(Reply):
    text: str | list[str]
    prompt: str | list[str]


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
