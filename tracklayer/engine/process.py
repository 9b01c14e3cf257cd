"""The engine in a process of its own: an EngineClient over zmq and msgpack, large arrays through shared memory.

The server's Python work (HTTP, JSON, text) then never holds the interpreter that launches the steps. Either side
notices the other's death: the engine's process ends with its parent, and its own death fails all open requests.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import zmq

from tracklayer.config import EngineConfig
from tracklayer.engine.client import Consumer, EngineClient, EngineInfo, failed
from tracklayer.engine.logs import LogStyle
from tracklayer.engine.wire import Wire, news_of, outputs_of
from tracklayer.errors import CapacityError, CheckpointError, TracklayerError, UserError
from tracklayer.types import EngineRequest, FinishReason

log = logging.getLogger(__name__)

POLL_MS = 200
CLOSE_S = 20.0  # the engine's process gets this long to end by itself
ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (TracklayerError, UserError, CheckpointError, CapacityError, TypeError)
}
PLAIN = LogStyle()
Build = Callable[[EngineConfig], EngineClient]


def build_thread(config: EngineConfig) -> EngineClient:
    """What runs inside the engine's process."""
    from tracklayer.engine.thread import EngineThread

    return EngineThread(config)


class Line:
    """One direction of talk: a socket that any thread may send on, or one thread receives from."""

    def __init__(self, context: zmq.Context[Any], kind: int, address: str, wire: Wire, *, bind: bool) -> None:
        self._socket = context.socket(kind)
        self._socket.set_hwm(0)  # the engine never blocks on a slow reader; what is open is bounded by its own limits
        self._socket.linger = 1000
        (self._socket.bind if bind else self._socket.connect)(address)
        self._wire = wire
        self._lock = threading.Lock()

    def send(self, *message: Any) -> None:
        """Never blocks: with nobody at the other end (it died) the message is dropped."""
        raw = self._wire.pack(message)
        with self._lock, contextlib.suppress(zmq.Again):
            if not self._socket.closed:
                self._socket.send(raw, zmq.NOBLOCK)

    def receive(self) -> tuple[Any, ...] | None:
        """The next message; None when none came within POLL_MS."""
        if not self._socket.poll(POLL_MS):
            return None
        message: tuple[Any, ...] = self._wire.unpack(self._socket.recv())
        return message

    def close(self) -> None:
        with self._lock:
            self._socket.close()


