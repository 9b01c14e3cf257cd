"""Which form and which tiles the expert kernels take, by device, shape and number of tokens.

tuned/<device>.json: {"E,D,F": {"<tokens>": {"form": ..., ...}}}; the entry of the largest token count not above the
batch's holds. A shape that has no table takes `default`. `tracklayer tune` writes tables (bench/tune.py).

    form small   up, down: n, b, stages, warps (experts_small.py)
    form sorted  up, down: tall, m, n, b, stages, warps, tma, group (grouped_gemm.py); both have the same m
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

import torch

Config = dict[str, Any]


def sorted_config(tall: str, m: int, up: Config, down: Config) -> Config:
    """A form "sorted" from tiles that leave out what they share."""
    shared = {"tall": tall, "m": m, "tma": True, "group": 8}
    return {"form": "sorted", "up": {**shared, **up}, "down": {**shared, **down}}


def _tile(n: int, b: int, stages: int, warps: int) -> Config:
    return {"n": n, "b": b, "stages": stages, "warps": warps}


SMALL: Config = {"form": "small", "up": _tile(2, 2048, 1, 4), "down": _tile(16, 256, 6, 4)}
# By pairs per expert at most. Measured best on an H200 at 128 experts of 2048 x 768; they take up to 220 KB.
ROOMY: dict[float, Config] = {
    8: sorted_config("weights", 16, _tile(64, 128, 3, 4), _tile(64, 128, 3, 4)),
    24: sorted_config("weights", 32, _tile(128, 128, 3, 8), _tile(64, 128, 3, 4)),
    48: sorted_config("weights", 64, _tile(64, 64, 4, 4), _tile(128, 64, 4, 4)),
    512: sorted_config("rows", 128, _tile(128, 64, 3, 8), _tile(256, 64, 4, 8)),
    float("inf"): sorted_config("rows", 128, _tile(128, 64, 4, 8), _tile(128, 64, 3, 8)),
}
# For any device (up to 97 KB of shared memory) in 16 bits, and in float32.
TIGHT: dict[float, Config] = {
    8: sorted_config("weights", 16, _tile(64, 64, 3, 4), _tile(64, 64, 4, 4)),
    48: sorted_config("weights", 32, _tile(64, 64, 3, 4), _tile(64, 64, 4, 4)),
    float("inf"): sorted_config("rows", 64, _tile(64, 64, 3, 4), _tile(128, 64, 3, 4)),
}
FLOAT32: dict[float, Config] = {
    8: sorted_config("weights", 16, _tile(32, 32, 2, 4), _tile(32, 32, 2, 4)),
    float("inf"): sorted_config("rows", 32, _tile(32, 32, 2, 4), _tile(32, 32, 2, 4)),
}


def default(num_tokens: int, top_k: int, experts: int, tiles: dict[float, Config]) -> Config:
    """The rule where nothing was measured: pairs alone while few share an expert, then by pairs per expert."""
    num_pairs = num_tokens * top_k
    if num_tokens == 1 or num_pairs <= min(32, experts / 2):
        return SMALL
    return tiles[min(limit for limit in tiles if num_pairs / experts <= limit)]


def device_key(name: str) -> str:
    """The table's file name for a CUDA device name: "NVIDIA H200" -> "nvidia_h200"."""
    return "".join(c if c.isalnum() else "_" for c in name.lower())


@cache
def table(device_name: str) -> dict[str, dict[int, Config]]:
    """The shipped table of one device, empty when there is none."""
    file = resources.files("tracklayer.kernels") / "tuned" / f"{device_key(device_name)}.json"
    if not file.is_file():
        return {}
    return {shape: {int(t): c for t, c in rows.items()} for shape, rows in json.loads(file.read_text()).items()}


@cache
def _device(device: torch.device) -> tuple[str, int]:
    """Name, and bytes of shared memory that a block can have."""
    if device.type != "cuda":
        return "cpu", 0
    properties = torch.cuda.get_device_properties(device)
    return properties.name, properties.shared_memory_per_block_optin


def pick(device: torch.device, shape: tuple[int, int, int], top_k: int, num_tokens: int, dtype: torch.dtype) -> Config:
    """The configuration for num_tokens >= 1 of a model with experts (E, D, F); cheap, called at each launch."""
    rows = table(_device(device)[0]).get("{},{},{}".format(*shape)) if dtype.itemsize <= 2 else None
    if rows:
        return rows[max((t for t in rows if t <= num_tokens), default=min(rows))]
    return untuned(device, shape[0], top_k, num_tokens, dtype)


def untuned(device: torch.device, experts: int, top_k: int, num_tokens: int, dtype: torch.dtype) -> Config:
    """What holds for a shape that has no table; `tracklayer tune` starts from it."""
    tiles = FLOAT32 if dtype.itemsize > 2 else ROOMY if _device(device)[1] >= 227 * 1024 else TIGHT
    return default(num_tokens, top_k, experts, tiles)
