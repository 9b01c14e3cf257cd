"""CPU a token of the processes that speak HTTP and make text, beside SGLang's, in turns.

    python benchmarks/http_cost.py --sglang-python INTERPRETER [--streams 256] [--tokens 64] [--rounds 3]

SGLang's server runs without a GPU over a made-up scheduler (sglang_server.py), ours over the tiny model; the processes
of scheduler and engine are not counted. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
from processes import drive
from server_process import serving
from tiny_checkpoint import write


@contextlib.contextmanager
def sglang(python: str, model: Path) -> Iterator[tuple[str, list[psutil.Process]]]:
    """(URL, processes that are counted) of SGLang's server."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = int(s.getsockname()[1])
    url, script = f"http://127.0.0.1:{port}", str(Path(__file__).with_name("sglang_server.py"))
    server = subprocess.Popen([python, script, str(model), str(port)], stdout=subprocess.DEVNULL)
    try:
        while True:
            assert server.poll() is None, "SGLang's server ended"
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/model_info").status_code == 200:
                    break
            time.sleep(0.5)
        top = psutil.Process(server.pid)
        named = {process: " ".join(process.cmdline()) for process in top.children(recursive=True)}
        yield url, [top, *(process for process, name in named.items() if "detokenizer" in name)]
    finally:
        family = psutil.Process(server.pid).children(recursive=True) if server.poll() is None else []
        for process in [server, *family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        server.wait(30)


def microseconds(url: str, processes: list[psutil.Process], streams: int, tokens: int) -> float:
    """CPU us a token of the processes while `streams` streams of `tokens` tokens are read at once."""

    def spent() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    asyncio.run(drive(url, streams, 4))
    before = spent()
    made = asyncio.run(drive(url, streams, tokens))
    return (spent() - before) / made * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sglang-python", required=True, help="interpreter that has sglang 0.5.23")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args()
    found: dict[str, list[float]] = {"sglang": [], "tracklayer": []}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = write(Path(folder) / "tiny")
        theirs = stack.enter_context(sglang(a.sglang_python, model))
        url, process = stack.enter_context(serving(model, "--max-total-tokens", "40000"))
        for _ in range(a.rounds):
            for name, (at, counted) in {"sglang": theirs, "tracklayer": (url, [process])}.items():
                found[name].append(round(microseconds(at, counted, a.streams, a.tokens), 1))
                print(name, found[name][-1], flush=True)
    print(json.dumps({"us_per_token": found, "streams": a.streams, "tokens": a.tokens}))


if __name__ == "__main__":
    main()
