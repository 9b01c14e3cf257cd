"""Control of a running engine by callers who ask for nonsense, or stop waiting: it lives on."""

from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import Future

import pytest
import tiny
from engine_tools import SMALL, make_core, request

import tracklayer
from tracklayer.engine.operations import Controls
from tracklayer.errors import UserError

GREEDY = {"temperature": 0, "max_new_tokens": 3}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_moe")
    tiny.save("qwen3_moe", folder)
    return folder


@pytest.fixture(scope="module")
def engine(checkpoint):
    with tracklayer.Engine(str(checkpoint), skip_tokenizer_init=True, **SMALL) as engine:
        yield engine


def lives(engine) -> bool:
    return len(engine.generate(input_ids=[1, 2], sampling_params=GREEDY)["output_ids"]) > 0


BROKEN = {
    "not safetensors": ("model.safetensors", b"\xff" * 100),
    "empty": ("model.safetensors", b""),
    "cut short": ("model.safetensors", None),
    "index: not JSON": ("model.safetensors.index.json", b"{"),
    "index: a list": ("model.safetensors.index.json", b"[]"),
    "index: no map": ("model.safetensors.index.json", b"{}"),
    "index: numbers": ("model.safetensors.index.json", b'{"weight_map": {"a": 5}}'),
    "config: a list": ("config.json", b"[]"),
    "config: not UTF-8": ("config.json", b"\xff\xfe"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_refused_and_the_weights_stay(engine, checkpoint, tmp_path, name):
    file, content = BROKEN[name]
    folder = tmp_path / "broken"
    shutil.copytree(checkpoint, folder)
    (folder / file).write_bytes(content if content is not None else (folder / file).read_bytes()[:-100])
    before = engine.generate(input_ids=[1, 2], sampling_params=GREEDY)["output_ids"]
    success, message = engine.update_weights_from_disk(str(folder))
    assert not success and file in message
    assert engine.generate(input_ids=[1, 2], sampling_params=GREEDY)["output_ids"] == before


def test_a_checkpoint_whose_config_says_another_model_is_refused(engine, checkpoint, tmp_path):
    """The same shapes with another top_k would run on, with routes of neither model."""
    folder = tmp_path / "other"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    assert engine.update_weights_from_disk(str(folder))[0]
    (folder / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 2}))
    success, message = engine.update_weights_from_disk(str(folder))
    assert not success and "another model" in message


@pytest.mark.parametrize(
    "ask",
    [
        lambda engine: engine.update_weights_from_disk(5),
        lambda engine: engine.update_weight_version(None),
        lambda engine: engine.get_weights_by_name(5),
        lambda engine: engine.get_weights_by_name("lm_head.weight", 1.5),
        lambda engine: engine.get_weights_by_name("lm_head.weight", -1),
    ],
)
def test_values_of_the_wrong_kind(engine, ask):
    with pytest.raises(UserError):
        ask(engine)
    assert lives(engine)


def test_a_caller_that_stops_waiting_does_not_harm_the_engine(engine, monkeypatch):
    """server_info waits a second for the engine; a long step makes it give up."""
    step = engine._client.core.step

    def slow():
        time.sleep(1.5)
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(engine._client.core, "step", slow)
        stream = engine.generate(input_ids=[1, 2], sampling_params=GREEDY, stream=True)
        next(stream)
        assert engine.get_server_info()["internal_states"]
        stream.close()
    assert lives(engine)


def test_a_pause_that_aborts_ends_those_that_wait_for_new_weights_too(checkpoint):
    core, ended = make_core(checkpoint), {}
    controls = Controls(core)

    def steps(count):
        for _ in range(count):
            ended.update({output.rid: output.finish.type for output in core.step() if output.finish})
            controls.poll()

    def ask(name, **arguments):
        answer = Future()
        controls.start(answer, name, arguments)
        return answer

    core.add(request("runs", [1, 2, 3], tokens=200))
    steps(4)
    update = ask("update_weights_from_disk", model_path=str(checkpoint))
    core.add(request("held", [4, 5], tokens=3))
    assert [r.rid for r in core.held] == ["held"] and not update.done()
    ask("pause", mode="abort").result()
    steps(3)
    assert ended == {"runs": "abort", "held": "abort"} and update.result(timeout=0)
