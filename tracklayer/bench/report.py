"""What a benchmark prints: a table for people, and one JSON line that says what was measured on what."""

from __future__ import annotations

import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tracklayer.bench.offline import Measurement
from tracklayer.bench.shapes import Footprint
from tracklayer.bench.workloads import Workload

READ_BANDWIDTH = {"NVIDIA H200": 4.44e12}  # bytes/s, read-only, measured


def environment() -> dict[str, Any]:
    """Device, versions and commit."""
    import transformers
    import triton

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu"
    return {
        "device": device,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "commit": commit(),
    }


def commit() -> str | None:
    """The checkout's commit, None outside one."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None


def share_of_floor(m: Measurement, workload: Workload, feet: Footprint | None, device: str) -> dict[str, float]:
    """Bytes that decoding must read, over the time taken and over the device's read bandwidth; empty if unknown."""
    if feet is None:
        return {}
    context = workload.input_tokens + workload.output_tokens / 2
    bytes_needed = feet.bytes_per_step(workload.num_requests, round(context)) * (workload.output_tokens - 1)
    rate = bytes_needed / m.seconds
    found = {"needed_bytes": bytes_needed, "needed_bytes_per_s": rate}
    if device in READ_BANDWIDTH:
        found["share_of_bandwidth"] = rate / READ_BANDWIDTH[device]
    return found


def line(m: Measurement, workload: Workload, **more: Any) -> str:
    """One JSON line of one measurement."""
    return json.dumps(
        {
            "workload": m.workload,
            "engine": "tracklayer",
            "recording": m.recording,
            "seconds": round(m.seconds, 4),
            "output_tokens_per_s": round(m.output_tokens_per_s, 1),
            "total_tokens_per_s": round(m.total_tokens_per_s, 1),
            "cached_tokens": m.cached_tokens,
            "route_rows": m.route_rows,
            "ttft_ms_p50_p90_p99": m.ttft_ms,
            "itl_ms_p50_p90_p99": m.itl_ms,
            "requests": workload.num_requests,
            "input_tokens": workload.input_tokens,
            "output_tokens": workload.output_tokens,
            **m.extra,
            **more,
        }
    )


def table(measurements: list[Measurement]) -> None:
    """Print the measurements, one a row."""
    view = Table(title="tracklayer bench")
    for heading in (
        "workload",
        "recording",
        "seconds",
        "output tok/s",
        "total tok/s",
        "TTFT p50/p99 ms",
        "ITL p50/p99 ms",
    ):
        view.add_column(heading, justify="right")
    for m in measurements:
        view.add_row(
            m.workload,
            "on" if m.recording else "off",
            f"{m.seconds:.2f}",
            f"{m.output_tokens_per_s:,.1f}",
            f"{m.total_tokens_per_s:,.0f}",
            f"{m.ttft_ms[0]:.1f} / {m.ttft_ms[2]:.1f}",
            f"{m.itl_ms[0]:.2f} / {m.itl_ms[2]:.2f}",
        )
    Console(width=120).print(view)
