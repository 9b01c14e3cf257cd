"""Real uvicorn, real sockets: loading, disconnects, slow readers, stopping, a dying engine, many streams."""

from __future__ import annotations

import asyncio
import json
import socket
import threading

import httpx
import pytest
from server_fakes import FakeEngine, info
from server_http import GREEDY, TOKENIZER, events, listening

from tracklayer.config import EngineConfig
from tracklayer.errors import UserError
from tracklayer.server.args import Launch
from tracklayer.server.config import ServerConfig
from tracklayer.server.launch import Runner

LONG = {"temperature": 0, "max_new_tokens": 400}


async def settle(condition, seconds=5.0):
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come about in time")


async def test_answers_503_while_loading_and_200_after():
    go, fake = threading.Event(), FakeEngine(info(400))

    def slow_build(launch):
        go.wait(10)
        return fake, TOKENIZER

    async with listening(build=slow_build) as (url, runner, _, _), httpx.AsyncClient(base_url=url) as client:
        assert (await client.get("/health")).status_code == 503
        reply = await client.post("/generate", json={"text": "a"})
        assert reply.status_code == 503 and "loading" in reply.text and reply.headers["retry-after"]
        go.set()
        await settle(lambda: runner.service is not None)
        assert (await client.get("/health")).status_code == 200
        assert (await client.post("/generate", json={"text": "a", "sampling_params": GREEDY})).status_code == 200


async def test_a_model_that_does_not_load_ends_the_server():
    def broken(launch):
        raise FileNotFoundError("no such weights")

    with pytest.raises(FileNotFoundError, match="no such weights"):
        async with listening(build=broken) as (_, _, _, task):
            await asyncio.wait_for(task, 5)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_frees_its_request(stream):
    async with listening(engine={"step_s": 0.002}) as (url, runner, fake, _):
        await settle(lambda: runner.service is not None)
        async with httpx.AsyncClient(base_url=url) as client:
            body = {"input_ids": [[1], [2]], "sampling_params": LONG, "stream": stream}
            task = asyncio.create_task(client.post("/generate", json=body))
            await settle(lambda: len(fake.live) == 2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await settle(lambda: not fake.live and runner.service.frontend.num_running == 0)
        assert len(fake.aborted) == 2


async def test_paused_stream_notices_that_its_client_left():
    async with listening() as (url, runner, fake, _):
        await settle(lambda: runner.service is not None)
        reader, writer = await asyncio.open_connection("127.0.0.1", runner.port)
        async with httpx.AsyncClient(base_url=url) as client:
            await client.post("/pause_generation", json={"mode": "in_place"})
            body = json.dumps({"text": "a", "stream": True}).encode()
            writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            await writer.drain()
            await settle(lambda: len(fake.live) == 1)
            writer.close()
            await settle(lambda: not fake.live)
        del reader


async def test_slow_reader_stalls_nobody():
    async with listening(engine={"step_s": 0.0005}) as (url, runner, fake, _):
        await settle(lambda: runner.service is not None)
        body = json.dumps({"input_ids": [[i] for i in range(40)], "sampling_params": LONG, "stream": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", runner.port, limit=1024)
        writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        await settle(lambda: len(fake.seen) == 40)
        async with httpx.AsyncClient(base_url=url) as client:  # the slow one has read nothing so far
            reply = await asyncio.wait_for(client.post("/generate", json={"text": "a", "sampling_params": GREEDY}), 5)
            assert reply.status_code == 200
        await settle(lambda: not fake.live, 20)
        rest = b""
        while b"[DONE]" not in rest:
            piece = await asyncio.wait_for(reader.read(1 << 16), 5)
            assert piece
            rest = rest[-20:] + piece
        writer.close()


async def test_many_streams_at_once_are_each_whole():
    async with listening(engine={"step_s": 0.002}) as (url, runner, fake, _):
        await settle(lambda: runner.service is not None)
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=30) as client:

            def ask(i):
                params = {"max_new_tokens": 20, "temperature": 0}
                return client.post("/generate", json={"input_ids": [i], "sampling_params": params, "stream": True})

            replies = await asyncio.gather(*map(ask, range(64)))
        for i, reply in enumerate(replies):
            want = [40 + (i + 13 * k) % 200 for k in range(20)]
            assert events(reply.text)[-1]["output_ids"] == want
        assert not fake.live


async def test_stop_drains_then_aborts_with_partial_output():
    async with listening(engine={"step_s": 0.004}, drain_timeout_s=0.4) as (url, runner, fake, task):
        await settle(lambda: runner.service is not None)
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            short = asyncio.create_task(
                client.post("/generate", json={"text": "a", "sampling_params": {**LONG, "max_new_tokens": 30}})
            )
            long = asyncio.create_task(client.post("/generate", json={"text": "b", "sampling_params": LONG}))
            await settle(lambda: len(fake.live) == 2)
            runner.stop()
            await asyncio.sleep(0.05)
            refused = await client.post("/generate", json={"text": "c"})
            assert refused.status_code == 503 and "stopping" in refused.text
            assert (await client.get("/health")).status_code == 503
            assert (await short).json()["meta_info"]["finish_reason"]["type"] == "length"
            cut = (await long).json()
        assert cut["meta_info"]["finish_reason"]["type"] == "abort" and 0 < cut["meta_info"]["completion_tokens"] < 400
        assert await asyncio.wait_for(task, 10) == 0


async def test_second_signal_does_not_wait():
    async with listening(engine={"step_s": 0.004}, drain_timeout_s=60) as (url, runner, fake, task):
        await settle(lambda: runner.service is not None)
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            long = asyncio.create_task(client.post("/generate", json={"text": "b", "sampling_params": LONG}))
            await settle(lambda: len(fake.live) == 1)
            runner.stop()
            runner.stop()
            assert (await asyncio.wait_for(long, 3)).json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert await asyncio.wait_for(task, 10) == 0


async def test_dead_engine_fails_requests_at_once_and_the_exit_status_says_so():
    async with listening(engine={"step_s": 0.004}) as (url, runner, fake, task):
        await settle(lambda: runner.service is not None)
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            plain = asyncio.create_task(client.post("/generate", json={"text": "b", "sampling_params": LONG}))
            stream = asyncio.create_task(
                client.post("/generate", json={"text": "b", "sampling_params": LONG, "stream": True})
            )
            await settle(lambda: len(fake.live) == 2)
            await asyncio.sleep(0.05)
            fake.die()
            reply = await asyncio.wait_for(plain, 3)
            assert reply.status_code == 500 and "died" in reply.text
            last = events((await asyncio.wait_for(stream, 3)).text)[-1]
            assert last["meta_info"]["finish_reason"]["status_code"] == 500
        assert await asyncio.wait_for(task, 10) == 1


async def test_stopped_while_loading_the_engine_is_shut_down_all_the_same():
    go, fake = threading.Event(), FakeEngine(info(400))

    def slow_build(launch):
        go.wait(10)
        return fake, TOKENIZER

    async with listening(build=slow_build) as (_, runner, _, task):
        runner.stop()
        await asyncio.sleep(0.05)
        go.set()
        assert await asyncio.wait_for(task, 10) == 0
        assert not fake.alive()


async def test_an_address_in_use_is_an_error_that_names_it():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        launch = Launch(EngineConfig(model_path="/models/fake"), ServerConfig(port=port))
        with pytest.raises(UserError, match=f"127.0.0.1:{port}.*--port"):
            await Runner(launch, lambda launch: pytest.fail("nothing is loaded for it")).run()
