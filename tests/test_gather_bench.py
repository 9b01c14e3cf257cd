"""benchmarks/gather.py at a small size: it measures what it says, and fails where the share is too large."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy as np
import pytest

SMALL = ["--requests", "3", "--rows", "10", "--layers", "2", "--rounds", "3"]


@pytest.fixture
def gather(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent))
    return importlib.import_module("benchmarks.gather")


def test_measures_and_judges(gather, capsys):
    assert gather.main([*SMALL, "--seconds", "1000"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["bytes"] == 3 * 10 * 2 * 8 and 0 < found["host_share"] <= found["share"] < 1e-3
    assert found["share"] == pytest.approx(found["all_ms"] / 1e3 / 1000, abs=1e-9)
    assert gather.main([*SMALL, "--seconds", "1e-9"]) == 1


def test_slots_are_each_used_once_and_spare_page_0(gather):
    slots = np.concatenate(gather.scattered(7, 23))
    assert sorted(slots.tolist()) == list(range(1, 7 * 23 + 1))


def test_the_default_is_w1_without_recording(gather, tmp_path):
    assert 5 < gather.workload_seconds(gather.RESULTS) < 30
    (tmp_path / "none").write_text('[{"workload": "W1", "recording": true, "seconds": 1}]')
    with pytest.raises(ValueError, match="--seconds"):
        gather.workload_seconds(tmp_path / "none")
