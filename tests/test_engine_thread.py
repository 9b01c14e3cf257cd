"""The engine in its thread: every request gets exactly one end, whatever happens to it or to the engine."""

from __future__ import annotations

import threading

import pytest
import tiny
from engine_tools import SMALL, Result, prompts, request

from tracklayer.config import EngineConfig
from tracklayer.engine.thread import EngineThread
from tracklayer.errors import TracklayerError, UserError

PROMPTS = prompts(6)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_moe")
    tiny.save("qwen3_moe", folder)
    return folder


class Listener:
    """Collects outputs; `wait` until the given requests have ended."""

    def __init__(self, engine: EngineThread) -> None:
        self.results: dict[str, Result] = {}
        self.changed = threading.Condition()
        engine.listen(self.take)

    def take(self, outputs) -> None:
        with self.changed:
            for output in outputs:
                self.results.setdefault(output.rid, Result()).add(output)
            self.changed.notify_all()

    def wait(self, *rids: str) -> dict[str, Result]:
        with self.changed:
            done = self.changed.wait_for(lambda: all(r in self.results and self.results[r].finish for r in rids), 60)
            assert done, f"no end of {[r for r in rids if r not in self.results or not self.results[r].finish]}"
            return self.results

    def wait_tokens(self, rid: str, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: rid in self.results and len(self.results[rid].tokens) >= count, 60)


@pytest.fixture
def engine(checkpoint):
    engine = EngineThread(EngineConfig(model_path=str(checkpoint), **SMALL))
    yield engine
    engine.shutdown()


@pytest.fixture
def listener(engine):
    return Listener(engine)


def test_requests_end_once_with_rows(engine, listener):
    engine.submit([request(str(i), p, tokens=5) for i, p in enumerate(PROMPTS)])
    found = listener.wait(*map(str, range(6)))
    assert all(len(r.tokens) == 5 and len(r.routes) == len(PROMPTS[int(i)]) + 4 for i, r in found.items())


def test_what_can_never_run_ends_at_once(engine, listener):
    bad = {
        "empty": request("empty", []),
        "long": request("long", [1] * 600),
        "sum": request("sum", [1] * 500, tokens=100),
        "good": request("good", PROMPTS[0]),
    }
    engine.submit(list(bad.values()))
    found = listener.wait(*bad)
    assert {rid for rid, r in found.items() if r.finish.status == 400} == {"empty", "long", "sum"}
    assert "the prompt is empty" in found["empty"].finish.message
    assert "600 tokens" in found["long"].finish.message and "512" in found["long"].finish.message
    assert found["good"].finish.type == "length"


def test_abort_waiting_running_and_unknown(engine, listener):
    engine.abort("nobody")
    engine.submit([request("run", PROMPTS[1], tokens=400)])
    listener.wait_tokens("run", 3)
    engine.abort("run")
    found = listener.wait("run")["run"]
    assert found.finish.type == "abort" and len(found.routes) == len(PROMPTS[1]) + len(found.tokens) - 1
    engine.control("pause", mode="in_place").result(30)
    engine.submit([request("queued", PROMPTS[0])])
    engine.abort("queued")
    queued = listener.wait("queued")["queued"]
    assert queued.finish.message == "Abort in waiting queue" and queued.tokens == []
    engine.control("resume").result(30)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_keeps_what_was_made(engine, listener, mode):
    engine.submit([request("plain", PROMPTS[1], tokens=40)])
    plain = listener.wait("plain")["plain"]
    engine.control("flush_cache").result(30)
    engine.submit([request("a", PROMPTS[1], tokens=40)])
    listener.wait_tokens("a", 5)
    engine.control("pause", mode=mode).result(30)
    engine.submit([request("b", PROMPTS[0], tokens=3)])
    count = len(listener.results["a"].tokens)
    assert engine.control("flush_cache").result(30) is (mode == "retract")
    assert len(listener.results["a"].tokens) == count and "b" not in listener.results, "a paused engine moves on"
    engine.control("resume").result(30)
    found = listener.wait("a", "b")
    assert found["a"].tokens == plain.tokens
    assert (found["a"].routes == plain.routes).all()


def test_pause_abort_ends_everything(engine, listener):
    engine.submit([request(str(i), p, tokens=200) for i, p in enumerate(PROMPTS)])
    listener.wait_tokens("0", 2)
    engine.control("pause").result(30)
    assert all(r.finish.type == "abort" for r in listener.wait(*map(str, range(6))).values())
    engine.control("resume").result(30)


def test_rows_and_logprobs_before_a_retraction_stay_those_of_their_forward(engine, listener, checkpoint, tmp_path):
    """Weights change while a request is retracted: rows of tokens given out before are the old router's."""
    tiny.save("qwen3_moe", tmp_path, seed=5)
    engine.submit([request("old", PROMPTS[1], tokens=40)])
    old = listener.wait("old")["old"]
    engine.control("flush_cache").result(30)
    engine.submit([request("a", PROMPTS[1], tokens=40)])
    listener.wait_tokens("a", 5)
    engine.control("pause", mode="retract").result(30)
    message = engine.control("update_weights_from_disk", model_path=str(tmp_path), weight_version="2").result(60)
    assert "Weight version updated to 2" in message
    engine.control("resume").result(30)
    found = listener.wait("a")["a"]
    (first, _, border), (second, start, end) = found.spans
    assert (first, second) == ("default", "2") and border == start and end == 40
    rows = len(PROMPTS[1]) + border - 1
    assert (found.routes[:rows] == old.routes[:rows]).all()
    assert found.tokens[:border] == old.tokens[:border] and found.tokens != old.tokens


def test_errors_of_controls_come_through_the_future(engine):
    with pytest.raises(UserError, match="no control operation 'dance'"):
        engine.control("dance").result(30)
    with pytest.raises(UserError, match="mode must be"):
        engine.control("pause", mode="sleep").result(30)
    with pytest.raises(UserError, match="not a checkpoint"):
        engine.control("update_weights_from_disk", model_path="nowhere").result(30)
    with pytest.raises(UserError, match="no weight 'x'"):
        engine.control("get_weights_by_name", name="x").result(30)
    rows = engine.control("get_weights_by_name", name="model.layers.0.mlp.experts.2.up_proj.weight").result(30)
    assert len(rows) == 16 and len(rows[0]) == 32


def test_a_dying_engine_leaves_nobody_waiting(engine, listener, monkeypatch):
    def broken(plan, mask=None):
        raise RuntimeError("device lost")

    engine.submit([request("a", PROMPTS[0], tokens=300)])
    listener.wait_tokens("a", 2)
    monkeypatch.setattr(engine.core.runner, "launch", broken)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    engine.submit([request("b", PROMPTS[1])])
    found = listener.wait("a", "b")
    assert all(r.finish.status == 500 and "device lost" in r.finish.message for r in found.values())
    engine._thread.join(30)
    assert not engine.alive()
    engine.submit([request("late", PROMPTS[0])])
    assert "device lost" in listener.wait("late")["late"].finish.message
    with pytest.raises(TracklayerError, match="device lost"):
        engine.control("loads").result(30)


def test_shutdown_ends_open_requests_and_can_be_repeated(engine, listener):
    engine.submit([request("a", PROMPTS[0], tokens=400)])
    listener.wait_tokens("a", 1)
    engine.shutdown()
    engine.shutdown()
    assert "shut down" in listener.wait("a")["a"].finish.message
