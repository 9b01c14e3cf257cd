"""Each benchmark of the kernels beside the experts runs at a tiny size, so that it cannot rot."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["attention", "linear", "mla", "norm_rope", "sample"])
def test_smoke(name, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent))
    bench = importlib.import_module(f"benchmarks.kernels.bench_{name}")
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    monkeypatch.setattr(sys, "argv", [f"bench_{name}", "--smoke"])
    bench.main()
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["benchmark"] == name and "torch" in record
