"""Operations on a running engine, done between steps: pausing, flushing, weights, loads.

Each is a method of `Operations` named as front ends call it. One that must wait for requests to end is a generator:
it yields while it waits.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any

from tracklayer.engine.client import pause_mode
from tracklayer.engine.engine import EngineCore
from tracklayer.engine.profile import Profiler
from tracklayer.engine.weights_check import WeightsCheck
from tracklayer.errors import TracklayerError, UserError


class Operations:
    """What can be asked. Generators yield while they wait and return their result."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.profiler = Profiler()
        self.check = WeightsCheck(core.model.decoder)

    def flush_cache(self) -> bool:
        """Empty the prefix cache; False while requests hold pages (or wait, unless blocked)."""
        core = self.core
        core.drain()
        busy = core.scheduler.num_running > 0 or (core.scheduler.num_waiting > 0 and not core.blocked)
        return not busy and core.scheduler.flush()

    def pause(self, mode: str = "abort") -> None:
        """abort: end all requests; retract: back to the queue, KV freed; in_place: frozen. New requests wait."""
        core = self.core
        mode = pause_mode(mode)
        core.drain()
        if mode == "abort":
            self.abort_all()
        if mode == "retract":
            core.scheduler.retract_all()
            core.save_preempted()
        core.paused = True

    def resume(self) -> None:
        self.core.paused = False

    def abort_all(self) -> None:
        for rid in [*self.core.records, *self.core.compiling, *(request.rid for request in self.core.held)]:
            self.core.abort(rid)

    def loads(self) -> dict[str, Any]:
        """Numbers of this moment: requests, slots, and the sums since start."""
        core, scheduler = self.core, self.core.scheduler
        counters = {name: getattr(core.counters, name) for name in core.counters.__slots__}
        return {
            "num_running_reqs": scheduler.num_running,
            "num_waiting_reqs": scheduler.num_waiting,
            "num_used_tokens": scheduler.num_used_slots,
            "max_total_num_tokens": core.info.max_total_tokens,
            "token_usage": scheduler.num_used_slots / max(1, core.info.max_total_tokens),
            "weight_version": core.weight_version,
            "paused": core.paused,
            "num_paused_reqs": (scheduler.num_running + scheduler.num_waiting) * core.paused,
            "weight_load_s": core.weight_load_s,
            "released_memory": sorted(core.memory.released),
            "memory_usage": self._memory_usage(),
            "max_running_requests": core.config.max_running_requests,
            **counters,
        }

    def _memory_usage(self) -> dict[str, float]:
        """GiB under SGLang's names, and the tokens that fit."""
        gib = {tag: size / 2**30 for tag, size in self.core.memory.usage_bytes.items()}
        names = {"weight": "weights", "kvcache": "kv_cache", "graph": "cuda_graph"}
        return {**{name: gib[tag] for name, tag in names.items()}, "token_capacity": self.core.info.max_total_tokens}

    def update_weight_version(self, new_version: str, abort_all_requests: bool = True) -> str:
        self.core.drain()
        if abort_all_requests:
            self.abort_all()
        self.core.weight_version = new_version
        return new_version

    def update_weights_from_disk(
        self,
        model_path: str,
        weight_version: str | None = None,
        flush_cache: bool = True,
        abort_all_requests: bool = False,
    ) -> Generator[None, None, str]:
        """Load another checkpoint of the same architecture in place; waits until no request runs, unless blocked.

        A checkpoint that does not fit leaves the weights as they were: it is read through once before the first copy.
        Returns the message of success.
        """
        core = self.core
        self._need_weights()
        if abort_all_requests:
            core.drain()
            self.abort_all()
        core.holding = True
        try:
            while not core.blocked and core.records:
                yield
            core.drain()
            self._need_weights()
            began = time.perf_counter()
            core.model.replace_weights(model_path)
            core.weight_load_s = time.perf_counter() - began
            core.memory.source.path = model_path
        finally:
            core.release_held()
        message = "Succeeded to update model weights."
        if weight_version is not None:
            core.weight_version = weight_version
            message += f" Weight version updated to {weight_version}."
        if flush_cache and not core.scheduler.flush():
            raise UserError("Weights were updated, but the cache was not flushed: requests hold it")
        return message

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any]:
        """First `truncate_size` rows of a checkpoint tensor as it is now, by its checkpoint name."""
        if not isinstance(name, str) or not isinstance(truncate_size, int) or truncate_size < 0:
            raise UserError(f"a weight has a name and a number of rows of 0 or more, got {name!r}, {truncate_size!r}")
        self._need_weights()
        loader = self.core.model.loader()
        return loader.read(name)[:truncate_size].float().cpu().tolist()

    def check_weights(self, action: str = "checksum", skip: list[str] | None = None) -> dict[str, Any]:
        """See WeightsCheck.run. Raises UserError while requests run and are to lose their weights."""
        self._need_weights()
        core = self.core
        core.drain()
        if action == "reset_tensors" and not core.scheduler.flush():
            raise UserError("requests are running: reset_tensors would spoil the weights that they use")
        return self.check.run(action, skip)

    def start_profile(self, folder: str, **order: Any) -> None:
        self.profiler.start(self.core.counters.steps, folder, **order)

    def stop_profile(self) -> str | None:
        return self.profiler.stop()

    def freeze_gc(self) -> None:
        """Keep what lives now out of later garbage collections."""
        gc.collect()
        gc.freeze()

    def _need_weights(self) -> None:
        if "weights" in self.core.memory.released:
            raise UserError("the weights are released: resume them first (/resume_memory_occupation)")

    def release_memory(self, tags: list[str] | None = None) -> None:
        """Give memory back to the device; requests that come wait until all of it is resumed.

        Raises UserError while requests run, for an unknown tag, and in an engine without enable_memory_saver.
        """
        core = self.core
        if not core.config.enable_memory_saver:
            raise UserError("memory is released only where --enable-memory-saver (enable_memory_saver=True) was given")
        core.drain()
        running = core.scheduler.num_running
        if running:
            raise UserError(
                f"{running} requests are running: memory is released when none does; wait, or pause with mode abort or "
                "retract first"
            )
        core.memory.release(tags)
        if "kv_cache" in core.memory.released:
            core.scheduler.flush()

    def resume_memory(self, tags: list[str] | None = None) -> None:
        """Take memory again: the caches empty, the weights as they were, the graphs captured anew."""
        self.core.memory.resume(tags)


