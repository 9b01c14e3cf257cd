"""The offline Engine over a fake client: shapes, streams, chat, control, shutdown."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import warnings
from dataclasses import fields

import numpy as np
import pytest
from server_fakes import FakeEngine, byte_level_tokenizer, info, route_rows

import tracklayer
from tracklayer.config import EngineConfig
from tracklayer.engine.flags import SERVER_FLAGS
from tracklayer.engine.llm import RPC_METHODS, Engine, engine_options
from tracklayer.errors import TracklayerError, UserError
from tracklayer.server.config import ServerConfig

TOKENIZER = byte_level_tokenizer()
SHORT = {"temperature": 0, "max_new_tokens": 5}


@pytest.fixture
def engine():
    with Engine.over(FakeEngine(info(400), step_s=0.001), TOKENIZER) as engine:
        yield engine


def test_one_prompt_gives_a_dict_and_lists_give_lists(engine):
    one = engine.generate("The quick", SHORT)
    assert isinstance(one, dict) and len(one["output_ids"]) == 5 and "routed_experts" not in one["meta_info"]
    assert engine.generate(["The quick"], SHORT)[0]["output_ids"] == one["output_ids"]
    pairs = engine.generate(input_ids=[[1], [2]], sampling_params={**SHORT, "n": 2, "temperature": 1})
    assert len(pairs) == 4 and len({a["meta_info"]["id"] for a in pairs}) == 4
    assert isinstance(engine.generate(input_ids=[3], sampling_params={**SHORT, "n": 2}), list)


def test_sampling_params_may_be_an_object(engine):
    params = tracklayer.SamplingParams(max_new_tokens=3)
    assert engine.generate("hi", params)["meta_info"]["completion_tokens"] == 3


def test_routes_come_as_a_routes_object(engine):
    answer = engine.generate(input_ids=[4, 5, 6], sampling_params=SHORT, return_routed_experts=True)
    routes = answer["meta_info"]["routed_experts"]
    assert isinstance(routes, tracklayer.Routes) and routes.complete
    np.testing.assert_array_equal(routes.experts_TLK, route_rows([4, 5, 6, *answer["output_ids"][:-1]]))
    only = {"max_new_tokens": 0}
    for last in (False, True):
        answer = engine.generate(
            input_ids=[4, 5, 6], sampling_params=only, return_routed_experts=True, include_last=last
        )
        assert len(answer["meta_info"]["routed_experts"]) == 2 + last


def test_chat_messages_go_through_the_template(engine):
    chat = [{"role": "user", "content": "hi"}]
    answer = engine.generate(messages=chat, sampling_params=SHORT, return_prompt_token_ids=True)
    assert answer["prompt_token_ids"] == TOKENIZER.chat_ids(chat)
    assert len(engine.generate(messages=[chat, chat], sampling_params=SHORT)) == 2
    with pytest.raises(UserError, match="not several"):
        engine.generate("x", messages=chat)


def test_stream_is_cumulative_and_breaking_off_aborts(engine):
    chunks = list(engine.generate("The quick", {**SHORT, "max_new_tokens": 12}, stream=True))
    assert [c["meta_info"]["finish_reason"] is None for c in chunks[:-1]] == [True] * (len(chunks) - 1)
    assert chunks[-1]["meta_info"]["completion_tokens"] == 12 and "index" not in chunks[0]
    stream = engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 400, "n": 2}, stream=True)
    assert next(stream)["index"] in (0, 1)
    stream.close()
    while engine._frontend.num_running:
        pass
    assert len(engine._client.aborted) == 2


def test_async_generate_and_stream_on_the_callers_loop(engine):
    async def run():
        answers = await asyncio.gather(*(engine.async_generate(f"p {i}", SHORT) for i in range(4)))
        stream = await engine.async_generate("The quick", SHORT, stream=True)
        return answers, [c async for c in stream]

    answers, chunks = asyncio.run(run())
    assert [a["meta_info"]["completion_tokens"] for a in answers] == [5] * 4
    assert len(chunks[-1]["output_ids"]) == 5


def test_many_threads_share_one_engine(engine):
    out = {}
    threads = [
        threading.Thread(target=lambda i=i: out.update({i: engine.generate(input_ids=[i + 1], sampling_params=SHORT)}))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(out[i] | {"meta_info": 0} == engine.generate(input_ids=[i + 1], sampling_params=SHORT) | {"meta_info": 0}
               for i in range(8))  # fmt: skip


def test_progress_bar_counts_every_sequence(engine, capsys):
    engine.generate(["a", "b", "c"], {**SHORT, "n": 2}, progress=True)
    assert "6/6" in capsys.readouterr().err


def test_unknown_arguments_are_type_errors():
    with pytest.raises(TypeError, match="max_running_requests"):
        Engine("nowhere", max_runing_requests=3)
    with Engine.over(FakeEngine(info(400)), TOKENIZER) as engine, pytest.raises(TypeError, match="return_routes"):
        engine.generate("x", return_routes=True)


def test_flags_of_others_are_translated_warned_about_or_refused():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config, text = engine_options(
            {"model": "m", "max_num_seqs": 7, "attention_backend": "fa3", "dp_size": 1, "log_level": "x"}
        )
    assert config == EngineConfig(model_path="m", max_running_requests=7) and text == {"log_level": "x"}
    assert [str(w.message).split()[0] for w in caught] == ["--attention-backend"]
    with pytest.raises(UserError, match="--quantization fp8"):
        engine_options({"quantization": "fp8"})


def test_control(engine):
    assert engine.flush_cache().success
    assert engine.update_weights_from_disk("/models/next", weight_version="7") == (
        True,
        "Succeeded to update model weights. Weight version updated to 7.",
    )
    assert engine.get_model_info()["weight_version"] == "7" and engine.get_model_info()["model_path"] == "/models/next"
    assert engine.update_weights_from_disk("/models/missing")[0] is False
    assert engine.get_model_info()["model_path"] == "/models/next"
    assert engine.generate("hi", SHORT)["meta_info"]["weight_version"] == "7"
    assert engine.update_weight_version("8")[0] and engine.generate("hi", SHORT)["meta_info"]["weight_version"] == "8"
    assert engine.get_weights_by_name("model.norm.weight", 2) == [1.0, 1.0]
    with pytest.raises(UserError, match="no weight"):
        engine.get_weights_by_name("x")
    with pytest.raises(UserError, match="mode"):
        engine.pause_generation("sometimes")
    served = engine.get_server_info()
    assert served["enable_return_routed_experts"] is False and served["max_total_num_tokens"] == 4096


def test_collective_rpc_calls_control_methods_alone(engine):
    assert engine.collective_rpc("flush_cache") == [engine.flush_cache()]
    assert engine.collective_rpc("update_weight_version", new_version="7")[0][0] is True
    assert engine.generate("ab", {"max_new_tokens": 1})["meta_info"]["weight_version"] == "7"
    assert all(callable(getattr(Engine, name)) for name in RPC_METHODS)
    for method in ("shutdown", "collective_rpc", "_open", "save_sharded_model", ""):
        with pytest.raises(UserError, match="flush_cache"):
            engine.collective_rpc(method)
    with pytest.raises(TypeError):
        engine.collective_rpc("flush_cache", path="x")


def test_pause_holds_new_requests_until_continue(engine):
    engine.pause_generation("in_place")
    done = []
    thread = threading.Thread(target=lambda: done.append(engine.generate("hi", SHORT)))
    thread.start()
    thread.join(0.1)
    assert not done
    engine.continue_generation()
    thread.join(5)
    assert done


def test_abort_and_shutdown_end_what_runs():
    engine = Engine.over(FakeEngine(info(400), step_s=0.005), TOKENIZER)
    results = []

    def ask(i):
        try:
            results.append(engine.generate("hi", {"max_new_tokens": 400}, rid=f"r{i}")["meta_info"]["finish_reason"])
        except TracklayerError as error:
            results.append(str(error))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    while engine._frontend.num_running < 2:
        pass
    engine.abort_request("r0")
    threads[0].join(5)
    engine.shutdown()
    engine.shutdown()
    threads[1].join(5)
    assert results[0]["type"] == "abort" and "shut down" in results[1]


def test_exports_are_lazy():
    code = "import sys, tracklayer; tracklayer.Routes; assert 'torch' not in sys.modules; tracklayer.Engine"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert set(tracklayer.__all__) <= set(dir(tracklayer))
    with pytest.raises(AttributeError, match="Nothing"):
        tracklayer.Nothing  # noqa: B018


def test_an_engine_takes_every_flag_of_the_server():
    """Trainers hand one mapping of flags to either; those that mean nothing here warn, unknown ones are refused."""
    for field in fields(ServerConfig):
        given = {"model_path": "m", field.name: field.default}
        if field.name in SERVER_FLAGS:
            with pytest.warns(UserWarning, match=f"{field.name} has no effect"):
                engine_options(given)
        else:
            assert engine_options(given)[1] == {field.name: field.default}
    assert {field.name for field in fields(ServerConfig)} >= SERVER_FLAGS


def over(**options):
    return Engine.over(FakeEngine(info(400)), TOKENIZER, **options)


def test_an_engine_keeps_the_servers_defaults_for_requests():
    with over(preferred_sampling_params={"max_new_tokens": 3}, allow_auto_truncate=True) as engine:
        assert len(engine.generate("a")["output_ids"]) == 3
        assert len(engine.generate(input_ids=[5] * 600)["output_ids"]) == 1
    with over(preferred_sampling_params='{"max_new_tokens": 4}', stream_interval=2) as engine:
        assert [len(chunk["output_ids"]) for chunk in engine.generate("a", stream=True)][-1] == 4
    for wrong in ("[]", "{", 3):
        with pytest.raises(UserError, match="preferred_sampling_params"):
            over(preferred_sampling_params=wrong)
