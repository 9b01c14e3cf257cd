"""The runs from outside against a server process: a short soak, a client, the time of routes; so that none can rot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def run(script, *arguments, limit_s=110):
    """The JSON of the last line; the status must be 0."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_forty_seconds_of_mixed_traffic_lose_and_leak_nothing(tmp_path):
    subprocess.run([sys.executable, str(BENCHMARKS / "tiny_checkpoint.py"), str(tmp_path)], check=True)
    result = run("soak.py", "--model", tmp_path, "--seconds", 40)
    assert result["wrong"] == [] and result["incomplete_rows"] == 0
    assert all(result[kind] > 0 for kind in ("answered", "left", "aborted", "refused", "chatted", "flush"))


@pytest.mark.slow
def test_the_openai_client_runs_against_a_process():
    assert run("run_clients.py", "openai")["openai"]["ok"]


def test_routes_come_back_in_both_forms():
    result = run("route_replies.py", "--samples", 4, "--tokens", 64, "--layers", 4, "--rounds", 1)
    assert result["bytes"][0] > 4 * result["bytes"][1] > 0
