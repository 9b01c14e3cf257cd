"""An event loop on a thread of its own, for callers who have none."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from tracklayer.errors import TracklayerError

T = TypeVar("T")


class LoopThread:
    """An event loop on a daemon thread."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="tracklayer-frontend", daemon=True)
        self._thread.start()

    @property
    def here(self) -> bool:
        """Whether this is the process that the thread runs in: a fork has no thread."""
        return os.getpid() == self._owner

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Raises TracklayerError after `close`, and in a fork."""
        with self._lock:
            if self.here and not self._closed:
                return asyncio.run_coroutine_threadsafe(work, self.loop)
        work.close()
        if self._closed:
            raise TracklayerError("the engine was shut down")
        raise TracklayerError(
            f"this Engine lives in process {self._owner} and can not be used in a fork of it: make one in each process"
        )

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. An interrupted wait (Ctrl-C) cancels it, which aborts its requests."""
        future = self.submit(work)
        try:
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """Let what was submitted end, or cancel it; then stop."""
        with self._lock:
            self._closed = True
            last = asyncio.run_coroutine_threadsafe(_end_all(), self.loop)
        last.result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def _end_all() -> None:
    """Wait a moment for the loop's other tasks, then cancel them."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        _, late = await asyncio.wait(others, timeout=1.0)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
