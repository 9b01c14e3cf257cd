"""An Engine's life as careless programs lead it: exit without shutdown, use after it, races with it, forks."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import pytest
import tiny
from engine_tools import SMALL

import tracklayer
from tracklayer.config import EngineConfig
from tracklayer.errors import CapacityError, CheckpointError, TracklayerError, UserError

GREEDY = {"temperature": 0, "max_new_tokens": 3}
ENDLESS = {"max_new_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_moe")
    tiny.save("qwen3_moe", folder)
    return folder


def make(checkpoint, **options) -> tracklayer.Engine:
    return tracklayer.Engine(checkpoint, skip_tokenizer_init=True, **{**SMALL, **options})


def run_script(checkpoint, code: str) -> subprocess.CompletedProcess[str]:
    head = f"""
        import os, sys, tracklayer
        engine = tracklayer.Engine({str(checkpoint)!r}, skip_tokenizer_init=True, device="cpu", max_total_tokens=600)
        """
    script = textwrap.dedent(head) + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)


def test_a_program_that_ends_in_the_middle_of_a_stream_ends_well(checkpoint):
    done = run_script(
        checkpoint,
        f"""
        stream = engine.generate(input_ids=[1, 2], sampling_params={ENDLESS}, stream=True)
        print(len(next(stream)["output_ids"]) > 0)
        """,
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_a_fork_is_told_that_it_has_no_engine_and_may_end(checkpoint):
    done = run_script(
        checkpoint,
        f"""
        child = os.fork()
        if child == 0:
            try:
                engine.generate(input_ids=[1], sampling_params={GREEDY})
            except tracklayer.errors.TracklayerError as error:
                print(error, flush=True)
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print(len(engine.generate(input_ids=[1], sampling_params={GREEDY})["output_ids"]) > 0)
        """,
    )
    assert done.returncode == 0 and "can not be used in a fork" in done.stdout, done.stderr
    assert done.stdout.endswith("True\n")


@pytest.mark.filterwarnings("error")
def test_every_call_after_shutdown_says_so(checkpoint):
    engine = make(checkpoint)
    stream = engine.generate(input_ids=[1], sampling_params=ENDLESS, stream=True)
    next(stream)
    engine.shutdown()
    calls = [
        lambda: engine.generate(input_ids=[1], sampling_params=GREEDY),
        lambda: next(engine.generate(input_ids=[1], sampling_params=GREEDY, stream=True)),
        engine.flush_cache,
        engine.get_server_info,
        lambda: engine.abort_request(abort_all=True),
    ]
    for call in calls:
        with pytest.raises(TracklayerError, match="the engine was shut down"):
            call()
    stream.close()


def test_no_caller_is_left_waiting_by_a_shutdown(checkpoint):
    for _ in range(4):
        engine, ended = make(checkpoint), []

        def ask(engine=engine, ended=ended):
            try:
                while True:
                    engine.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 1})
            except (TracklayerError, CapacityError) as error:
                ended.append(error)

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        engine.shutdown()
        for thread in threads:
            thread.join(5)
        assert len(ended) == 4, f"{4 - len(ended)} of 4 callers wait for ever"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_return_routed_experts": "no"}, "enable_return_routed_experts must be of type bool"),
        ({"mem_fraction_static": "0.5"}, "mem_fraction_static must be of type float"),
        ({"chunked_prefill_size": 1.5}, "chunked_prefill_size must be of type int"),
        ({"max_running_requests": 10**7}, "max_running_requests must be an integer in 1..65536"),
        ({"max_total_tokens": 1 << 31}, "max_total_tokens must be an integer"),
        ({"random_seed": 1 << 70}, "random_seed"),
        ({"max_queued_requests": -1}, "max_queued_requests"),
        ({"model_path": None}, "model_path must be of type str"),
    ],
)
def test_a_flag_of_the_wrong_type_or_out_of_range_is_named(options, message):
    with pytest.raises(UserError, match=message):
        EngineConfig(**options)


@pytest.mark.parametrize(
    "override",
    ['{"num_experts": 0}', '{"num_experts_per_tok": 99}', '{"num_hidden_layers": "x"}', '{"architectures": "Qwen"}'],
)
def test_a_config_that_makes_no_model_is_a_checkpoint_error(checkpoint, override):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        make(checkpoint, json_model_override_args=override)
