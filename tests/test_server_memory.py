"""Memory release over HTTP with a real engine: the steps of a trainer on the same GPUs, as its client sends them."""

from __future__ import annotations

import asyncio

import pytest
from test_server_engine import GREEDY, real
from tiny import save


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    for seed in (0, 1):
        save("glm4_moe", folder / str(seed), seed, vocab_size=400, max_position_embeddings=1024)
    return folder


async def post(client, path, body=None, *, method="POST", status=200):
    reply = await client.request(method, path, json=body)
    assert reply.status_code == status, (path, reply.text)
    return reply


@pytest.mark.parametrize("mode", ["abort", "retract"])
async def test_the_colocated_step(checkpoints, mode):
    ask = {"input_ids": list(range(3, 40)), "sampling_params": GREEDY, "return_routed_experts": True}
    async with real(checkpoints / "0", enable_memory_saver=True) as (client, _):
        old = (await post(client, "/generate", ask)).json()
        await post(client, "/flush_cache", method="GET")
        for body in ({}, {"tags": []}, {"tags": ["kv_cache", "weights", "cuda_graph"]}):
            assert (await post(client, "/release_memory_occupation", body)).json() is None
        waiting = asyncio.create_task(client.post("/generate", json=ask))
        for path in ("/health", "/health_generate", "/server_info", "/v1/loads", "/model_info"):
            await asyncio.wait_for(post(client, path, method="GET"), 2)
        update = {"model_path": str(checkpoints / "1"), "weight_version": "2", "flush_cache": False}
        said = await post(client, "/update_weights_from_disk", update, status=400)
        assert "resume" in said.json()["message"] and said.json()["success"] is False
        await post(client, "/resume_memory_occupation", {"tags": ["weights"]})
        await post(client, "/pause_generation", {"mode": mode})
        await post(client, "/flush_cache", method="GET")
        await post(client, "/begin_weight_update", {"selector": "all"})
        await post(client, "/update_weights_from_disk", update)
        await post(client, "/end_weight_update")
        await post(client, "/continue_generation", {})
        assert (await client.get("/v1/loads")).json()["loads"][0]["released_memory"] == ["cuda_graph", "kv_cache"]
        if mode == "abort":
            assert (await waiting).json()["meta_info"]["finish_reason"]["type"] == "abort"
            waiting = asyncio.create_task(client.post("/generate", json=ask))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await post(client, "/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}, method="GET")
        new = (await waiting).json()
        assert new["meta_info"]["weight_version"] == "2" and new["meta_info"]["cached_tokens"] == 0
        assert len(new["output_ids"]) == GREEDY["max_new_tokens"] and new["output_ids"] != old["output_ids"]
        again = (await post(client, "/generate", ask)).json()
        assert again["output_ids"] == new["output_ids"]
        assert again["meta_info"]["routed_experts"] == new["meta_info"]["routed_experts"]


async def test_running_requests_and_a_missing_flag_are_400s(checkpoints):
    async with real(checkpoints / "0") as (client, _):
        assert "enable-memory-saver" in (await post(client, "/release_memory_occupation", status=400)).text
        assert (await client.get("/server_info")).json()["enable_memory_saver"] is False
    long = {"input_ids": [5, 6], "sampling_params": {**GREEDY, "max_new_tokens": 900}, "rid": "long"}
    async with real(checkpoints / "0", enable_memory_saver=True) as (client, _):
        assert (await client.get("/server_info")).json()["enable_memory_saver"] is True
        running = asyncio.create_task(client.post("/generate", json=long))
        while (await client.get("/v1/loads")).json()["loads"][0]["num_running_reqs"] == 0:
            await asyncio.sleep(0.01)
        assert "running" in (await post(client, "/release_memory_occupation", status=400)).text
        await post(client, "/abort_request", {"rid": "long"})
        assert (await running).status_code == 200
