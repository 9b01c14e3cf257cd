"""The engine behind a process border: records and arrays arrive as they were, and each side survives the other."""

from __future__ import annotations

import asyncio
import builtins
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_fakes import FakeEngine, byte_level_tokenizer, info, route_rows

from tracklayer.config import EngineConfig
from tracklayer.engine.frontend import TextFrontend
from tracklayer.engine.intake import GenerateCall
from tracklayer.engine.llm import Engine
from tracklayer.engine.process import EngineProcess
from tracklayer.engine.wire import SHARED_BYTES, Wire
from tracklayer.errors import CheckpointError, TracklayerError, UserError
from tracklayer.types import EngineRequest, FinishReason, RequestOutput, SamplingParams, TokenLogprobs

CONFIG = EngineConfig(model_path="/models/fake")


def build_fake(config):
    return FakeEngine(info(400, context_length=1 << 20, max_request_tokens=1 << 20), step_s=0.001)


def build_broken(config):
    raise CheckpointError(f"{config.model_path} holds no weights")


def build_faulty(config):
    raise ZeroDivisionError("a fault of ours")


def build_dying(config):
    os._exit(7)


def build_slowly(config):
    time.sleep(60)


def shared_folders(pid=None):
    """What lies in shared memory of engines that this process (or `pid`) started."""
    return set(Path("/dev/shm").glob(f"tracklayer-{pid or os.getpid()}-*")) if Path("/dev/shm").is_dir() else set()


@given(
    st.builds(
        SamplingParams,
        stop=st.lists(st.text(min_size=1, max_size=3), max_size=3).map(tuple),
        stop_token_ids=st.lists(st.integers(0, 99), max_size=3).map(tuple),
        logit_bias=st.lists(st.tuples(st.integers(0, 9), st.floats(-5, 5)), max_size=2).map(tuple),
        sampling_seed=st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
        custom_params=st.none() | st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=2),
    ),
    st.lists(st.integers(0, 400), min_size=1, max_size=20),
    st.frozensets(st.integers(0, 400), max_size=4),
)
@settings(max_examples=100, deadline=None)
def test_requests_come_back_equal(params, ids, stops):
    request = EngineRequest(rid="r", input_ids=ids, sampling=params, stop_token_ids=stops, token_ids_logprob=(3, 4))
    back = Wire(None).unpack(Wire(None).pack(("submit", [request])))[1][0]
    assert back == request and type(back.input_ids) is list and type(back.sampling.stop) is tuple


@pytest.mark.parametrize("rows", [0, 5, 20_000])
def test_arrays_keep_type_shape_and_values_and_leave_nothing_behind(tmp_path, rows):
    wire = Wire(tmp_path)
    routes = np.random.default_rng(0).integers(0, 300, (rows, 3, 2)).astype(np.int16)
    logprobs = TokenLogprobs(np.arange(4, dtype=np.int32), np.array([np.nan, -1, -np.inf, 0], np.float32))
    output = RequestOutput(
        "r", [1, 2], 3, 0, FinishReason("stop", matched="x"), output_logprobs=logprobs, routes=routes
    )
    raw = wire.pack([output])
    assert len(list(tmp_path.iterdir())) == (routes.nbytes >= SHARED_BYTES) and len(raw) < SHARED_BYTES + 500
    (back,) = wire.unpack(raw)
    assert list(tmp_path.iterdir()) == []
    np.testing.assert_array_equal(back.routes, routes)
    np.testing.assert_array_equal(back.output_logprobs.logprobs, logprobs.logprobs)
    assert back.routes.dtype == np.int16 and back.new_token_ids == [1, 2] and back.finish == output.finish


def test_what_can_not_travel_is_refused_by_name():
    with pytest.raises(TypeError, match="object"):
        Wire(None).pack(object())


def test_the_offline_engine_works_over_a_process_and_cleans_up():
    before = shared_folders()
    with Engine.over(EngineProcess(CONFIG, build_fake), byte_level_tokenizer()) as engine:
        assert os.getpid() != engine._client._process.pid and engine._client.info.vocab_size == 400
        prompt = list(range(1, 300)) * 60  # large enough for shared memory
        answer = engine.generate(
            input_ids=prompt, sampling_params={"max_new_tokens": 5}, return_routed_experts=True, return_logprob=True
        )
        routes = answer["meta_info"]["routed_experts"]
        assert routes.nbytes > SHARED_BYTES
        np.testing.assert_array_equal(routes.experts_TLK, route_rows([*prompt, *answer["output_ids"][:-1]]))
        assert len(answer["meta_info"]["output_token_logprobs"]) == 5
        assert engine.flush_cache().success
        assert engine.update_weights_from_disk("/models/missing") == (
            False,
            "'/models/missing' is not a checkpoint directory",
        )
        with pytest.raises(UserError, match="no weight"):
            engine.get_weights_by_name("x")
        stops = engine.generate("a", {"max_new_tokens": 500, "stop_regex": "."})
        assert stops["meta_info"]["finish_reason"]["type"] == "stop"
    assert shared_folders() == before
    engine._client.shutdown()


