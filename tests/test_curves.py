"""`tracklayer bench --curves` on a CPU, and the plot it draws."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tracklayer.bench import curves
from tracklayer.bench.cli import main, parser
from tracklayer.bench.plot import Chart, Series, number, page, ticks
from tracklayer.errors import UserError

SMALL = ["--curves", "--shape", "tiny", "--seed", "0", "--mem-fraction-static", "0.05"]


def run(tmp_path, *more):
    out, plot = tmp_path / "lines", tmp_path / "plot.svg"
    main([*SMALL, *more, "--out", str(out), "--plot", str(plot)])
    return [json.loads(x) for x in out.read_text().splitlines()], plot


def test_a_line_for_each_point_and_a_plot(tmp_path):
    lines, plot = run(tmp_path, "--batches", "1,3", "--contexts", "19,64")
    assert [(x["context"], x["batch"]) for x in lines] == [(19, 1), (19, 3), (64, 1), (64, 3)]
    for x in lines:
        low, high = x["ms_least_most"]
        assert 0 < low <= x["ms_a_step"] <= high
        assert x["output_tokens_per_s"] == pytest.approx(x["batch"] / x["ms_a_step"] * 1e3, rel=1e-3)
        assert 4 <= x["experts_hit"] <= min(16, 4 * x["batch"]) and x["recording"] and "commit" in x
    assert lines[2]["needed_bytes"] > lines[0]["needed_bytes"]
    text = plot.read_text()
    ElementTree.fromstring(text)
    assert text.count("<circle") == 2 * 4, "two panels (a CPU has no floor) of four points"


def test_the_steps_are_those_of_running_requests():
    """Laid and decoded as a curve does, a sequence gives the tokens that the same cache gives in one prefill."""
    args = parser().parse_args([*SMALL, "--batches", "2", "--contexts", "40"])
    core = curves.start(args, [2], [40])
    point = curves.Point(core, 2, 40, seed=3)
    with torch.inference_mode():
        point.lay()
        fed = core.runner.rows.last_token_R[:2].tolist()
        chosen = []
        for plan in point.plans():
            assert plan.decode_only and plan.num_decodes == 2
            chosen.append(core.runner.launch(plan).wait().token_ids.tolist())
        kept = [cache.clone() for cache in core.runner.caches.kv[-1]]
        routes = core.runner.caches.pool.tensor_SLK.clone()
        begin = 40 - len(chosen)
        for row in range(2):
            tokens = [fed[row], *(step[row] for step in chosen[:-1])]
            share = curves.Share(
                rid="again", row=row, start=begin, num_tokens=len(tokens), slots=point.slots_BT[row, begin:],
                table_start=begin, token_ids=tokens, samples=True,
            )  # fmt: skip
            again = core.runner.launch(curves.StepPlan(0, [share], curves.NO_COPIES)).wait()
            assert again.token_ids.tolist() == [chosen[-1][row]]
        assert torch.equal(routes, core.runner.caches.pool.tensor_SLK)
        for before, after in zip(kept, core.runner.caches.kv[-1], strict=True):
            torch.testing.assert_close(before, after, rtol=1e-4, atol=1e-4)
        hit = point.experts_hit()
    rows = routes[torch.from_numpy(point.slots_BT[:, -1]).long()].numpy()
    assert hit == np.mean([len(set(rows[:, layer].ravel().tolist())) for layer in range(4)])


def test_recording_off_counts_no_experts(tmp_path):
    lines, _ = run(tmp_path, "--batches", "1", "--contexts", "32", "--recording", "off")
    assert lines[0]["experts_hit"] is None and not lines[0]["recording"] and lines[0]["needed_bytes"] > 0


def test_what_does_not_fit_is_said(tmp_path, monkeypatch):
    args = parser().parse_args([*SMALL])
    core = curves.start(args, [1], [64])
    found = curves.measure(core, 5, 64, 0)
    assert found["batch"] == 5 and "slots" in found["skipped"] and "ms_a_step" not in found


def test_time_that_is_over_is_said(tmp_path, capsys):
    main([*SMALL, "--batches", "1", "--contexts", "32", "--time-limit", "0"])
    assert "--time-limit" in capsys.readouterr().out


@pytest.mark.parametrize(
    "more",
    [["--batches", "0"], ["--batches", "1,x"], ["--contexts", "18"], ["--contexts", ""], ["--contexts", "99999"]],
)
def test_bad_lists_are_named(tmp_path, more):
    with pytest.raises(UserError, match=more[0] if more[1] != "99999" else "99999"):
        main([*SMALL, *more])


def test_ticks_hold_their_range_and_bad_values_are_refused():
    assert ticks(1, 512, 2.0) == [2.0**n for n in range(10)]
    assert ticks(3, 3, 10.0) == [1.0, 10.0] and ticks(1, 1, 2.0) == [1.0, 2.0]
    assert [number(x) for x in (0.25, 512, 1024, 32768, 12000)] == ["0.25", "512", "1k", "32k", "12k"]
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="above 0"):
            page([Chart("t", "x", "y", [Series("s", [(1.0, bad)])])])
    with pytest.raises(ValueError, match="nothing to draw"):
        page([Chart("t", "x", "y", [Series("s", [])])])


def test_labels_are_escaped():
    ElementTree.fromstring(page([Chart("a < b & c", "x", "y", [Series("<s>", [(1.0, 2.0), (4.0, 3.0)])])]))
