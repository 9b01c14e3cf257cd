"""Time to get routes to a caller over loopback: SGLang's base64 int32 JSON against our packed binary reply.

    python benchmarks/route_replies.py [--samples 256] [--tokens 2048] [--layers 48] [--top-k 8]

A server process answers from routes prepared in memory (no model), so that what is timed is encoding, HTTP and
decoding into an array. Both forms are asked for in turn, in one run; each sample is one request, 16 at a time.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import httpx
import msgpack
import numpy as np
import uvicorn

from tracklayer.config import EngineConfig
from tracklayer.engine.client import EngineInfo
from tracklayer.routes.codec import decode, decode_packed
from tracklayer.routes.forms import RouteShape
from tracklayer.server.app import create_app
from tracklayer.server.config import ServerConfig
from tracklayer.server.service import build_service
from tracklayer.types import EngineRequest, FinishReason, RequestOutput

EXPERTS, CONCURRENT = 128, 16


class Prepared:
    """An EngineClient that ends every request at once with prepared routes."""

    def __init__(self, tokens: int, layers: int, top_k: int) -> None:
        self.info = EngineInfo(
            model_path="prepared", architecture="None", model_type="none", dtype="none", device="cpu", vocab_size=1000,
            context_length=1 << 20, max_total_tokens=1 << 20, max_request_tokens=1 << 20, recording=True,
            num_layers=layers, layer_ids=tuple(range(layers)), num_experts=EXPERTS, top_k=top_k, eos_token_ids=(),
        )  # fmt: skip
        scores = np.random.default_rng(0).random((tokens - 1, layers, EXPERTS), np.float32)
        self.routes_TLK = np.argpartition(scores, top_k, -1)[..., :top_k].astype(np.uint8)
        self._consumer: Callable[[list[RequestOutput]], None] = lambda outputs: None

    def listen(self, consumer: Callable[[list[RequestOutput]], None]) -> None:
        self._consumer = consumer

    def submit(self, requests: list[EngineRequest]) -> None:
        end = FinishReason("length", length=1)
        self._consumer([RequestOutput(r.rid, [5], len(r.input_ids), 0, end, routes=self.routes_TLK) for r in requests])

    def abort(self, rid: str) -> None: ...

    def finish(self, rid: str, keep: int, reason: FinishReason) -> None: ...

    def control(self, name: str, /, **arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result({})
        return future

    def alive(self) -> bool:
        return True

    def shutdown(self) -> None: ...


def serve(port: int, tokens: int, layers: int, top_k: int) -> None:
    """The server's process."""
    service = build_service(
        Prepared(tokens, layers, top_k),
        None,
        ServerConfig(),
        EngineConfig(model_path="prepared", skip_tokenizer_init=True),
    )

    async def run() -> None:
        service.frontend.bind(asyncio.get_running_loop())
        app = create_app(service.config, service)
        await uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning")).serve()

    asyncio.run(run())


async def fetch(url: str, shape: RouteShape, samples: int, tokens: int, *, binary: bool) -> tuple[float, int]:
    """(seconds, bytes) until every sample's routes are an array."""
    body = {"input_ids": [7] * (tokens - 1), "sampling_params": {"max_new_tokens": 1}, "return_routed_experts": True}
    headers = {"Accept": "application/x-msgpack"} if binary else {}
    if binary:
        body["routed_experts_format"] = "packed"
    gate, size = asyncio.Semaphore(CONCURRENT), 0

    async def one(client: httpx.AsyncClient) -> None:
        nonlocal size
        async with gate:
            reply = await client.post("/generate", json=body, headers=headers)
        size += len(reply.content)
        if binary:
            routes = decode_packed(msgpack.unpackb(reply.content)["meta_info"]["routed_experts"])
        else:
            routes = decode(reply.json()["meta_info"]["routed_experts"], "sglang", shape)
        assert len(routes) == tokens - 1

    began = time.perf_counter()
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        await asyncio.gather(*(one(client) for _ in range(samples)))
    return time.perf_counter() - began, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = int(s.getsockname()[1])
    spawn = multiprocessing.get_context("spawn")
    server = spawn.Process(target=serve, args=(port, a.tokens, a.layers, a.top_k), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{port}"
    shape = RouteShape(layer_ids=tuple(range(a.layers)), top_k=a.top_k, num_experts=EXPERTS, num_hidden_layers=a.layers)
    while True:
        try:
            httpx.get(f"{url}/health")
            break
        except httpx.TransportError:
            time.sleep(0.2)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    sizes = {}
    for binary in [False, True] * a.rounds:
        taken, sizes[binary] = asyncio.run(fetch(url, shape, a.samples, a.tokens, binary=binary))
        seconds[binary].append(taken)
        print(f"{'packed msgpack' if binary else 'int32 base64 JSON':18} {taken:8.3f} s  {sizes[binary] / 1e6:9.1f} MB")
    server.terminate()
    slow, fast = (statistics.median(seconds[binary]) for binary in (False, True))
    print(json.dumps({"base64_s": slow, "packed_s": fast, "ratio": slow / fast, "bytes": [sizes[False], sizes[True]]}))


if __name__ == "__main__":
    main()
