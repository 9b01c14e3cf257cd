"""The server over a real engine with a tiny random model: the peers' end-to-end checks, re-created."""

from __future__ import annotations

import asyncio
import contextlib
import shutil

import httpx
import numpy as np
import pytest
from server_http import TOKENIZER, events
from tiny import save

from tracklayer.config import EngineConfig
from tracklayer.engine.thread import EngineThread
from tracklayer.routes.codec import decode
from tracklayer.routes.forms import RouteShape
from tracklayer.server.app import create_app
from tracklayer.server.config import ServerConfig
from tracklayer.server.service import build_service

TEXTS = ["The quick brown fox", "User: hello", "Über die Straße", "def main():\n    return", "The quick brown dog"]
GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Two checkpoints of one shape with different weights."""
    folder = tmp_path_factory.mktemp("tiny")
    for seed in (0, 1):
        save("glm4_moe", folder / str(seed), seed, vocab_size=400, max_position_embeddings=1024)
    yield folder
    shutil.rmtree(folder)


@contextlib.asynccontextmanager
async def real(path, server=None, **options):
    """(client, service) over an EngineThread; at the end nothing may be left in the cache."""
    settings = {"max_total_tokens": 2000, "random_seed": 0, "device": "cpu", "skip_route_selftest": True}
    config = EngineConfig(model_path=str(path), enable_return_routed_experts=True, **{**settings, **options})
    engine = EngineThread(config)
    service = build_service(engine, TOKENIZER, server or ServerConfig(), config)
    service.frontend.bind(asyncio.get_running_loop())
    transport = httpx.ASGITransport(create_app(service.config, service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
        yield client, service
        assert (await client.post("/flush_cache?timeout=10")).status_code == 200
        assert (await client.get("/v1/loads")).json()["loads"][0]["num_used_tokens"] == 0
    await asyncio.to_thread(engine.shutdown)
    service.frontend.close()


def rows_of(payload, service, start=0):
    info = service.info
    shape = RouteShape(
        layer_ids=info.layer_ids, top_k=info.top_k, num_experts=info.num_experts, num_hidden_layers=info.num_layers
    )
    return decode(payload, "sglang", shape, start=start)


async def test_three_endpoints_and_every_mixture_agree_on_tokens_and_routes(checkpoints):
    """All at once, some asking and some not, through each endpoint: full rows, equal sets, equal texts."""
    async with real(checkpoints / "0") as (client, service):

        def native(text, ask=True):
            return client.post(
                "/generate", json={"text": text, "sampling_params": GREEDY, "return_routed_experts": ask}
            )

        def completion(text):
            body = {
                "prompt": text,
                "max_tokens": 24,
                "temperature": 0,
                "ignore_eos": True,
                "return_routed_experts": True,
            }
            return client.post("/v1/completions", json=body)

        def chat(text):
            body = {"messages": [], "input_ids": TOKENIZER.encode(text), "temperature": 0, "max_tokens": 24,
                    "ignore_eos": True, "return_routed_experts": True}  # fmt: skip
            return client.post("/v1/chat/completions", json=body)

        jobs = [f(t) for t in TEXTS for f in (native, completion, chat)] + [native(t, False) for t in TEXTS]
        replies = [r.json() for r in await asyncio.gather(*jobs)]
        for i, text in enumerate(TEXTS):
            first, second, third = replies[3 * i : 3 * i + 3]
            routes = rows_of(first["meta_info"]["routed_experts"], service)
            assert len(routes) == len(TOKENIZER.encode(text)) + 24 - 1 and routes.complete
            assert rows_of(second["sglext"]["routed_experts"], service) == routes
            assert rows_of(third["sglext"]["routed_experts"], service) == routes
            assert first["text"] == second["choices"][0]["text"] == third["choices"][0]["message"]["content"]
        assert all("routed_experts" not in reply["meta_info"] for reply in replies[-len(TEXTS) :])


async def test_start_length_cache_key_and_prefix_hits(checkpoints):
    async with real(checkpoints / "0") as (client, service):
        prompt = TOKENIZER.encode("The capital of France")
        length = len(prompt)

        async def ask(start, **more):
            body = {"input_ids": prompt, "sampling_params": GREEDY, "return_routed_experts": True, **more}
            return (await client.post("/generate", json={**body, "routed_experts_start_len": start})).json()[
                "meta_info"
            ]

        whole = rows_of((await ask(0))["routed_experts"], service)
        assert len(whole) == length + 24 - 1
        for start in (1, length // 2, length):
            meta = await ask(start)
            assert meta["routed_experts_start_len"] == start
            assert rows_of(meta["routed_experts"], service, start) == whole.tokens(start)
        fresh = [await ask(length // 2, extra_key="fresh") for _ in range(2)]
        assert fresh[0]["cached_tokens"] == 0 and fresh[1]["cached_tokens"] > length // 2
        for meta in fresh:
            assert rows_of(meta["routed_experts"], service, length // 2) == whole.tokens(length // 2)


async def test_logprobs_line_up_with_the_tokens_and_across_forms(checkpoints):
    async with real(checkpoints / "0", chunked_prefill_size=8) as (client, _):
        prompt = TOKENIZER.encode("The quick brown fox jumps over the lazy dog.")
        body = {"input_ids": prompt, "sampling_params": GREEDY, "return_logprob": True, "top_logprobs_num": 2,
                "logprob_start_len": 0, "token_ids_logprob": [3, 4], "extra_key": "a"}  # fmt: skip
        meta = (answer := (await client.post("/generate", json=body)).json())["meta_info"]
        assert [t[1] for t in meta["input_token_logprobs"]] == prompt and meta["input_token_logprobs"][0][0] is None
        assert all(p < 0 for p, _, _ in meta["input_token_logprobs"][1:])
        assert len(meta["input_top_logprobs"]) == len(meta["input_token_ids_logprobs"]) == len(prompt)
        for chosen, top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
            assert chosen[:2] == pytest.approx(top[0][:2]) and len(top) == 2  # greedy takes the best
        # what was generated, scored as a prompt, has the same log-probabilities
        again = {**body, "input_ids": [*prompt, *answer["output_ids"]], "sampling_params": {"max_new_tokens": 0}}
        scored = (await client.post("/generate", json={**again, "logprob_start_len": len(prompt) - 1})).json()[
            "meta_info"
        ]
        assert scored["output_token_logprobs"] == [] and scored["completion_tokens"] == 0
        got = [p for p, _, _ in scored["input_token_logprobs"][1:]]
        np.testing.assert_allclose(got, [p for p, _, _ in meta["output_token_logprobs"]], atol=1e-4)


async def test_samples_share_a_prompt_and_the_first_equals_n_1(checkpoints):
    async with real(checkpoints / "0") as (client, service):
        params = {"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True, "sampling_seed": 11}
        body = {"text": "The quick brown fox", "sampling_params": params, "return_routed_experts": True}
        one = (await client.post("/generate", json=body)).json()
        four = (await client.post("/generate", json={**body, "sampling_params": {**params, "n": 4}})).json()
        assert four[0]["output_ids"] == one["output_ids"]
        assert len({tuple(a["output_ids"]) for a in four}) == 4
        assert four[0]["meta_info"]["routed_experts"] == one["meta_info"]["routed_experts"]
        streamed = events((await client.post("/generate", json={**body, "stream": True})).text)[-1]
        assert streamed["output_ids"] == one["output_ids"]
        assert streamed["meta_info"]["routed_experts"] == one["meta_info"]["routed_experts"]
        length = one["meta_info"]["prompt_tokens"]
        assert all(len(rows_of(a["meta_info"]["routed_experts"], service)) == length + 15 for a in four)


async def test_stop_string_ends_routes_with_the_tokens(checkpoints):
    async with real(checkpoints / "0") as (client, service):
        body = {"text": "The quick", "sampling_params": {**GREEDY, "max_new_tokens": 60}, "return_routed_experts": True}
        whole = (await client.post("/generate", json=body)).json()
        stop = whole["text"][5:8]
        body["sampling_params"] = {**body["sampling_params"], "stop": stop}
        cut = (await client.post("/generate", json={**body, "return_logprob": True})).json()
        meta, count = cut["meta_info"], cut["meta_info"]["completion_tokens"]
        assert meta["finish_reason"] == {"type": "stop", "matched": stop} and count < 60
        assert cut["output_ids"] == whole["output_ids"][:count] and len(meta["output_token_logprobs"]) == count
        assert cut["text"] == whole["text"][: whole["text"].index(stop)]
        routes = rows_of(meta["routed_experts"], service)
        assert len(routes) == meta["prompt_tokens"] + count - 1
        assert routes == rows_of(whole["meta_info"]["routed_experts"], service).tokens(0, len(routes))


async def test_pause_in_place_freezes_and_continue_finishes(checkpoints):
    async with real(checkpoints / "0") as (client, _):
        params = {**GREEDY, "max_new_tokens": 60}
        tasks = [
            asyncio.create_task(client.post("/generate", json={"text": t, "sampling_params": params})) for t in TEXTS
        ]
        await asyncio.sleep(0.05)
        await client.post("/pause_generation", json={"mode": "in_place"})
        before = sum(t.done() for t in tasks)
        await asyncio.sleep(0.3)
        assert sum(t.done() for t in tasks) == before < len(tasks)
        assert (await client.post("/flush_cache")).status_code == 400
        await client.post("/continue_generation")
        assert all(r.json()["meta_info"]["completion_tokens"] == 60 for r in await asyncio.gather(*tasks))


async def test_weight_update_in_a_pause_splits_the_versions_and_a_bad_one_changes_nothing(checkpoints):
    async with real(checkpoints / "0") as (client, service):
        params = {**GREEDY, "max_new_tokens": 200}
        body = {"text": TEXTS[0], "sampling_params": params, "return_logprob": True, "return_routed_experts": True,
                "stream": True}  # fmt: skip
        task = asyncio.create_task(client.post("/generate", json=body))
        await asyncio.sleep(0.2)
        await client.post("/pause_generation", json={"mode": "retract"})
        bad = await client.post("/update_weights_from_disk", json={"model_path": str(checkpoints)})
        assert (
            bad.status_code == 400 and (await client.get("/get_weight_version")).json()["weight_version"] == "default"
        )
        update = {"model_path": str(checkpoints / "1"), "weight_version": "2", "flush_cache": False}
        reply = await client.post("/update_weights_from_disk", json=update)
        assert reply.status_code == 200, reply.text
        await client.post("/continue_generation")
        meta = events((await task).text)[-1]["meta_info"]
        spans = meta["weight_versions"]
        assert meta["weight_version"] == spans[-1]["version"] == "2" and spans[0]["version"] == "default"
        assert [s["start"] for s in spans[1:]] == [s["end"] for s in spans[:-1]]
        assert (spans[0]["start"], spans[-1]["end"]) == (0, 200)
        assert len(rows_of(meta["routed_experts"], service)) == meta["prompt_tokens"] + 199
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        assert (await client.post("/v1/chat/completions", json=chat)).json()["metadata"]["weight_version"] == "2"


async def test_too_small_a_cache_refuses_the_impossible_and_finishes_the_rest(checkpoints):
    async with real(checkpoints / "0", max_total_tokens=120) as (client, service):
        reply = await client.post("/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 300}})
        assert reply.status_code == 400 and "--max-total-tokens" in reply.text
        params = {**GREEDY, "max_new_tokens": 40}
        jobs = [
            client.post(
                "/generate", json={"input_ids": [i, i + 1], "sampling_params": params, "return_routed_experts": True}
            )
            for i in range(2, 12)
        ]
        answers = [r.json() for r in await asyncio.gather(*jobs)]
        assert all(len(rows_of(a["meta_info"]["routed_experts"], service)) == 41 for a in answers)
        assert sum(a["meta_info"]["num_retractions"] for a in answers) > 0


async def test_a_full_queue_is_503_and_what_was_accepted_is_answered(checkpoints):
    async with real(checkpoints / "0", max_queued_requests=2, max_running_requests=1) as (client, _):
        await client.post("/pause_generation", json={"mode": "in_place"})
        ask = {"text": "a", "sampling_params": GREEDY}
        tasks = [asyncio.create_task(client.post("/generate", json=ask)) for _ in range(6)]
        await asyncio.sleep(0.2)
        await client.post("/continue_generation")
        replies = await asyncio.gather(*tasks)
        assert sorted(r.status_code for r in replies) == [200, 200, 503, 503, 503, 503]
        assert all(r.headers["retry-after"] for r in replies if r.status_code == 503)
