"""What it costs to bring the rows of many finished requests home at once, as a share of the workload they ended.

    python benchmarks/gather.py [--requests 256] [--rows 640] [--layers 48] [--top-k 8] [--experts 128] [--seconds S]

All rows are asked for in one gather, none before (a server fetches most of them while requests still run): one kernel,
one copy into pinned memory, then a copy of each request's rows out of it. Slots are scattered over the pool as decode
steps scatter them. The rows are compared with what was written. `--seconds` is the time of the workload; the default
is that of W1 without recording on an H200 (results/offline_h200.json). Medians of `--rounds`; the last line is JSON,
and the exit status says whether the share is below `--limit`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tracklayer.bench.report import environment
from tracklayer.routes.forms import RouteShape
from tracklayer.routes.pool import RoutePool

RESULTS = Path(__file__).resolve().parent / "results" / "offline_h200.json"


def workload_seconds(file: Path) -> float:
    """Seconds of the best W1 without recording in a file of results, a JSON list. ValueError when it holds none."""
    records = json.loads(file.read_text())
    found = [r["seconds"] for r in records if r.get("workload") == "W1" and r.get("recording") is False]
    if not found:
        raise ValueError(f"{file} holds no W1 without recording; give --seconds")
    return float(min(found))


def scattered(requests: int, rows: int) -> list[np.ndarray]:
    """Slots of each request: the first fifth in a row (its prompt), then one of every decode step. Slot 0 is spared."""
    prompt = rows // 5
    first = 1 + np.arange(requests)[:, None] * prompt + np.arange(prompt)
    steps = 1 + requests * prompt + np.arange(rows - prompt) * requests + np.arange(requests)[:, None]
    return list(np.concatenate([first, steps], 1).astype(np.int32))


def once(pool: RoutePool, slots: list[np.ndarray]) -> tuple[dict[str, float], list[np.ndarray]]:
    """One gather: seconds until `gather` returned, until the rows had come, and to copy them out."""
    if pool.tensor_SLK.is_cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    pending = pool.gather(slots, [0] * len(slots))
    asked = time.perf_counter()
    while not pending.ready():
        time.sleep(1e-4)  # the engine does other things meanwhile
    came = time.perf_counter()
    rows = [np.array(landed) for landed in pending.land()]
    copied = time.perf_counter()
    return {"ask": asked - began, "wait": came - asked, "copy": copied - came, "all": copied - began}, rows


def measure(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    shape = RouteShape(
        layer_ids=tuple(range(args.layers)), top_k=args.top_k, num_experts=args.experts, num_hidden_layers=args.layers
    )
    slots = scattered(args.requests, args.rows)
    pool = RoutePool(1 + args.requests * args.rows, shape, device)
    pool.tensor_SLK.random_(0, args.experts)
    written = pool.tensor_SLK.cpu().numpy()
    _, rows = once(pool, slots)  # compiles, and pins the first block
    for mine, at in zip(rows, slots, strict=True):
        assert np.array_equal(mine, written[at]), "a row came home changed"
    rounds = [once(pool, slots)[0] for _ in range(args.rounds)]
    medians = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    seconds = args.seconds or workload_seconds(RESULTS)
    return {
        "benchmark": "gather",
        "requests": args.requests,
        "rows": args.rows,
        "bytes": sum(r.nbytes for r in rows),
        **{f"{name}_ms": round(value * 1e3, 3) for name, value in medians.items()},
        "host_ms": round((medians["ask"] + medians["copy"]) * 1e3, 3),
        "workload_seconds": seconds,
        "share": medians["all"] / seconds,
        "host_share": (medians["ask"] + medians["copy"]) / seconds,
        "limit": args.limit,
        **environment(),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rows", type=int, default=640, help="tokens of each")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, help="of the workload that these requests end")
    parser.add_argument("--limit", type=float, default=0.01, help="share of it that is allowed")
    args = parser.parse_args(argv)
    found = measure(args, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    print(
        f"{found['requests']} x {found['rows']} rows, {found['bytes'] / 1e6:.1f} MB: asked in {found['ask_ms']} ms, "
        f"there after {found['wait_ms']} ms more, copied out in {found['copy_ms']} ms; "
        f"{found['share']:.2%} of {found['workload_seconds']} s"
    )
    print(json.dumps(found))
    return int(found["share"] >= args.limit)


if __name__ == "__main__":
    sys.exit(main())