class Controls:
    """Runs operations one after another between steps and answers their futures."""

    def __init__(self, core: EngineCore) -> None:
        self.operations = Operations(core)
        self.waiting: list[tuple[Future[Any], Generator[None, None, Any]]] = []

    def start(self, future: Future[Any], name: str, arguments: dict[str, Any]) -> None:
        """Run an operation, or begin one that waits."""
        operation = None if name.startswith("_") else getattr(self.operations, name, None)
        if operation is None:
            future.set_exception(UserError(f"there is no control operation {name!r}"))
            return
        try:
            result = operation(**arguments)
        except (TracklayerError, TypeError, OSError) as error:
            future.set_exception(error)
            return
        if isinstance(result, Generator):
            self.waiting.append((future, result))
            self.poll()
        else:
            future.set_result(result)

    def poll(self) -> None:
        """Advance the oldest waiting operation, and the profile."""
        self.operations.profiler.advance(self.operations.core.counters.steps)
        while self.waiting:
            future, steps = self.waiting[0]
            try:
                next(steps)
                return
            except StopIteration as stop:
                future.set_result(stop.value)
            except (TracklayerError, TypeError, OSError) as error:
                future.set_exception(error)
            self.waiting.pop(0)

    def fail(self, error: BaseException) -> None:
        for future, _ in self.waiting:
            future.set_exception(TracklayerError(str(error)))
        self.waiting.clear()
