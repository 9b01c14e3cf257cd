"""/metrics over a real engine: SGLang's names are there, and our own say what happened."""

from __future__ import annotations

import asyncio

import pytest
from test_server_engine import GREEDY, real
from tiny import save

from tracklayer.server.config import ServerConfig

SGLANG = [
    "num_running_reqs",
    "num_queue_reqs",
    "num_used_tokens",
    "token_usage",
    "gen_throughput",
    "cache_hit_rate",
    "utilization",
    "max_total_num_tokens",
    "num_retracted_reqs",
    "num_paused_reqs",
    "prompt_tokens_total",
    "generation_tokens_total",
    "cached_tokens_total",
    "num_requests_total",
    "num_aborted_requests_total",
    "spec_accept_length",
    "spec_accept_rate",
    "weight_load_duration_seconds",
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "e2e_request_latency_seconds_count",
    "queue_time_seconds_count",
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save("glm4_moe", folder, vocab_size=400, max_position_embeddings=1024)
    return folder


async def metrics(client):
    text = (await client.get("/metrics")).text
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name.partition("{")[0]: float(value) for name, value in found.items() if "le=" not in name}


async def test_names_and_numbers(checkpoint):
    ask = {"input_ids": list(range(3, 40)), "sampling_params": GREEDY, "return_routed_experts": True}
    server = ServerConfig(enable_metrics=True)
    options = {"skip_route_selftest": False, "enable_memory_saver": True}
    async with real(checkpoint, server, **options) as (client, _):
        assert (await client.post("/generate", json=ask)).status_code == 200
        found = await metrics(client)
        missing = [name for name in SGLANG if f"sglang:{name}" not in found]
        assert not missing
        assert found["tracklayer:route_selftest_passed"] == 1 and found["tracklayer:paused"] == 0
        assert 0 < found["tracklayer:route_gather_seconds_total"] < 5
        assert 0 < found["tracklayer:route_wait_seconds_total"] < 5
        assert found["tracklayer:route_rows_total"] == 37 + GREEDY["max_new_tokens"] - 1
        assert found["sglang:weight_load_duration_seconds"] > 0
        assert found["sglang:queue_time_seconds_sum"] < 0.3

        await client.post("/pause_generation")
        held = asyncio.create_task(client.post("/generate", json=ask))
        while (found := await metrics(client))["sglang:num_queue_reqs"] == 0:
            await asyncio.sleep(0.01)
        assert (found["tracklayer:paused"], found["sglang:num_paused_reqs"]) == (1, 1)
        await asyncio.sleep(0.4)
        await client.post("/continue_generation")
        assert (await held).status_code == 200
        found = await metrics(client)
        assert 0.4 <= found["sglang:queue_time_seconds_sum"] < 5 and found["sglang:queue_time_seconds_count"] == 2

        await client.post("/release_memory_occupation", json={"tags": ["weights", "kv_cache"]})
        assert (await metrics(client))["tracklayer:released_memory"] == 2
        await client.post("/resume_memory_occupation")
        info = (await client.get("/server_info")).json()
        assert info["route_selftest"] == "passed" and info["internal_states"][0]["memory_usage"]["weight"] > 0


async def test_a_skipped_self_test_shows(checkpoint):
    async with real(checkpoint, ServerConfig(enable_metrics=True)) as (client, _):
        assert (await metrics(client))["tracklayer:route_selftest_passed"] == 0
        assert (await client.get("/server_info")).json()["route_selftest"] == "skipped"
