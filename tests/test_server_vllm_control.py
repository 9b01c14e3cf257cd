"""vLLM's control names do what SGLang's do, with a real engine."""

from __future__ import annotations

import asyncio

import pytest
from server_http import serving
from test_server_engine import GREEDY, real
from tiny import save

ASK = {"token_ids": list(range(3, 30)), "sampling_params": {"temperature": 0, "max_tokens": 8}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save("glm4_moe", folder, vocab_size=400, max_position_embeddings=1024)
    return folder


async def ok(client, method, path, **more):
    reply = await client.request(method, path, **more)
    assert reply.status_code == 200, (path, reply.text)
    return reply.json() if reply.content else None


async def test_a_trainers_round(checkpoint):
    async with real(checkpoint, enable_memory_saver=True) as (client, _):
        first = await ok(client, "POST", "/inference/v1/generate", json=ASK)
        await ok(client, "POST", "/reset_prefix_cache")
        assert await ok(client, "POST", "/sleep?level=1") is None
        assert await ok(client, "GET", "/is_sleeping") == {"is_sleeping": True}
        await ok(client, "GET", "/health")
        waiting = asyncio.create_task(client.post("/inference/v1/generate", json=ASK))
        await ok(client, "POST", "/wake_up?tags=weights")
        await asyncio.sleep(0.05)
        assert not waiting.done() and (await ok(client, "GET", "/is_sleeping"))["is_sleeping"]
        await ok(client, "POST", "/wake_up?tags=kv_cache")
        assert await ok(client, "GET", "/is_sleeping") == {"is_sleeping": False}
        again = (await waiting).json()
        assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
        assert await ok(client, "GET", "/get_world_size") == {"world_size": 1}


async def test_pausing_keeps_or_aborts(checkpoint):
    long = {"input_ids": [5, 6], "sampling_params": {**GREEDY, "max_new_tokens": 300}}
    async with real(checkpoint) as (client, _):
        for mode, reason in (("keep", "length"), ("abort", "abort")):
            running = asyncio.create_task(client.post("/generate", json=long))
            while (await client.get("/v1/loads")).json()["loads"][0]["num_running_reqs"] == 0:
                await asyncio.sleep(0.01)
            assert await ok(client, "POST", f"/pause?mode={mode}&clear_cache=true") == {"status": "paused"}
            assert await ok(client, "GET", "/is_paused") == {"is_paused": True}
            await asyncio.sleep(0.05)
            assert running.done() == (mode == "abort")
            assert (await client.post("/reset_prefix_cache")).status_code == (400 if mode == "keep" else 200)
            assert await ok(client, "POST", "/resume") == {"status": "resumed"}
            assert (await running).json()["meta_info"]["finish_reason"]["type"] == reason
        assert await ok(client, "GET", "/is_paused") == {"is_paused": False}


async def test_wrong_questions_and_the_admin_key():
    async with serving() as (client, _, _):
        for path in ("/pause?mode=sometimes", "/sleep?level=3", "/wake_up?tags=soul"):
            reply = await client.post(path)
            assert reply.status_code == 400, path
        for path, name in (("/pause?clear_cache=perhaps", "clear_cache"), ("/sleep?level=deep", "level")):
            reply = await client.post(path)
            assert reply.status_code == 400 and reply.json()["message"].startswith(f"{name}: "), reply.text
    async with serving(api_key="k", admin_api_key="a") as (client, _, _):
        for key, status in (("k", 403), ("a", 200)):
            reply = await client.post("/pause", headers={"authorization": f"Bearer {key}"})
            assert reply.status_code == status
