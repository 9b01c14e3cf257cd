"""Helpers of the server's tests: the application over a fake engine, without sockets or with real ones."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json

import httpx
import numpy as np
from server_fakes import LAYERS, MOE_LAYERS, TOP_K, FakeEngine, byte_level_tokenizer, info, route_rows

from tracklayer.config import EngineConfig
from tracklayer.server.app import create_app
from tracklayer.server.args import Launch
from tracklayer.server.config import ServerConfig
from tracklayer.server.launch import Runner
from tracklayer.server.service import build_service

TOKENIZER = byte_level_tokenizer()
GREEDY = {"temperature": 0, "max_new_tokens": 6}


@contextlib.asynccontextmanager
async def serving(script=None, *, tokenizer=TOKENIZER, facts=None, engine=None, defaults=None, **options):
    """(httpx client, fake engine, service); keywords: ServerConfig's fields, and FakeEngine's under engine={}."""
    fake = FakeEngine(facts or info(400), *([script] if script else []), **(engine or {}))
    config = ServerConfig(**options)
    service = build_service(fake, tokenizer, config, EngineConfig(model_path="/models/fake"))
    service.chat_defaults = defaults or {}
    service.frontend.bind(asyncio.get_running_loop())
    transport = httpx.ASGITransport(create_app(config, service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20) as client:
        try:
            yield client, fake, service
        finally:
            fake.shutdown()
            service.frontend.close()


@contextlib.asynccontextmanager
async def listening(script=None, *, build=None, **options):
    """(base url, runner, fake engine, running task): a real uvicorn on a free port of this machine."""
    engine_options = options.pop("engine", {})
    fake = FakeEngine(info(400), *([script] if script else []), **engine_options)
    launch = Launch(EngineConfig(model_path="/models/fake"), ServerConfig(port=0, **options))
    runner = Runner(launch, build or (lambda launch: (fake, TOKENIZER)))
    task = asyncio.create_task(runner.run())
    while not runner.http.started and not task.done():
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{runner.port}", runner, fake, task
    finally:
        runner.stop()
        runner.stop()
        await asyncio.wait_for(task, 15)
        fake.shutdown()


def events(text):
    """The JSON values of an event stream, which must end with [DONE]."""
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") and "\n" not in line for line in lines), text
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def sglang_routes(payload):
    """int32 [rows, all layers, K] of SGLang's wire form."""
    return np.frombuffer(base64.b64decode(payload, validate=True), "<i4").reshape(-1, LAYERS, TOP_K)


def wire_rows(tokens, start=0):
    """What SGLang's wire form must hold: all decoder layers, zeros in dense ones, rows from `start`."""
    out = np.zeros((len(tokens), LAYERS, TOP_K), np.int32)
    out[:, MOE_LAYERS] = route_rows(tokens)
    return out[start:]
