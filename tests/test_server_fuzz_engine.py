"""Bodies for /generate, good and bad, over a real engine, and callers that leave: no crash, no hang, no leaked page."""

from __future__ import annotations

import asyncio
import shutil

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_http import TOKENIZER
from test_contract_table import GENERATE, SAMPLING
from tiny import save

from tracklayer.config import EngineConfig
from tracklayer.engine.thread import EngineThread
from tracklayer.errors import UserError
from tracklayer.server.app import create_app
from tracklayer.server.config import ServerConfig
from tracklayer.server.service import build_service

ODD = [None, -1, 0, 1, 2, 1 << 31, 1 << 70, 0.5, -0.1, 1e300, "", "a", "\x00", [], {}, [0], [[5]], True, {"5": 1}]


def values(table, name):
    beside, good, bad = table[name]
    return st.tuples(st.just(beside), st.sampled_from([*good, *bad, *ODD]))


@st.composite
def bodies(draw):
    """A body that would succeed, and up to three changes to it."""
    params = {"max_new_tokens": draw(st.integers(0, 12)), "temperature": draw(st.sampled_from([0, 1.0]))}
    body = {"input_ids": draw(st.lists(st.integers(3, 20), min_size=1, max_size=12))}
    body |= {"return_routed_experts": draw(st.booleans()), "stream": draw(st.booleans())}
    for name in draw(st.lists(st.sampled_from(sorted(SAMPLING)), max_size=2)):
        beside, params[name] = draw(values(SAMPLING, name))
        params |= {key: value for key, value in beside.items() if key not in params}
    for name in draw(st.lists(st.sampled_from(sorted(set(GENERATE) - {"rid", "sampling_params"})), max_size=2)):
        body[name] = draw(values(GENERATE, name))[1]
    return body | {"sampling_params": params}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(event loop's runner, engine, service) over a tiny model whose cache is small enough to run out."""
    folder = tmp_path_factory.mktemp("tiny")
    save("glm4_moe", folder, 0, vocab_size=400, max_position_embeddings=512)
    config = EngineConfig(
        model_path=str(folder), enable_return_routed_experts=True, max_total_tokens=150, random_seed=0, device="cpu",
        skip_route_selftest=True,
    )  # fmt: skip
    engine = EngineThread(config)
    service = build_service(engine, TOKENIZER, ServerConfig(max_samples=4), config)
    with asyncio.Runner() as runner:
        service.frontend.bind(runner.get_loop())
        yield runner, engine, service
        engine.shutdown()
        service.frontend.close()
    shutil.rmtree(folder)


async def talk(service, sent):
    """Send all at once; those with a patience stop waiting after so many seconds. Then nothing may be left."""
    transport = httpx.ASGITransport(create_app(service.config, service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=30) as client:
        tasks = [asyncio.create_task(client.post("/generate", json=body)) for body, _ in sent]
        for task, (_, patience) in zip(tasks, sent, strict=True):
            if patience is not None:
                asyncio.get_running_loop().call_later(patience, task.cancel)
        replies = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
        for (body, patience), reply in zip(sent, replies, strict=True):
            if isinstance(reply, asyncio.CancelledError) and patience is not None:
                continue
            assert isinstance(reply, httpx.Response), (body, reply)
            assert reply.status_code in (200, 400), (body, reply.text)
        assert (await client.post("/flush_cache?timeout=10")).status_code == 200
        load = (await client.get("/v1/loads")).json()["loads"][0]
    assert (load["num_used_tokens"], load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 0, 0)
    for _ in range(1000):  # the front end hears of the end a moment later
        if not service.frontend.num_running:
            break
        await asyncio.sleep(0.005)
    assert service.frontend.num_running == 0 and service.frontend.client.alive()


sendings = st.lists(st.tuples(bodies(), st.sampled_from([None, None, None, 0, 0.002, 0.01])), min_size=1, max_size=5)


@given(sendings)
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
def test_nothing_crashes_hangs_or_leaks(server, sent):
    runner, _, service = server
    runner.run(talk(service, sent))


def test_a_leaked_page_would_be_seen(server, monkeypatch):
    """The check above can fail: with a front end that forgets to abort, a caller that leaves keeps its pages."""
    runner, engine, service = server
    long = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 140, "ignore_eos": True}}
    with monkeypatch.context() as patch:
        patch.setattr(engine, "abort", lambda rid: None)
        runner.run(service.frontend.control("pause", mode="in_place"))
        with pytest.raises((AssertionError, UserError)):
            runner.run(talk(service, [(long, 0.01)]))
    runner.run(service.frontend.control("resume"))
    runner.run(talk(service, []))  # what was left ends by itself
