"""The tuner in the interpreter: it finds a configuration, refuses wrong ones, and writes a table that is read."""

from __future__ import annotations

import json
import time

import pytest
import torch

from tracklayer.bench import tune
from tracklayer.bench.chain import Chain, ExpertShape
from tracklayer.bench.tiles import Form
from tracklayer.kernels import experts_cuda
from tracklayer.kernels.experts import ExpertSpec

SHAPE = ExpertShape("tiny", 4, 2, 32, 16, ExpertSpec(activation="swiglu_oai", clamp_before=7.0), True)
TILE = {"n": 16, "b": 16, "stages": 2, "warps": 4}
OTHER = {"n": 8, "b": 16, "stages": 2, "warps": 4}


@pytest.fixture(autouse=True)
def few_forms(monkeypatch):
    def forms(num_tokens, experts, top_k, inner):
        if num_tokens <= 2:
            yield Form("small", 0, (TILE, OTHER), (TILE,))
        yield Form("weights", 16, ({**TILE, "tma": False},), ({**TILE, "tma": False},))

    monkeypatch.setattr(tune, "forms", forms)


def run(tmp_path, batches=(1, 5), seconds=60.0, usable=None):
    with torch.inference_mode():
        out = tmp_path / "cpu.json"
        records = tune.tune([SHAPE], list(batches), time.monotonic() + seconds, out, "cpu", usable or {})
    return records, json.loads(out.read_text())


def test_writes_the_fastest_of_what_it_tried(tmp_path, monkeypatch):
    times = {"small": 5.0, "sorted": 3.0}
    monkeypatch.setattr(Chain, "us_per_layer", lambda self, config, replays=7: times[config["form"]])
    records, table = run(tmp_path)
    assert list(table) == ["4,32,16"] and list(table["4,32,16"]) == ["1", "5"]
    assert table["4,32,16"]["1"]["form"] == "sorted" and table["4,32,16"]["1"]["up"]["n"] == 16
    assert [r["tokens"] for r in records] == [1, 5] and all(r["complete"] and not r["wrong"] for r in records)
    assert records[0]["rule_us_per_layer"] == 5.0 and records[0]["us_per_layer"] == 3.0
    assert 0 < records[0]["tb_per_s"] == round(2 * SHAPE.expert_bytes / 3.0 / 1e6, 3)


def test_takes_no_configuration_that_computes_something_else(tmp_path, monkeypatch):
    real = experts_cuda.grouped_gemm
    monkeypatch.setattr(experts_cuda, "grouped_gemm", lambda *a, **k: real(*a, **k) * 1.5)
    times = {"small": 5.0, "sorted": 3.0}
    monkeypatch.setattr(Chain, "us_per_layer", lambda self, config, replays=7: times[config["form"]])
    records, table = run(tmp_path, batches=[1])
    assert table["4,32,16"]["1"]["form"] == "small" and len(records[0]["wrong"]) == 1


def test_leaves_out_what_was_not_compiled_in_time(tmp_path):
    keys = {
        tune.job_key(SHAPE, 1, form, tile): False
        for form in tune.forms(1, 4, 2, 16)
        for tile in (*form.ups, *form.downs)
    }
    records, _ = run(tmp_path, batches=[1], usable=keys)
    assert records[0]["tried"] == 1 and records[0]["us_per_layer"] == records[0]["rule_us_per_layer"]


def test_time_that_is_over_leaves_the_rule_and_says_so(tmp_path, capsys):
    out = tmp_path / "cpu.json"
    with torch.inference_mode():
        assert tune.tune([SHAPE], [1, 5], time.monotonic() - 1, out, "cpu", {}) == []
    assert not out.exists() and "no time for 1, 5 tokens" in capsys.readouterr().out


def test_extends_a_table_that_is_there(tmp_path):
    (tmp_path / "cpu.json").write_text('{"9,9,9": {"1": {"form": "small"}}}')
    _, table = run(tmp_path, batches=[5])
    assert table["9,9,9"] == {"1": {"form": "small"}} and list(table["4,32,16"]) == ["5"]
