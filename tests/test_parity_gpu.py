"""The table of the families on a GPU, with a CPU in the GPU's place: rows are kept, added to, and judged by family."""

from __future__ import annotations

import json

import parity_gpu
import pytest
from parity_gpu import main, passed, record


def test_rows_are_kept_and_added_to(tmp_path, capsys):
    out = tmp_path / "rows.json"
    for variant in ("mixtral", "grok1"):
        assert main([variant, "--device", "cpu", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())
    assert set(rows) == {"mixtral", "grok1"} and rows["grok1"]["family"] == "grok1"
    assert all(set(row["cells"]) == {"float32", "bfloat16"} for row in rows.values())
    assert rows["mixtral"]["cells"]["float32"]["experts"] == 1.0
    assert "| mixtral | mixtral |" in capsys.readouterr().out


def test_an_unknown_variant_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["mixtrail", "--device", "cpu"])
    assert "no such variant: mixtrail; there are mixtral" in capsys.readouterr().err


def row(family, ok, where="NVIDIA X, torch 2"):
    return {
        "variant": "v",
        "family": family,
        "where": where,
        "cells": {"float32": {"ok": True}, "bfloat16": {"ok": ok}},
    }


def test_one_failing_variant_fails_its_family_and_takes_it_out(tmp_path):
    rows = {
        "a": row("one", True),
        "b": row("one", False),
        "c": row("two", True),
        "d": row("three", True, "CPU, torch 2"),
    }
    assert passed(rows) == {"one": False, "two": True, "three": True}
    path = tmp_path / "checked.json"
    path.write_text(json.dumps({"one": {"cpu": "x", "gpu": "old"}, "three": {"cpu": "y"}}))
    record(rows, path)
    expected = {"one": {"cpu": "x"}, "two": {"gpu": "NVIDIA X, torch 2"}, "three": {"cpu": "y"}}
    assert json.loads(path.read_text()) == expected


def test_a_failing_row_is_the_exit_code(monkeypatch, tmp_path):
    monkeypatch.setattr(parity_gpu, "row_of", lambda variant, device: row(variant, False))
    assert main(["mixtral", "--device", "cpu", "--out", str(tmp_path / "rows.json")]) == 1
