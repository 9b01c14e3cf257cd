"""The driver of compute-sanitizer, with a stand-in for the tool; the checks themselves are those of tests/interpret."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

STAND_IN = """#!/bin/sh
case "$2" in
memcheck)
  echo "ok rows 0.1 s"; echo "LEFT OUT sample: the time is over"; echo "========= ERROR SUMMARY: 0 errors"; exit 0;;
racecheck)
  echo "ok rows 0.1 s"; echo "========= Error: Race reported between Write access at _down_kernel"
  echo "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"; exit 86;;
synccheck) exit 0;;
*) sleep 60;;
esac
"""


@pytest.fixture
def sanitize(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent))
    return importlib.import_module("benchmarks.kernels.sanitize")


@pytest.fixture
def binary(tmp_path):
    file = tmp_path / "compute-sanitizer"
    file.write_text(STAND_IN)
    file.chmod(0o755)
    return file


def test_a_clean_run_and_one_with_a_race(sanitize, binary):
    clean = sanitize.run_under("memcheck", str(binary), "", 10)
    assert clean["clean"] and clean["ran"] == 1 and clean["left_out"] == 1 and clean["reported"] == []
    race = sanitize.run_under("racecheck", str(binary), "", 10)
    assert not race["clean"] and race["status"] == 86 and "_down_kernel" in race["reported"][0]


def test_silence_is_not_clean(sanitize, binary):
    assert not sanitize.run_under("synccheck", str(binary), "", 10)["clean"]


def test_a_tool_that_hangs_is_stopped(sanitize, binary, monkeypatch):
    monkeypatch.setattr(sanitize, "GRACE", 0)
    found = sanitize.run_under("initcheck", str(binary), "", 0.5)
    assert not found["clean"] and found["seconds"] < 20


def test_is_found_on_the_path_or_said_to_be_missing(sanitize, binary, monkeypatch, capsys):
    monkeypatch.setenv("PATH", f"{binary.parent}{os.pathsep}/usr/bin")
    assert sanitize.find() == str(binary)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sanitize, "PLACES", ())
    monkeypatch.setattr(sanitize.site, "getsitepackages", list)
    monkeypatch.setattr(sys, "argv", ["sanitize"])
    monkeypatch.setattr(sanitize.sys, "path", ["/nowhere"])
    assert sanitize.main() == 2
    assert "--binary" in capsys.readouterr().err
