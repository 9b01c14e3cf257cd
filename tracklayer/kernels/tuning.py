"""Which form and which tiles the expert kernels take, by device, shape and number of tokens.

tuned/<device>.json: {"E,D,F": {"<tokens>": {"form": ..., ...}}}; the entry of the largest token count not above the
batch's holds. A shape that has no table takes DEFAULTS. benchmarks/kernels/bench_experts.py --sweep writes tables.

    form small   up, down: n, b, stages, warps (experts_small.py)
    form sorted  up, down: tall, m, n, b, stages, warps, tma, group (grouped_gemm.py); both have the same m
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

import torch


def sorted_config(tall: str, m: int, up: dict[str, Any], down: dict[str, Any]) -> dict[str, Any]:
    """A form "sorted" from tiles that leave out what they share."""
    shared = {"tall": tall, "m": m, "tma": True, "group": 8}
    return {"form": "sorted", "up": {**shared, **up}, "down": {**shared, **down}}


SMALL = {
    "form": "small",
    "up": {"n": 4, "b": 512, "stages": 3, "warps": 4},
    "down": {"n": 16, "b": 256, "stages": 4, "warps": 4},
}
FEW_ROWS = {"n": 64, "b": 128, "stages": 3, "warps": 4}
MANY_ROWS_UP = {"n": 128, "b": 64, "stages": 3, "warps": 8}
MANY_ROWS_DOWN = {"n": 128, "b": 64, "stages": 3, "warps": 8}
DEFAULTS: dict[int, dict[str, Any]] = {
    1: SMALL,
    8: sorted_config("weights", 16, FEW_ROWS, FEW_ROWS),
    128: sorted_config("weights", 32, FEW_ROWS, FEW_ROWS),
    512: sorted_config("weights", 64, FEW_ROWS, FEW_ROWS),
    1024: sorted_config("rows", 128, MANY_ROWS_UP, MANY_ROWS_DOWN),
}


def device_key(name: str) -> str:
    """The table's file name for a CUDA device name: "NVIDIA H200" -> "nvidia_h200"."""
    return "".join(c if c.isalnum() else "_" for c in name.lower())


@cache
def table(device_name: str) -> dict[str, dict[int, dict[str, Any]]]:
    """The shipped table of one device, empty when there is none."""
    file = resources.files("tracklayer.kernels") / "tuned" / f"{device_key(device_name)}.json"
    if not file.is_file():
        return {}
    return {shape: {int(t): c for t, c in rows.items()} for shape, rows in json.loads(file.read_text()).items()}


@cache
def _rows_of(device: torch.device, experts: int, width: int, inner: int) -> dict[int, dict[str, Any]]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return table(name).get(f"{experts},{width},{inner}") or DEFAULTS


def pick(device: torch.device, experts: int, width: int, inner: int, num_tokens: int) -> dict[str, Any]:
    """The configuration for a batch of num_tokens >= 1; called at each launch, so it is a dictionary look-up."""
    rows = _rows_of(device, experts, width, inner)
    return rows[max((t for t in rows if t <= num_tokens), default=min(rows))]
