"""A server in a process of its own, for runs from outside."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

FLAGS = ("--load-format", "dummy", "--random-seed", "1", "--enable-return-routed-experts", "--log-level", "warning")


@contextlib.contextmanager
def serving(model: Path | str, *flags: str) -> Iterator[tuple[str, psutil.Process]]:
    """(URL, process) of a server that is ready, on a free port; ends it, and expects status 0 of it.

    The tiny checkpoint has no weights, so they are dummies unless `flags` say otherwise. Raises RuntimeError when the
    server ends with another status, or before it is ready.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = int(s.getsockname()[1])
    command = [sys.executable, "-m", "tracklayer.launch_server", "--model-path", str(model), "--port", str(port)]
    server = subprocess.Popen([*command, *FLAGS, *flags])
    try:
        wait_for(f"http://127.0.0.1:{port}", server)
        yield f"http://127.0.0.1:{port}", psutil.Process(server.pid)
    finally:
        server.terminate()
        status = server.wait(60)
    if status:
        raise RuntimeError(f"the server ended with status {status}")


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    """Return once /health answers 200."""
    while True:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with status {server.returncode} before it was ready")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").status_code == 200:
                return
        time.sleep(0.3)


def usage(process: psutil.Process) -> tuple[int, int]:
    """(bytes of memory, file descriptors) of a server and its children."""
    family = [process, *process.children(recursive=True)]
    return sum(p.memory_info().rss for p in family), sum(p.num_fds() for p in family)
