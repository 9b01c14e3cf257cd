"""The table of the families on a GPU, with a CPU in the GPU's place: rows are kept, added to, and judged by family."""

from __future__ import annotations

import json

import numpy as np
import parity_gpu
import pytest
from parity_gpu import judge, main, passed, record


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


def test_other_tokens_are_ties_or_follow_an_expert():
    want_TV = np.log(np.array([[0.5, 0.3, 0.2], [0.5, 0.48, 0.02], [0.6, 0.3, 0.1], [0.2, 0.3, 0.5]]))
    got_TV = want_TV.copy()
    routes_TLK = np.array([[[0, 1]], [[2, 3]], [[1, 0]]])
    assert judge(want_TV, got_TV, routes_TLK, routes_TLK[..., ::-1], 0.1) == (0, 0, 0)
    got_TV[1] = np.log([0.48, 0.5, 0.02])
    assert judge(want_TV, got_TV, routes_TLK, routes_TLK, 0.1) == (0, 1, 0)
    got_TV[2] = np.log([0.3, 0.6, 0.1])
    assert judge(want_TV, got_TV, routes_TLK, routes_TLK, 0.1) == (0, 1, 1)
    other_TLK = routes_TLK.copy()
    other_TLK[2, 0, 0] = 3
    assert judge(want_TV, got_TV, routes_TLK, other_TLK, 0.1) == (2, 1, 0)