class EngineProcess:
    """An EngineClient whose engine runs in a child process. The constructor returns when it is ready.

    `stop`, set by another thread, ends a start that is under way.

    Raises what building the engine raised (UserError, CheckpointError, ...), TracklayerError when the process died or
    the start was ended.
    """

    info: EngineInfo

    def __init__(
        self,
        config: EngineConfig,
        build: Build = build_thread,
        stop: threading.Event | None = None,
        log_style: LogStyle = PLAIN,
    ) -> None:
        base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
        self._folder = Path(
            tempfile.mkdtemp(prefix=f"tracklayer-{os.getpid()}-", dir=base)
        )  # readable by this user alone
        self._context: zmq.Context[Any] = zmq.Context()
        wire = Wire(self._folder)
        self._out = Line(self._context, zmq.PUSH, f"ipc://{self._folder}/calls", wire, bind=True)
        self._in = Line(self._context, zmq.PULL, f"ipc://{self._folder}/news", wire, bind=True)
        self._consumer: Consumer = lambda outputs: None
        self._open: set[str] = set()
        self._futures: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._dead: str | None = None
        self._closing = False
        spawn = multiprocessing.get_context("spawn")
        self._process: BaseProcess = spawn.Process(
            target=_serve,
            args=(str(self._folder), wire.pack(config), build, log_style),
            name="tracklayer-engine",
            daemon=True,
        )
        self._process.start()
        atexit.register(self._process.kill)  # a parent that fails without `shutdown` must not wait for it at its exit
        self._reader = threading.Thread(target=self._read, name="tracklayer-news", daemon=True)
        try:
            self.info = self._await_ready(stop)
        except BaseException:
            self._end_process()
            self._clean()
            raise
        self._reader.start()

    def _await_ready(self, stop: threading.Event | None) -> EngineInfo:
        while True:
            if stop is not None and stop.is_set():
                self._process.kill()  # it may be deep in loading, and has nothing to lose
                raise TracklayerError("the engine's process was stopped while it started")
            message = self._in.receive()
            if message is not None:
                kind, *rest = message
                if kind == "ready":
                    info = rest[0]
                    assert isinstance(info, EngineInfo)
                    return info
                raise _error(*rest)
            if not self._process.is_alive():
                raise TracklayerError(f"the engine's process ended with code {self._process.exitcode} while it started")

    # EngineClient

    def listen(self, consumer: Consumer) -> None:
        self._consumer = consumer

    def submit(self, requests: list[EngineRequest]) -> None:
        with self._lock:
            if self._dead is None:
                self._open.update(request.rid for request in requests)
        if self._dead is not None:
            self._consumer([failed(request.rid, self._dead) for request in requests])
            return
        self._out.send("submit", requests)

    def abort(self, rid: str) -> None:
        self._out.send("abort", rid)

    def finish(self, rid: str, keep: int, reason: FinishReason) -> None:
        self._out.send("finish", rid, keep, reason)

    def control(self, name: str, /, **arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # a caller that stops waiting can not cancel it
        with self._lock:
            dead, number = self._dead, next(self._numbers)
            if dead is None:
                self._futures[number] = future
        if dead is not None:
            future.set_exception(TracklayerError(f"the engine is not running: {dead}"))
            return future
        try:
            self._out.send("control", number, name, arguments)
        except BaseException:
            with self._lock:
                self._futures.pop(number, None)
            raise
        return future

    def alive(self) -> bool:
        return self._dead is None and self._process.is_alive()

    def shutdown(self) -> None:
        """End the engine's process and wait until it is gone; open requests are aborted. Safe to call again."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._out.send("shutdown")
        self._end_process()
        self._reader.join()
        self._clean()

    # the other side

    def _read(self) -> None:
        """Hand news to the consumer until the process is gone and all that it said was read."""
        while True:
            gone = not self._process.is_alive()
            message = self._in.receive()
            if message is not None:
                self._take(message)
            elif gone:
                break
        code = self._process.exitcode
        self._bury("the engine was shut down" if self._closing else f"the engine's process ended with code {code}")

    def _take(self, message: tuple[Any, ...]) -> None:
        kind, *rest = message
        if kind == "news":
            outputs = outputs_of(*rest)
            with self._lock:
                self._open.difference_update(output.rid for output in outputs if output.finish is not None)
            self._consumer(outputs)
        elif kind in ("died", "failed"):
            self._bury(rest[-1])
        else:
            number, *answer = rest
            with self._lock:
                future = self._futures.pop(number)
            if kind == "result":
                future.set_result(answer[0])
            else:
                future.set_exception(_error(*answer))

    def _bury(self, message: str) -> None:
        with self._lock:
            self._dead = self._dead or message
            left, self._open = sorted(self._open), set()
            futures, self._futures = list(self._futures.values()), {}
        if left:
            self._consumer([failed(rid, message) for rid in left])
        for future in futures:
            future.set_exception(TracklayerError(message))

    def _end_process(self) -> None:
        self._process.join(CLOSE_S)
        atexit.unregister(self._process.kill)
        if self._process.is_alive():
            log.warning("the engine's process did not end within %.0f s; killing it", CLOSE_S)
            self._process.kill()
            self._process.join()

    def _clean(self) -> None:
        self._out.close()
        self._in.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)


def _error(kind: str, message: str) -> Exception:
    return ERRORS.get(kind, TracklayerError)(message)


def _describe(error: BaseException) -> tuple[str, str]:
    """(name of the kind in ERRORS, message): the nearest kind that the other side knows."""
    known = next((k.__name__ for k in type(error).__mro__ if k.__name__ in ERRORS), None)
    text = str(error) or type(error).__name__
    return (known, text) if known else ("TracklayerError", f"{type(error).__name__}: {text}")


# inside the engine's process


def _serve(folder: str, packed_config: bytes, build: Build, log_style: LogStyle) -> None:
    """Build the engine and do what the parent says, until it says stop or is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # both may reach the whole group; the parent decides
        signal.signal(number, signal.SIG_IGN)
    log_style.set_up()
    wire, context = Wire(Path(folder)), zmq.Context()
    news = Line(context, zmq.PUSH, f"ipc://{folder}/news", wire, bind=False)
    calls = Line(context, zmq.PULL, f"ipc://{folder}/calls", wire, bind=False)
    try:
        engine = build(wire.unpack(packed_config))
        engine.listen(lambda outputs: news.send("news", *news_of(outputs)))
        news.send("ready", engine.info)
        try:
            _follow(engine, calls, news)
        finally:
            engine.shutdown()
    except TracklayerError as error:
        news.send("failed", *_describe(error))
    except Exception as error:
        news.send("failed", *_describe(error))
        raise
    finally:
        calls.close()
        news.close()
        context.term()
    if not _has_parent():
        shutil.rmtree(folder, ignore_errors=True)  # nobody else is left to do it


def _has_parent() -> bool:
    parent = multiprocessing.parent_process()
    return parent is not None and parent.is_alive()


def _follow(engine: EngineClient, calls: Line, news: Line) -> None:
    while _has_parent():
        message = calls.receive()
        if not engine.alive():
            news.send("died", "the engine died; its log says why")
            return
        if message is None:
            continue
        if message[0] == "shutdown":
            return
        _obey(engine, news, message)


def _obey(engine: EngineClient, news: Line, message: tuple[Any, ...]) -> None:
    kind, *rest = message
    if kind == "submit":
        engine.submit(list(rest[0]))
    elif kind == "abort":
        engine.abort(rest[0])
    elif kind == "finish":
        engine.finish(*rest)
    else:
        number, name, arguments = rest
        future = engine.control(name, **arguments)
        future.add_done_callback(lambda done: _answer(news, number, done))


def _answer(news: Line, number: int, done: Future[Any]) -> None:
    error = done.exception()
    if error is None:
        news.send("result", number, done.result())
    else:
        news.send("error", number, *_describe(error))
