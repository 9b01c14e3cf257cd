"""Start, watch and stop the server: `main(argv)` is `tracklayer serve` and `python -m tracklayer.launch_server`.

The port opens at once and answers 503 until the engine is ready. A stop signal lets running requests end within
--drain-timeout-s, then aborts them with what they have; a second signal does not wait. A dead engine fails what runs
and ends the server with status 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import logging
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import uvicorn

from tracklayer.config import load_model_config
from tracklayer.engine.client import EngineClient
from tracklayer.engine.logs import LogStyle
from tracklayer.engine.tokenizer import TextTokenizer, load_tokenizer
from tracklayer.errors import TracklayerError, UserError
from tracklayer.server.app import create_app
from tracklayer.server.args import Launch, parse, usage
from tracklayer.server.service import Service, build_service

log = logging.getLogger("tracklayer.server")
Build = Callable[[Launch], tuple[EngineClient, TextTokenizer | None]]
WATCH_S = 0.2
CLOSE_S = 3  # seconds that connections get to take their last bytes


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling: a stop drains the engine first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def start_engine(launch: Launch, *, stop: threading.Event) -> EngineClient:
    """Build the engine; returns when it is ready. Imported here: the server itself needs no torch."""
    config, server = launch.engine, launch.server
    if server.engine_process:
        from tracklayer.engine.process import EngineProcess

        return EngineProcess(config, stop=stop, log_style=LogStyle(server.log_level, server.log_format))
    from tracklayer.engine.thread import EngineThread

    return EngineThread(config)


def build_engine(launch: Launch, *, stop: threading.Event) -> tuple[EngineClient, TextTokenizer | None]:
    """Tokenizer first: it fails fast, and an engine takes long. `stop`, once set, gives up where that can be done."""
    engine, server = launch.engine, launch.server
    load_model_config(engine.model_path, engine.json_model_override_args)  # what is no checkpoint has no tokenizer
    tokenizer = None
    if not engine.skip_tokenizer_init:
        tokenizer = load_tokenizer(
            engine.tokenizer_path or engine.model_path,
            chat_template=server.chat_template,
            trust_remote_code=server.trust_remote_code,
        )
    return start_engine(launch, stop=stop), tokenizer


def listen(host: str, port: int) -> socket.socket:
    """An open socket. Raises UserError when the address can not be had, before anything is loaded."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UserError(f"can not listen on {host}:{port}: {error.strerror}; give another --host or --port") from error


class Runner:
    """One server from start to exit. `client` given: serve that engine (tests)."""

    def __init__(self, launch: Launch, build: Build | None = None):
        self.launch = launch
        self._give_up = threading.Event()
        self.build = build or partial(build_engine, stop=self._give_up)
        self.app = create_app(launch.server)
        self.http = HttpServer(
            uvicorn.Config(
                self.app,
                host=launch.server.host,
                port=launch.server.port,
                log_level=launch.server.log_level_http or "warning",
                log_config=None,
                access_log=launch.server.log_level_http in ("debug", "info"),
                timeout_keep_alive=75,
                timeout_graceful_shutdown=CLOSE_S,
                limit_max_requests=None,
            )
        )
        self.service: Service | None = None
        self.status = 0
        self._signals = 0
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> int:
        """Serve until a signal or the engine's death; returns the exit status."""
        listener = listen(self.launch.server.host, self.launch.server.port)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop)
        serving = asyncio.create_task(self.http.serve([listener]))
        stop = asyncio.create_task(self._stop.wait())
        loading = asyncio.create_task(self._load())
        try:
            await asyncio.wait({serving, stop, loading}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                await self._abandon(loading)
            elif not self._stop.is_set():
                self.service = loading.result()
                watch = asyncio.create_task(self._watch(self.service))
                await asyncio.wait({serving, stop, watch}, return_when=asyncio.FIRST_COMPLETED)
                watch.cancel()
                await self._drain(self.service)
        finally:
            self.http.should_exit = True
            await serving
            if self.service is not None:
                await asyncio.to_thread(self.service.frontend.client.shutdown)
                self.service.frontend.close()
        return self.status

    async def _abandon(self, loading: asyncio.Task[Service]) -> None:
        """Stopped while the engine starts: let nothing of it stay behind."""
        log.info("stopping: the engine was still starting")
        self._give_up.set()
        try:
            self.service = await loading
        except TracklayerError as error:
            log.info("%s", error)

    def stop(self) -> None:
        """First call: drain and stop. Second: do not wait for what runs."""
        self._signals += 1
        (self._stop if self._signals == 1 else self._hurry).set()

    async def _load(self) -> Service:
        began = time.perf_counter()
        client, tokenizer = await asyncio.to_thread(self.build, self.launch)
        service = build_service(client, tokenizer, self.launch.server, self.launch.engine, shlex.join(sys.argv))
        service.startup_s = time.perf_counter() - began
        service.frontend.bind(asyncio.get_running_loop())
        self.app.state.service = service
        gc.collect()
        gc.freeze()  # a collection under load walks through what requests made, not through all that was imported
        address = f"http://{self.launch.server.host}:{self.port}"
        log.info("ready in %.1f s: %s serves %s", service.startup_s, address, service.served_name)
        return service

    @property
    def port(self) -> int:
        """The port that is listened on (known once the socket is open)."""
        for server in getattr(self.http, "servers", []):
            for opened in server.sockets:
                return int(opened.getsockname()[1])
        return self.launch.server.port

    async def _watch(self, service: Service) -> None:
        while service.frontend.client.alive():
            await asyncio.sleep(WATCH_S)
        log.error("the engine died; failing %d requests and stopping", service.frontend.num_running)
        self.status = 1
        service.frontend.fail_all("the engine died")

    async def _drain(self, service: Service) -> None:
        """No new requests; those that run end by themselves, or are aborted with what they have."""
        service.stopping = True
        frontend = service.frontend
        end = time.monotonic() + self.launch.server.drain_timeout_s
        if frontend.num_running and frontend.client.alive():
            log.info("stopping: %d requests still run", frontend.num_running)
        while frontend.num_running and time.monotonic() < end and not self._hurry.is_set():
            if not frontend.client.alive():
                break
            await asyncio.sleep(0.02)
        if service.control.paused and frontend.client.alive():
            await service.control.resume()
        frontend.abort(everything=True)
        end = time.monotonic() + CLOSE_S
        while frontend.num_running and time.monotonic() < end:
            await asyncio.sleep(0.02)
        frontend.fail_all("the server stopped")


def main(argv: list[str] | None = None) -> int:
    """Serve a model; returns the exit status (2: wrong flags or an unusable model)."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        print(usage())
        return 0
    try:
        launch = parse(argv)
        LogStyle(launch.server.log_level, launch.server.log_format).set_up()
        for line in launch.warnings:
            log.warning(line)
        with asyncio.Runner(loop_factory=_quick_loop()) as runner:
            return runner.run(Runner(launch).run())
    except TracklayerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _quick_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loop, where it is installed; None: asyncio's own."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    return factory


if __name__ == "__main__":
    sys.exit(main())
