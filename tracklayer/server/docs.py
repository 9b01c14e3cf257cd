"""The OpenAPI document. Endpoints read raw bodies and answer raw replies (own limits, own errors): tell it of both."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from pydantic import TypeAdapter
from starlette.types import Receive, Scope, Send

from tracklayer.server import reply_bodies as replies
from tracklayer.server import reply_control as control
from tracklayer.server import reply_openai as openai
from tracklayer.server.protocol import Body
from tracklayer.server.push import RAW_SEND

TEXT, JSON, EVENTS, MSGPACK = "text/plain", "application/json", "text/event-stream", "application/x-msgpack"
STRING = {"type": "string"}

# path -> what a 200 holds, as JSON
ANSWERS: dict[str, Any] = {
    "/generate": replies.Generated | list[replies.Generated],
    "/v1/completions": openai.Completion,
    "/v1/chat/completions": openai.ChatCompletion,
    "/inference/v1/generate": openai.Inference,
    "/tokenize": control.Tokens,
    "/detokenize": control.Text,
    "/v1/models": openai.Cards,
    "/v1/models/{name}": openai.Card,
    "/model_info": control.ModelInfo,
    "/get_model_info": control.ModelInfo,
    "/server_info": control.ServerInfo,
    "/get_server_info": control.ServerInfo,
    "/v1/loads": control.Loads,
    "/get_load": list[control.OldLoad],
    "/weight_version": control.Version,
    "/get_weight_version": control.Version,
    "/expert_load": control.ExpertCounts,
    "/pause_generation": control.Done,
    "/continue_generation": control.Done,
    "/update_weights_from_disk": control.Outcome,
    "/begin_weight_update": control.Outcome,
    "/end_weight_update": control.Outcome,
    "/post_process_weights": control.Outcome,
    "/update_weight_version": control.Outcome,
    "/weights_checker": control.Outcome,
    "/get_weights_by_name": list[Any],
    "/pause": control.Status,
    "/resume": control.Status,
    "/is_paused": control.IsPaused,
    "/is_sleeping": control.IsSleeping,
    "/get_world_size": control.WorldSize,
    "/release_memory_occupation": None,
    "/resume_memory_occupation": None,
}
IN_TEXT = ("/flush_cache", "/start_profile", "/stop_profile", "/freeze_gc", "/metrics")
# path -> what the data of an event holds, as JSON; the last event's is [DONE]
STREAMED: dict[str, Any] = {
    "/generate": replies.GeneratedChunk | control.StreamError,
    "/v1/completions": openai.CompletionChunk | control.StreamError,
    "/v1/chat/completions": openai.ChatChunk | control.StreamError,
}
UNFOUND = ("/v1/models/{name}", "/metrics")
EMPTY = ("/abort_request", "/sleep", "/wake_up", "/reset_prefix_cache")  # a 200 without a body
HEALTH = ("/health", "/health_generate", "/ready", "/ping")
# status -> (what it means, body). Native endpoints answer 400 in more than one shape.
ERRORS: dict[str, tuple[str, Any]] = {
    "400": ("what was asked can not succeed", control.FlatError | control.ErrorBody | control.Outcome),
    "401": ("no key", control.ErrorBody),
    "403": ("wrong key", control.ErrorBody),
    "404": ("not here", control.FlatError | control.ErrorBody),
    "413": ("the body is too large", control.FlatError),
    "500": ("a fault of the server", control.FlatError),
    "503": ("loading, stopping, or too much waits: try later", control.FlatError),
}


class Application(FastAPI):
    """A FastAPI whose document tells what the endpoints really answer, and whose streams may write without detours."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[RAW_SEND] = send
        await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of one id for GET and POST, which `_describe` mends
                document = super().openapi()
            schemas: dict[str, Any] = {}
            for path, operations in document["paths"].items():
                for method, operation in operations.items():
                    _describe(path, method, operation, schemas)
            document["components"] = {"schemas": schemas}
            self.openapi_schema = document
        return self.openapi_schema


def _describe(path: str, method: str, operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    """Write the operation's id and replies; named schemas go into `schemas`."""
    operation["operationId"] = f"{method}_{path.strip('/').replace('/', '_')}"
    operation["responses"] = {"200": {"description": "done"}}
    content = dict(_content(path, schemas))
    if content:
        operation["responses"]["200"]["content"] = content
    for status in _statuses(path):
        meaning, kind = ERRORS[status]
        body = {JSON: {"schema": _schema(kind, schemas)}}
        if path == "/flush_cache" and status == "400":
            body[TEXT] = {"schema": STRING}
        operation["responses"][status] = {"description": meaning, "content": body}


def _content(path: str, schemas: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    if path in ANSWERS:
        yield JSON, {"schema": _schema(ANSWERS[path], schemas)}
    if path in IN_TEXT:
        yield TEXT, {"schema": STRING}
    if path in STREAMED:
        data = STRING | {"contentSchema": _schema(STREAMED[path], schemas), "description": "JSON; [DONE] at the end"}
        yield EVENTS, {"schema": {"type": "object", "properties": {"data": data}}}
    if path == "/generate":
        yield MSGPACK, {"schema": {"type": "string", "format": "binary"}}


def _statuses(path: str) -> Iterator[str]:
    for status in ERRORS:
        health = path in HEALTH and status in ("400", "401", "403", "413")
        if not health and (status != "404" or path in UNFOUND):
            yield status


def _schema(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    schema = TypeAdapter(kind).json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(schema.pop("$defs", {}))
    return schema


def body_of(kind: type[Body], *, required: bool = True) -> dict[str, Any]:
    """`openapi_extra` of an endpoint that reads `kind`."""
    schema = kind.model_json_schema(ref_template="#/$defs/{model}")
    schema = _inline(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


def _inline(schema: Any, parts: dict[str, Any]) -> Any:
    """The schema with its references replaced by what they name, so that it stands alone."""
    if isinstance(schema, dict):
        name = schema.get("$ref", "").removeprefix("#/$defs/")
        if name in parts:
            return _inline(parts[name], parts)
        return {key: _inline(value, parts) for key, value in schema.items()}
    if isinstance(schema, list):
        return [_inline(value, parts) for value in schema]
    return schema
