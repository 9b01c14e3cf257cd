"""The engine in a thread of its own: an inbox of calls, the loop over `EngineCore.step`, and its life and death."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from tracklayer.config import EngineConfig
from tracklayer.engine.client import Consumer, EngineInfo, failed
from tracklayer.engine.engine import EngineCore
from tracklayer.engine.operations import Controls
from tracklayer.errors import TracklayerError
from tracklayer.runner.load import LoadedModel
from tracklayer.types import EngineRequest, FinishReason, RequestOutput

log = logging.getLogger(__name__)


class EngineThread:
    """An EngineClient whose engine runs in this process. The constructor returns when the engine is ready.

    An error inside the loop is the engine's death: every open request gets a final output with it, and `alive` is
    False from then on.
    """

    info: EngineInfo

    def __init__(self, config: EngineConfig, *, model: LoadedModel | None = None) -> None:
        self.core = EngineCore(config, model=model)
        self.info = self.core.info
        self.controls = Controls(self.core)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._consumer: Consumer = lambda outputs: None
        self._open: set[str] = set()
        self._lock = threading.Lock()
        self.core.wake = lambda: self._inbox.put(_nothing)
        self._death: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="tracklayer-engine", daemon=True)
        self._thread.start()

    def listen(self, consumer: Consumer) -> None:
        self._consumer = consumer

    def submit(self, requests: list[EngineRequest]) -> None:
        with self._lock:
            if self._death is None:
                self._open.update(request.rid for request in requests)
        if self._death is not None:
            self._consumer([_died(request.rid, self._death) for request in requests])
            return
        self._inbox.put(partial(self._add, requests))

    def _add(self, requests: list[EngineRequest]) -> None:
        for request in requests:
            self.core.add(request)

    def abort(self, rid: str) -> None:
        self._inbox.put(lambda: self.core.abort(rid))

    def finish(self, rid: str, keep: int, reason: FinishReason) -> None:
        self._inbox.put(lambda: self.core.finish(rid, keep, reason))

    def control(self, name: str, /, **arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # a caller that stops waiting can not cancel it
        if not self.alive():
            future.set_exception(TracklayerError(f"the engine is not running: {self._death or 'it was shut down'}"))
            return future
        self._inbox.put(lambda: self.controls.start(future, name, arguments))
        return future

    def alive(self) -> bool:
        return self._death is None and self._thread.is_alive()

    def shutdown(self) -> None:
        """Stop after the step that runs; open requests are aborted. Safe to call again."""
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _main(self) -> None:
        if self.core.model.device.type == "cuda":  # each thread has a current GPU of its own, 0 at first
            torch.cuda.set_device(self.core.model.device)
        try:
            while self._take_calls():
                if self.core.has_work:
                    self._tell(self.core.step())
                self.controls.poll()
        except BaseException as error:  # the thread's last act: nobody may be left waiting
            log.exception("the engine died")
            self._end(error)
            raise
        self.core.grammars.close()
        self._end(TracklayerError("the engine was shut down"))

    def _take_calls(self) -> bool:
        """Run what the inbox holds, waiting for it only when there is nothing else to do; False to stop."""
        idle = not self.core.has_work and not self.controls.waiting
        while True:
            try:
                call = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if call is None:
                return False
            call()
            idle = False

    def _tell(self, outputs: list[RequestOutput]) -> None:
        if outputs:
            with self._lock:
                self._open.difference_update(output.rid for output in outputs if output.finish is not None)
            self._consumer(outputs)

    def _end(self, error: BaseException) -> None:
        with self._lock:
            self._death = error
            left, self._open = sorted(self._open), set()
        self._consumer([_died(rid, error) for rid in left])
        self.controls.fail(error)


def _nothing() -> None:
    """A call that only wakes the loop."""


def _died(rid: str, error: BaseException) -> RequestOutput:
    return failed(rid, str(error) or type(error).__name__, getattr(error, "status", 500))
