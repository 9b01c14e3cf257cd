"""Every kernel once or twice on small awkward shapes, under compute-sanitizer.

    python -m benchmarks.kernels.sanitize [--tools memcheck,racecheck] [--only NAME] [--time-limit SECONDS]

The checks are those of the tests: poisoned padding, odd sizes, results against references. Each tool runs them in a
process of its own with torch's caching allocator off, so that every tensor ends where its memory ends. The last line
is JSON: per tool, what ran, and what was reported. Before, the checks run without a tool, in several processes at once,
so that all kernels are compiled; `--bare` does only that, in this process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import site
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PLACES = (
    "/usr/local/cuda*/bin/compute-sanitizer",
    "/usr/local/cuda*/compute-sanitizer/compute-sanitizer",
    "/usr/local/cuda*/extras/compute-sanitizer/compute-sanitizer",
    "/opt/cuda*/bin/compute-sanitizer",
    "/opt/nvidia/*/compute-sanitizer",
    "/usr/lib/nvidia-cuda-toolkit/compute-sanitizer/compute-sanitizer",
)
GRACE = 60  # seconds for start-up and for the check that runs when the time is over


def find() -> str | None:
    """The compute-sanitizer of PATH, of a CUDA toolkit, or of a Python package; None when there is none."""
    found = shutil.which("compute-sanitizer")
    if found:
        return found
    for pattern in PLACES:
        for path in sorted(Path("/").glob(pattern.lstrip("/")), reverse=True):
            if os.access(path, os.X_OK):
                return str(path)
    for folder in [*site.getsitepackages(), *sys.path]:
        for path in sorted(Path(folder).glob("nvidia/**/compute-sanitizer")) if Path(folder).is_dir() else ():
            if path.is_file():
                return str(path)
    return None


def checks(device: str) -> dict[str, Callable[[], Any]]:
    """By name: calls that launch our kernels and compare them with their references."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import kernel_checks as small
    import torch
    from attention_cases import DECODE, MIXED, Case, build, error, exact
    from moe_checks import (
        EXPERTS,
        LARGE_ROUTERS,
        ROUTERS,
        check_combine,
        check_experts,
        check_route_few,
        check_select,
        check_sort,
        some_ids,
    )  # fmt: skip

    from tracklayer.kernels.attention import paged_attention
    from tracklayer.kernels.tuning import SMALL, sorted_config

    gpu = device == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    tile = {"n": 64, "b": 64, "stages": 3, "warps": 4} if gpu else {"n": 16, "b": 16, "stages": 2, "warps": 4}
    forms = {
        "small": SMALL if gpu else {"form": "small", "up": tile, "down": tile},
        "weights": sorted_config("weights", 16, tile, tile),
        "rows": sorted_config("rows", 64 if gpu else 16, tile, tile),
        "halves": sorted_config("rows", 128 if gpu else 32, {**tile, "halves": True}, {**tile, "halves": True}),
        "pointers": sorted_config("rows", 64 if gpu else 16, {**tile, "tma": False}, {**tile, "tma": False}),
    }

    def attention(case: Case) -> None:
        tensors, keywords = build(case, dtype, device)
        assert error(paged_attention(*tensors, **keywords), exact(*tensors, **keywords)) < 1e-2

    def sort(pairs: int) -> None:
        ids_TK = some_ids("padded", pairs // 3, 3, 11, torch.Generator().manual_seed(0))
        check_sort(ids_TK, 9, 16, device)

    found: dict[str, Callable[[], Any]] = {}
    for name, spec in (ROUTERS | {"deepseek": LARGE_ROUTERS["deepseek"]}).items():
        if gpu or "bf16" not in name:
            found[f"select {name}"] = partial(check_select, spec, 17, dtype, device, 1)
    for name in ("softmax", "noaux", "zero experts", "sparsemixer", "expert scale"):
        found[f"route few {name}"] = partial(check_route_few, ROUTERS[name], 3, dtype, device, 1)
    found |= {f"sort {n} pairs": partial(sort, n) for n in (3, 300, *((70_000,) if gpu else ()))}
    for form, config in forms.items():
        for name in ("gpt-oss", "not gated", "zero experts"):
            shape = (19, 3, 5, 72, 40)
            found[f"experts {form} {name}"] = partial(
                check_experts, EXPERTS[name], config, "padded", shape, dtype, device
            )
    found["combine"] = partial(check_combine, dtype, device)
    for case in [*DECODE[::2], *MIXED[::2]] if gpu else [DECODE[0]]:
        found[f"attention {case} {max(case.counts)}"] = partial(attention, case)
    if gpu:
        sys.path.insert(0, str(ROOT / "tests" / "gpu"))
        if torch.cuda.get_device_capability()[0] == 9:
            from test_gpu_ops import test_whole_prompts_on_hopper_beside_poison as whole_prompts

            found["attention whole prompts"] = partial(whole_prompts, 8, 4, torch.bfloat16, 1e-2)
    found["norms"] = partial(small.check_norms, device, dtype, 3, 100)
    found["activations"] = partial(small.check_activations, device, dtype, 3, 100)
    found |= {f"rope {case}": partial(small.check_rope, device, dtype, 5, case) for case in small.ROPES[:5]}
    found["rows"] = partial(small.check_rows, device, 5, 3, torch.uint8, 255)
    found["sample"] = partial(small.check_sample, device, 5003, dtype)
    found["log-probabilities"] = partial(small.check_logprobs, device, 5003, torch.float32)
    found["linear"] = partial(small.check_linear, device, dtype, 2, 104, 19)
    return found | latent_checks(device, dtype)


def latent_checks(device: str, dtype: Any) -> dict[str, Callable[[], Any]]:
    """The same for latent attention (after `checks`, which finds the tests)."""
    from mla_checks import Widths, check_absorb, check_attention, check_latent_store

    from tracklayer.kernels.mla_attention import Schedule

    found: dict[str, Callable[[], Any]] = {}
    for w in (Widths(3, 10, 6, 7, 12, 9), Widths(5, 24, 16, 40, 16, None)):
        found[f"latent store {w}"] = partial(check_latent_store, w, 5, device, dtype, interleaved=True)
        found[f"latent products {w}"] = partial(check_absorb, w, 5, device, dtype)
        found[f"latent chunks {w}"] = partial(
            check_attention, [1, 1, 21, 9, 0], [70, 1, 60, 9, 5], w, device, dtype, num_decodes=2
        )
        found[f"latent decode {w}"] = partial(check_attention, [1] * 4, [1, 170, 0, 96], w, device, dtype)
    wide = partial(check_attention, [1] * 4, [1, 200, 0, 129], Widths(5, 8, 64, 8, 512, None), device, dtype)
    return found | {"latent by hand": wide, "latent decode 512": partial(wide, schedule=Schedule(hopper=False))}


def run_bare(device: str, only: str, seconds: float, part: str) -> int:
    """Run the checks in this process, or every n-th of them from i on (part "i/n"); how many failed."""
    import torch

    torch.manual_seed(0)
    began, failed = time.monotonic(), 0
    first, step = (int(n) for n in part.split("/"))
    for name, call in [item for item in checks(device).items() if only in item[0]][first::step]:
        if time.monotonic() - began > seconds:
            print(f"LEFT OUT {name}: the time is over", flush=True)
            continue
        start = time.monotonic()
        try:
            call()
            if device == "cuda":
                torch.cuda.synchronize()
        except AssertionError as error:
            failed += 1
            print(f"DIFFERS {name}: {error}", flush=True)
        else:
            print(f"ok {name} {time.monotonic() - start:.1f} s", flush=True)
    return failed


def warm_up(only: str, seconds: float, processes: int) -> bool:
    """The checks without a tool, shared by processes: fills Triton's cache. Whether all of them passed."""
    command = [sys.executable, "-m", "benchmarks.kernels.sanitize", "--bare", "--only", only]
    command += ["--time-limit", str(seconds), "--part"]
    running = [subprocess.Popen([*command, f"{i}/{processes}"], cwd=ROOT) for i in range(processes)]
    return not any([process.wait() for process in running])


def run_under(tool: str, binary: str, only: str, seconds: float) -> dict[str, Any]:
    """The checks under one tool: what ran, what it reported. Its output is passed on as it comes."""
    command = [binary, "--tool", tool, "--error-exitcode", "86", "--print-limit", "20"]
    command += ["--check-api-memory-access", "no"] if tool == "memcheck" else []
    command += [sys.executable, "-m", "benchmarks.kernels.sanitize", "--bare", "--time-limit", str(seconds)]
    command += ["--only", only] if only else []
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    began, lines = time.monotonic(), []
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    late = threading.Timer(seconds + GRACE, os.killpg, (process.pid, signal.SIGKILL))
    late.start()
    try:
        for text in process.stdout:
            print(f"{tool}: {text}", end="", flush=True)
            lines.append(text)
    finally:
        late.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    status = process.wait()
    summaries = [x.strip("= \n") for x in lines if "SUMMARY" in x]
    return {
        "tool": tool,
        "clean": status == 0 and bool(summaries) and all(re.search(r"\b0 (errors|hazards)", x) for x in summaries),
        "status": status,
        "summary": summaries,
        "ran": sum(x.startswith("ok ") for x in lines),
        "left_out": sum(x.startswith("LEFT OUT") for x in lines),
        "differ": [x.strip() for x in lines if x.startswith("DIFFERS")],
        "reported": [x.strip("= \n") for x in lines if x.startswith("=========") and "_kernel" in x][:20],
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default="memcheck,racecheck", help="of memcheck, racecheck, synccheck, initcheck")
    parser.add_argument("--only", default="", help="checks whose name holds this")
    parser.add_argument("--time-limit", type=float, default=120, help="seconds for each tool; what is over is left out")
    parser.add_argument("--binary", help="compute-sanitizer, if it is not found by itself")
    parser.add_argument("--bare", action="store_true", help="no tool: run the checks here")
    parser.add_argument("--device", default="cuda", help="with --bare: cpu for Triton's interpreter")
    parser.add_argument("--part", default="0/1", help="with --bare: i/n, every n-th check from i on")
    parser.add_argument("--processes", type=int, default=8, help="that compile")
    args = parser.parse_args()
    if args.bare:
        return int(run_bare(args.device, args.only, args.time_limit, args.part) > 0)
    binary = args.binary or find()
    if binary is None:
        print(
            "compute-sanitizer was not found: in PATH, in a CUDA toolkit under /usr/local or /opt, or as a Python "
            "package (nvidia/**/compute-sanitizer); install one or give --binary",
            file=sys.stderr,
        )
        return 2
    passed = warm_up(args.only, args.time_limit, args.processes)
    results = [run_under(tool, binary, args.only, args.time_limit) for tool in args.tools.split(",")]
    print(json.dumps({"benchmark": "sanitize", "binary": binary, "passed_bare": passed, "results": results}))
    return int(not passed or not all(r["clean"] and not r["differ"] for r in results))


if __name__ == "__main__":
    sys.exit(main())
