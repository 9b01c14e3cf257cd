"""benchmarks/block_passes.py at a small size: it counts the passes that it asks for, and the tokens that they fill."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

SMALL = ["--shape", "tiny", "--device", "cpu", "--requests", "2", "--prompt", "9", "--passes", "8"]


@pytest.mark.parametrize(("confidence", "tokens_a_pass"), [("1.0", 1), ("0.0", 4)])
def test_measures_passes(monkeypatch, capsys, confidence, tokens_a_pass):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent))
    bench = importlib.import_module("benchmarks.block_passes")
    assert bench.main([*SMALL, "--confidence", confidence]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 < found["plan_ms"] + found["launch_ms"] <= found["pass_ms"] and 0 <= found["idle_ms"] < found["pass_ms"]
    a_pass = found["tokens_per_s"] * found["pass_ms"] / 1e3 / 2
    assert a_pass == pytest.approx(tokens_a_pass, rel=0.01)
