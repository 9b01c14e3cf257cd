"""`tracklayer serve` as it is started, HTTP and engine in two processes: killed, flooded, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
from test_server_process import shared_folders
from tiny import save

LONG = {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_new_tokens": 3000, "ignore_eos": True}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save("qwen3_moe", folder, max_position_embeddings=8192)
    return folder


@contextlib.contextmanager
def server(checkpoint, *flags):
    """(address, process, the engine's process) of a server that is ready; its log is kept beside the checkpoint."""
    command = [sys.executable, "-m", "tracklayer.launch_server", str(checkpoint), "--port", "0", "--device", "cpu"]
    command += ["--skip-tokenizer-init", "--max-total-tokens", "9000", "--enable-return-routed-experts", *flags]
    path = checkpoint / "server.log"
    with path.open("wb") as log:
        process = subprocess.Popen(
            command, stderr=log, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        while b"ready in" not in path.read_bytes():
            assert process.poll() is None, path.read_text()
            time.sleep(0.05)
        url = next(line.split()[-3] for line in path.read_text().splitlines() if "ready in" in line)
        engines = [
            p for p in psutil.Process(process.pid).children(recursive=True) if "spawn_main" in " ".join(p.cmdline())
        ]
        assert len(engines) == 1, "the engine has no process of its own"
        yield url, process, engines[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


async def running(client, count):
    while (await client.get("/v1/loads")).json()["loads"][0]["num_running_reqs"] < count:
        await asyncio.sleep(0.02)


async def test_a_flood_is_refused_and_a_stop_of_the_whole_group_drains(checkpoint):
    """More than may wait: 503 with Retry-After, and nothing is lost. SIGTERM to both processes: what runs ends."""
    flags = ("--max-running-requests", "2", "--max-queued-requests", "3", "--drain-timeout-s", "60")
    with server(checkpoint, *flags) as (url, process, engine):
        async with httpx.AsyncClient(base_url=url, timeout=90, limits=httpx.Limits(max_connections=200)) as client:
            short = {**LONG, "sampling_params": {**LONG["sampling_params"], "max_new_tokens": 300}}
            # Two run before the others come: all at once, only as many as may wait would be taken.
            first = [asyncio.create_task(client.post("/generate", json=short)) for _ in range(2)]
            await running(client, 2)
            replies = await asyncio.gather(*first, *(client.post("/generate", json=short) for _ in range(58)))
            by_status = {code: [r for r in replies if r.status_code == code] for code in (200, 503)}
            assert len(by_status[200]) + len(by_status[503]) == 60 and len(by_status[200]) >= 5
            assert all(r.headers["retry-after"] and r.json()["code"] == 503 for r in by_status[503]) and by_status[503]
            assert all(len(r.json()["output_ids"]) == 300 for r in by_status[200])
            assert (await client.get("/v1/loads")).json()["loads"][0]["num_waiting_reqs"] == 0

            tasks = [asyncio.create_task(client.post("/generate", json={**short, "stream": i == 1})) for i in range(2)]
            await running(client, 2)
            os.killpg(process.pid, signal.SIGTERM)
            for _ in range(200):  # a busy machine may take its time to hear of it
                if (await client.get("/health")).status_code == 503:
                    break
                await asyncio.sleep(0.02)
            assert engine.is_running()
            refused = await client.post("/generate", json=short)
            assert refused.status_code == 503 and "stopping" in refused.text
            whole, stream = [(await task).text for task in tasks]
            assert '"length"' in whole and stream.rstrip().endswith("[DONE]") and '"abort"' not in stream + whole
        assert await asyncio.to_thread(process.wait, 20) == 0
        assert not engine.is_running()


async def test_a_drain_that_takes_too_long_ends_with_partial_output(checkpoint):
    with server(checkpoint, "--drain-timeout-s", "0.3") as (url, process, engine):
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            task = asyncio.create_task(client.post("/generate", json={**LONG, "return_routed_experts": True}))
            await running(client, 1)
            process.send_signal(signal.SIGTERM)
            answer = (await task).json()
        meta = answer["meta_info"]
        assert meta["finish_reason"]["type"] == "abort" and meta["completion_tokens"] == len(answer["output_ids"])
        assert meta["routed_experts"]
        assert await asyncio.to_thread(process.wait, 20) == 0 and not engine.is_running()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
async def test_a_crashed_engine_fails_what_runs_at_once_and_the_server_says_so(checkpoint, number):
    with server(checkpoint) as (url, process, engine):
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            tasks = [asyncio.create_task(client.post("/generate", json={**LONG, "stream": i == 1})) for i in range(3)]
            await running(client, 3)
            assert len(shared_folders(process.pid)) == 1
            engine.send_signal(number)
            began = time.monotonic()
            whole, stream, other = [await task for task in tasks]
            assert time.monotonic() - began < 3
            assert whole.status_code == other.status_code == 500 and "engine" in whole.text
            assert stream.text.rstrip().endswith("[DONE]") and '"status_code":500' in stream.text
        assert await asyncio.to_thread(process.wait, 20) == 1
    assert not shared_folders(process.pid)


def test_the_engine_goes_with_a_killed_server(checkpoint):
    with server(checkpoint) as (_, process, engine):
        os.kill(process.pid, signal.SIGKILL)
        engine.wait(10)
    assert not Path(f"/proc/{engine.pid}").exists()


async def test_the_other_way_is_one_process(checkpoint):
    with pytest.raises(AssertionError, match="no process of its own"), server(checkpoint, "--no-engine-process"):
        pass
