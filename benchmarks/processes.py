"""CPU seconds a token with the engine in the server's process and in its own, measured from outside.

    python benchmarks/processes.py [--streams 256] [--tokens 64] [--rounds 3]

Serves the tiny shape with dummy weights on this machine's CPU, and reads text streams of /generate. The processes' CPU
time comes from /proc, before and after; the client is a process of its own and not counted. Ways take turns, so that a
machine that slows down slows both. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil
from tiny_checkpoint import write

WAYS = {"in the server": "--no-engine-process", "of its own": "--engine-process"}


def start(folder: Path, flag: str, streams: int) -> tuple[subprocess.Popen[bytes], str]:
    """A server that is ready, and its address."""
    flags = ["--port", "0", "--load-format", "dummy", "--device", "cpu", "--max-running-requests", str(streams)]
    command = [
        sys.executable,
        "-m",
        "tracklayer.launch_server",
        str(folder),
        *flags,
        "--max-total-tokens",
        "40000",
        flag,
    ]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert server.stderr is not None
    for line in server.stderr:
        if b"ready in" in line:
            return server, line.split()[-3].decode()
    raise RuntimeError("the server did not start")


def cpu_s(server: subprocess.Popen[bytes]) -> list[float]:
    """CPU seconds of the server and of each child."""
    top = psutil.Process(server.pid)
    times = [p.cpu_times() for p in (top, *sorted(top.children(recursive=True), key=lambda p: p.pid))]
    return [t.user + t.system for t in times]


async def drive(url: str, streams: int, tokens: int) -> int:
    """Read `streams` streams of `tokens` tokens at once; the tokens that came."""
    limits = httpx.Limits(max_connections=streams)

    async def one(client: httpx.AsyncClient, i: int) -> int:
        sampling = {"max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": [i % 200 + 3] * 8, "sampling_params": sampling, "stream": True}
        last = b""
        async with client.stream("POST", f"{url}/generate", json=body) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    last = line[6:]
        return int(json.loads(last)["meta_info"]["completion_tokens"])

    async with httpx.AsyncClient(timeout=300, limits=limits) as client:
        return sum(await asyncio.gather(*(one(client, i) for i in range(streams))))


def measure(folder: Path, flag: str, streams: int, tokens: int) -> dict[str, float]:
    """us of CPU a token: in all, and of the process that speaks HTTP."""
    server, url = start(folder, flag, streams)
    try:
        asyncio.run(drive(url, streams, 4))
        before, began = cpu_s(server), time.perf_counter()
        made = asyncio.run(drive(url, streams, tokens))
        took = time.perf_counter() - began
        spent = [b - a for a, b in zip(before, cpu_s(server), strict=True)]
    finally:
        server.terminate()
        server.wait(60)
    return {
        "all_us": sum(spent) / made * 1e6,
        "http_us": spent[0] / made * 1e6,
        "tokens_per_s": made / took,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "tiny")
        for _ in range(args.rounds):
            for way, flag in WAYS.items():
                found[way].append(measure(Path(folder) / "tiny", flag, args.streams, args.tokens))
                print(way, {name: round(value, 1) for name, value in found[way][-1].items()}, flush=True)
    middle = {w: {n: round(statistics.median(r[n] for r in rs), 1) for n in rs[0]} for w, rs in found.items()}
    print(json.dumps({"streams": args.streams, "tokens": args.tokens, "cores": os.cpu_count(), "engine": middle}))


if __name__ == "__main__":
    main()
