"""Bodies in, replies out: size limits, strict schemas, JSON or msgpack, event streams, clients that go away."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from json.encoder import encode_basestring
from typing import Any, Generic, TypeVar

import msgpack
from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tracklayer.errors import TracklayerError
from tracklayer.server.errors import CLIENT_GONE, ApiError, SchemaError, stream_error
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


class EventStream(Response):
    """text/event-stream of ready-made chunks. Ends them early, and at once, when the client goes away.

    A TracklayerError inside the stream becomes an error event; `[DONE]` always comes last.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[bytes, None], source: Opened[Any], path: str) -> None:
        super().__init__(headers=STREAM_HEADERS)
        del self.headers["content-length"]
        self._chunks, self._source, self._path = chunks, source, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        task, watch = asyncio.ensure_future(self._write(send)), asyncio.ensure_future(until_gone(receive))
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            await _cancel(task, watch)
            await self._chunks.aclose()
            await self._source.aclose()

    async def _write(self, send: Send) -> None:
        try:
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except TracklayerError as error:
            body = event(stream_error(error, self._path))
            await send({"type": "http.response.body", "body": body, "more_body": True})
        except OSError:
            return  # the connection broke under the send
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


class Opened(Generic[T]):
    """A stream whose first item has come already. `aclose` ends it whether it was read on or not."""

    def __init__(self, first: T, rest: AsyncGenerator[T, None]) -> None:
        self._first: list[T] = [first]
        self._rest = rest

    def __aiter__(self) -> Opened[T]:
        return self

    def __anext__(self) -> Awaitable[T]:
        return self._begin() if self._first else self._rest.__anext__()

    async def _begin(self) -> T:
        return self._first.pop()

    async def aclose(self) -> None:
        await self._rest.aclose()


async def opened(request: Request, stream: AsyncGenerator[T, None]) -> Opened[T]:
    """The stream once its first item has come, so that early errors still have a status of their own."""
    try:
        return Opened(await unless_gone(request, _first(stream)), stream)
    except BaseException:
        await stream.aclose()
        raise


async def _first(stream: AsyncGenerator[T, None]) -> T:
    return await anext(stream)
