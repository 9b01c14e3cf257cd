"""Profiles: the trace holds the steps that were asked for, and one is taken at a time."""

from __future__ import annotations

import gzip
import json

import pytest
import tiny
from engine_tools import SMALL

import tracklayer
from tracklayer.engine.profile import Profiler
from tracklayer.errors import UserError

ASK = {"input_ids": [3, 4, 5], "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_moe")
    tiny.save("qwen3_moe", folder)
    with tracklayer.Engine(str(folder), skip_tokenizer_init=True, **SMALL) as engine:
        yield engine


def steps_in(path):
    """Samplings in a trace: one a step."""
    with gzip.open(path) as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    return names.count("aten::embedding")


def test_until_stopped(engine, tmp_path):
    engine.start_profile(output_dir=str(tmp_path / "new"), activities=["CPU"])
    with pytest.raises(UserError, match="already"):
        engine.start_profile()
    engine.generate(**ASK)
    path = engine.stop_profile()
    assert path.startswith(str(tmp_path / "new")) and steps_in(path) == 12
    with pytest.raises(UserError, match="no profile"):
        engine.stop_profile()


def test_some_steps_from_a_given_one(engine, tmp_path):
    done = engine.get_server_info()["internal_states"][0]["steps"]
    engine.start_profile(output_dir=str(tmp_path), start_step=done + 3, num_steps=5, with_stack=True)
    assert not list(tmp_path.iterdir())
    engine.generate(**ASK)
    (path,) = tmp_path.iterdir()
    assert steps_in(path) == 5
    with pytest.raises(UserError, match="no profile"):
        engine.stop_profile()


def test_one_that_had_not_begun_ends_without_a_trace(engine, tmp_path):
    engine.start_profile(output_dir=str(tmp_path), start_step=10**9)
    assert engine.stop_profile() is None and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ({"activities": ["CPU", "TPU"]}, "TPU"),
        ({"num_steps": 0}, "num_steps"),
        ({"start_step": True}, "start_step"),
        ({"start_step": "5"}, "start_step"),
    ],
)
def test_wrong_orders_are_refused_and_leave_none(engine, tmp_path, order, said):
    with pytest.raises(UserError, match=said):
        engine.start_profile(output_dir=str(tmp_path), **order)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="can not be made"):
        engine.start_profile(output_dir=str(tmp_path / "file" / "inside"))
    engine.start_profile(output_dir=str(tmp_path), start_step=10**9)
    engine.stop_profile()


def test_steps_are_counted_where_the_engine_counts_them(tmp_path):
    profiler = Profiler()
    profiler.advance(3)
    profiler.start(7, str(tmp_path), start_step=2, num_steps=1, activities=["CPU"])
    profiler.advance(7)
    assert not list(tmp_path.iterdir())
    profiler.advance(8)
    assert len(list(tmp_path.iterdir())) == 1


def test_what_goes_wrong_with_a_profile_ends_the_profile_alone(engine, tmp_path, caplog):
    """Another profiler in the process, a folder that is gone: the engine goes on, and the next profile works."""
    orders = Profiler()
    folder = tmp_path / "gone"
    orders.start(0, str(folder), num_steps=1, activities=["CPU"])
    folder.rmdir()
    folder.touch()
    orders.advance(1)
    assert "can not be written" in caplog.text
    with pytest.raises(UserError, match="no profile"):
        orders.stop()
    engine.start_profile(output_dir=str(tmp_path / "later"), start_step=1)
    (tmp_path / "later").rmdir()
    (tmp_path / "later").touch()
    engine.generate(**ASK)
    with pytest.raises(UserError, match="can not be written"):
        engine.stop_profile()
    assert len(engine.generate(**ASK)["output_ids"]) == 12
    engine.start_profile(output_dir=str(tmp_path / "good"))
    engine.generate(**ASK)
    assert steps_in(engine.stop_profile()) == 12
