"""What every kernel benchmark shares: timing inside a CUDA graph, ceilings, table and JSON.

Times are medians of graph replays that run an op over several copies of its inputs in turn, so that weights and caches
come from memory and not from the L2 cache, and gaps between launches are as small as in a served step.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

READ_BYTES_PER_S = 4.44e12  # measured on the H200: read-only
MATMUL_FLOP_PER_S = 786e12  # measured on the H200: 8192^3 bf16


def time_us(calls: Sequence[Callable[[], Any]], *, repeats: int = 15, graph: bool = True) -> float:
    """Median microseconds of one call; `calls` do the same over different copies of the inputs."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()

    def run() -> None:
        for call in calls:
            call()

    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        run = captured.replay
    run()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return sorted(times)[len(times) // 2]


def try_us(calls: Sequence[Callable[[], Any]]) -> float | None:
    """`time_us`, or None for a schedule that needs more shared memory or registers than the device has."""
    from triton.runtime.errors import OutOfResources

    try:
        return time_us(calls)
    except OutOfResources:
        return None


def copies_for(num_bytes: float, at_least: int = 2, at_most: int = 24) -> int:
    """How many input copies exceed the L2 cache (60 MB) by far."""
    return int(min(max(at_least, -(-300e6 // max(num_bytes, 1))), at_most))


def row(name: str, us: float, *, num_bytes: float = 0.0, flop: float = 0.0, **extra: Any) -> dict[str, Any]:
    """One result: microseconds, TB/s, TFLOP/s and the share of the nearer ceiling."""
    floor_us = max(num_bytes / READ_BYTES_PER_S, flop / MATMUL_FLOP_PER_S) * 1e6
    result = {"name": name, "us": round(us, 2), "share_of_floor": round(floor_us / us, 3), **extra}
    if num_bytes:
        result["tb_per_s"] = round(num_bytes / us / 1e6, 3)
    if flop:
        result["tflop_per_s"] = round(flop / us / 1e6, 1)
    return result


def report(benchmark: str, rows: Sequence[dict[str, Any]], out: str | None = None) -> None:
    """Print a table, then one JSON line; also write the JSON to the file `out`."""
    print(f"{'op':<64}{'us':>10}{'TB/s':>8}{'TFLOP/s':>9}{'of floor':>9}")
    for r in rows:
        numbers = f"{r['us']:>10.2f}{r.get('tb_per_s', ''):>8}{r.get('tflop_per_s', ''):>9}{r['share_of_floor']:>9}"
        print(f"{r['name']:<64}{numbers}")
    record = {"benchmark": benchmark, **environment(), "rows": list(rows)}
    print(json.dumps(record))
    if out:
        Path(out).write_text(json.dumps(record, indent=1) + "\n")


def environment() -> dict[str, Any]:
    """Device, versions and commit."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "triton": triton_version,
        "commit": commit.stdout.strip() or None,
    }