def test_errors_while_starting_come_through():
    before = shared_folders()
    for build, kind, message in (
        (build_broken, CheckpointError, "holds no weights"),
        (build_faulty, TracklayerError, "ZeroDivisionError: a fault of ours"),
        (build_dying, TracklayerError, "code 7"),
    ):
        with pytest.raises(kind, match=message):
            EngineProcess(CONFIG, build)
    assert shared_folders() == before


def test_a_killed_engine_fails_what_runs_at_once():
    async def run():
        engine = EngineProcess(CONFIG, build_fake)
        frontend = TextFrontend(engine, None)
        frontend.bind(asyncio.get_running_loop())
        calls = [GenerateCall(input_ids=[i], sampling_params={"max_new_tokens": 100_000}) for i in range(3)]
        tasks = [asyncio.create_task(frontend.generate(call)) for call in calls]
        await asyncio.sleep(0.3)
        os.kill(engine._process.pid, signal.SIGKILL)
        began = time.monotonic()
        for task in tasks:
            with pytest.raises(TracklayerError, match="ended with code -9"):
                await asyncio.wait_for(task, 5)
        assert time.monotonic() - began < 3 and not engine.alive() and frontend.num_running == 0
        with pytest.raises(TracklayerError, match="not running"):
            await frontend.control("loads")
        engine.shutdown()
        frontend.close()

    asyncio.run(run())


PARENT = """
import sys, time
sys.path.insert(0, {tests!r})
from test_server_process import CONFIG, EngineProcess, build_fake
if __name__ == "__main__":
    engine = EngineProcess(CONFIG, build_fake)
    print(engine._process.pid, engine._folder, flush=True)
    time.sleep(60)
"""


def test_the_engine_ends_with_its_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(tests=str(Path(__file__).parent)))
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    pid, folder = parent.stdout.readline().split()
    parent.kill()
    parent.wait()
    for _ in range(500):
        if not Path(f"/proc/{pid}").exists() and not Path(folder).exists():
            return
        time.sleep(0.01)
    raise AssertionError(f"engine {pid} or its folder {folder} outlived the parent")


def test_a_start_that_is_stopped_ends_at_once_and_leaves_nothing():
    before, stop = shared_folders(), threading.Event()
    threading.Timer(0.5, stop.set).start()
    began = time.monotonic()
    with pytest.raises(TracklayerError, match="stopped while it started"):
        EngineProcess(CONFIG, build_slowly, stop=stop)
    assert time.monotonic() - began < 10 and shared_folders() == before


def test_what_can_not_be_sent_is_not_waited_for():
    engine = EngineProcess(CONFIG, build_fake)
    try:
        with pytest.raises(UserError, match="71 bits"):
            engine.control("get_weights_by_name", name="a", truncate_size=1 << 70)
        assert not engine._futures
    finally:
        engine.shutdown()


def test_arrays_go_through_the_socket_when_shared_memory_is_full(tmp_path, monkeypatch):
    """A full tmpfs lets a file grow and kills who writes into the mapping: only a write tells."""
    wire, array = Wire(tmp_path), np.arange(SHARED_BYTES, dtype=np.uint8)
    real = builtins.open

    def full(path, mode="r", **options):
        if mode == "xb":
            real(path, mode, **options).close()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, mode, **options)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", full)
        raw = wire.pack(array)
    np.testing.assert_array_equal(wire.unpack(raw), array)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [1 << 64, -(1 << 63) - 1, 1 << 20000], ids=["65 bits", "negative", "huge"])
def test_a_number_that_no_wire_takes_is_the_callers_mistake(number):
    with pytest.raises(UserError, match="64 bits at most"):
        Wire(None).pack({"start_step": [number]})
    assert Wire(None).unpack(Wire(None).pack([(1 << 64) - 1, -(1 << 63)])) == ((1 << 64) - 1, -(1 << 63))
