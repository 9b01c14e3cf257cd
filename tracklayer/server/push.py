"""Streams that are written by the callback which brings a step's news: no task is woken for a chunk."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tracklayer.engine.frontend import Running, TextFrontend
from tracklayer.engine.sample import Sample
from tracklayer.errors import TracklayerError
from tracklayer.server.errors import stream_error
from tracklayer.server.io import DONE, STREAM_HEADERS, event, until_gone

RAW_SEND = "tracklayer.send"  # in the scope: `send` before the layers that only ask whether a reply has begun


class Events(Protocol):
    """What a stream says; either may be nothing."""

    def news(self, sample: Sample) -> bytes:
        """The events of a sample as it is now."""

    def closing(self) -> bytes:
        """Those that come when all samples have ended."""


class EventStream(Response):
    """text/event-stream of a running call. Ends when its client goes.

    A client that does not read holds up its own stream alone: what came meanwhile is one chunk when it reads on.
    A TracklayerError of `events` becomes an error event; `[DONE]` always comes last.
    """

    media_type = "text/event-stream"

    def __init__(self, frontend: TextFrontend, running: Running, events: Events, path: str) -> None:
        super().__init__(headers=STREAM_HEADERS)
        del self.headers["content-length"]
        self._frontend, self._running, self._events, self._path = frontend, running, events, path
        self._blocked: asyncio.Future[None] | None = None  # a send that waits for the client to read
        self._said_all = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        watch = asyncio.ensure_future(until_gone(receive))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            self._send: Send = scope.get(RAW_SEND, send)
            self._running.listen(self._pump)
            self._pump()
            await asyncio.wait({self._done, watch}, return_when=asyncio.FIRST_COMPLETED)
            if self._done.done():
                self._done.result()
        finally:
            self._running.listen(None)
            for waiting in (watch, self._done, self._blocked):
                if waiting is not None:
                    waiting.cancel()
            self._frontend.leave(self._running)

    def _pump(self) -> None:
        """Write what is new, until there is nothing or the connection wants a pause."""
        while self._blocked is None and not self._done.done():
            message = self._next()
            if message is None:
                return
            self._write(message)

    def _next(self) -> dict[str, Any] | None:
        running = self._running
        if self._said_all:
            self._end(None)
            return None
        try:
            while running.changed:
                chunk = self._events.news(running.changed.pop(next(iter(running.changed))))
                if chunk:
                    return {"type": "http.response.body", "body": chunk, "more_body": True}
            if running.left:
                return None
            chunk = self._events.closing()
        except TracklayerError as error:
            chunk = event(stream_error(error, self._path))
        except Exception as error:
            self._end(error)
            raise
        self._said_all = True
        return {"type": "http.response.body", "body": chunk + DONE, "more_body": False}

    def _write(self, message: dict[str, Any]) -> None:
        """Run `send` at once; only one that must wait gets a task."""
        sending = self._send(message)
        assert isinstance(sending, Coroutine)
        try:
            waits_for = sending.send(None)
        except StopIteration:
            return
        except OSError:  # the connection broke under it
            self._end(None)
        except BaseException as error:
            self._end(error)
            raise
        else:
            self._blocked = asyncio.ensure_future(_rest(sending, waits_for))
            self._blocked.add_done_callback(self._go_on)

    def _go_on(self, sent: asyncio.Future[None]) -> None:
        self._blocked = None
        if sent.cancelled():
            return
        if (error := sent.exception()) is not None:
            self._end(error)
        self._pump()

    def _end(self, error: BaseException | None) -> None:
        if self._done.done():
            return
        if error is None or isinstance(error, OSError):
            self._done.set_result(None)
        else:
            self._done.set_exception(error)


@types.coroutine
def _rest(begun: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """What is left of a coroutine that was run until it asked to wait for something."""
    try:
        yield waits_for
        yield from begun
    finally:
        begun.close()
