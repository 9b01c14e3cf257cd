"""Bodies in, replies out: size limits, strict schemas, JSON or msgpack, event streams, clients that go away."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from json.encoder import encode_basestring
from typing import Any, TypeVar

import msgpack
from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.responses import Response
from starlette.types import Receive

from tracklayer.server.errors import CLIENT_GONE, ApiError, SchemaError
from tracklayer.server.protocol import Body

T = TypeVar("T")
B = TypeVar("B", bound=Body)
MSGPACK = "application/x-msgpack"
DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def read_body(request: Request, kind: type[B], *, limit_bytes: int, optional: bool = False) -> B:
    """The checked body. `optional`: an empty one stands for {}. Raises SchemaError (400), ApiError (413)."""
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit_bytes:
        raise ApiError(413, f"the body is larger than {limit_bytes} bytes")
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > limit_bytes:
            raise ApiError(413, f"the body is larger than {limit_bytes} bytes")
        pieces.append(piece)
    raw = b"".join(pieces)
    try:
        return kind.model_validate_json(raw or (b"{}" if optional else b""))
    except ValidationError as error:
        raise SchemaError(_explain(error)) from error


def _explain(error: ValidationError) -> str:
    """One line for the first problem: where, what."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else str(first["msg"])


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), check_circular=False)


# Readers that split a stream as Python splits lines would cut an event at these, inside a string.
_LINE_ENDS = re.compile("[\x85\u2028\u2029]")


def to_json(value: Any) -> bytes:
    """One line of JSON, whatever a reader takes for the end of a line."""
    return _one_line(_ENCODER.encode(value)).encode()


def quoted(text: str) -> str:
    """A string as `to_json` writes it."""
    return _one_line(encode_basestring(text))


def _one_line(text: str) -> str:
    return text if text.isascii() else _LINE_ENDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def wants_msgpack(request: Request) -> bool:
    return MSGPACK in request.headers.get("accept", "")


def answer(value: Any, *, binary: bool = False, headers: dict[str, str] | None = None) -> Response:
    """A reply as JSON, or as msgpack in which arrays are bytes."""
    if binary:
        return Response(msgpack.packb(value), media_type=MSGPACK, headers=headers)
    return Response(to_json(value), media_type="application/json", headers=headers)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; a client that disconnects cancels it (ApiError 499, which nobody reads)."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(CLIENT_GONE, "the client went away")
        return task.result()
    finally:
        await _cancel(task, watch)


async def until_gone(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def event(value: Any) -> bytes:
    """One event, on one line for every idea of what a line is."""
    return b"data: " + to_json(value) + b"\n\n"


class DirectRoute(APIRoute):
    """A route whose endpoint takes the Request and gives the Response, with nothing of FastAPI's in between."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return self.endpoint
