"""`tracklayer bench`: measure workloads on a model or a dummy shape; `--url` measures a running server instead."""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tracklayer.bench import curves, online
from tracklayer.bench.offline import Measurement, Stopwatch, measure
from tracklayer.bench.report import environment, line, share_of_floor, table
from tracklayer.bench.shapes import footprint, write_shape
from tracklayer.bench.workloads import WORKLOADS, Workload
from tracklayer.config import EngineConfig
from tracklayer.engine.llm import Engine
from tracklayer.engine.thread import EngineThread
from tracklayer.errors import UserError
from tracklayer.models.spec import ModelSpec
from tracklayer.runner.load import load_model

WARM_UP_TOKENS = 16  # output tokens of the unmeasured first run: enough to meet every shape


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="tracklayer bench", description=__doc__)
    p.add_argument("--url", help="measure the server at this address instead of an engine in this process")
    p.add_argument("--model", help="checkpoint directory (with --url: its name is not needed)")
    p.add_argument("--shape", default="qwen3-30b-a3b", help="dummy weights of this shape, when no --model is given")
    p.add_argument("--workloads", default="W1,W2,W3,W4", help=f"comma-separated, of {', '.join(WORKLOADS)}")
    p.add_argument("--recording", choices=("on", "off", "pairs"), default="on", help="pairs: both, alternating")
    p.add_argument("--repeats", type=int, default=2, help="measured runs of each after one warm-up")
    p.add_argument("--scale", type=float, default=1.0, help="shrink requests and tokens by this factor")
    p.add_argument("--input-tokens", type=int, help="override the workload's")
    p.add_argument("--output-tokens", type=int, help="override the workload's")
    p.add_argument("--num-prompts", type=int, help="override the workload's")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--mem-fraction-static", type=float, default=0.88)
    p.add_argument("--disable-cuda-graph", action="store_true")
    p.add_argument("--disable-overlap-schedule", action="store_true")
    p.add_argument("--curves", action="store_true", help="the cost of a decode step by batch size and context instead")
    p.add_argument("--batches", default="1,2,4,8,16,32,64,128,256,512", help="with --curves: sequences of a step")
    p.add_argument("--contexts", default="128,1024,4096,16384,32768", help="with --curves: tokens of each sequence")
    p.add_argument("--time-limit", type=float, default=600, help="with --curves: seconds, start-up included")
    p.add_argument("--plot", help="with --curves: write the plot to this SVG file")
    p.add_argument("--out", help="append the JSON lines to this file too")
    return p


def chosen(args: argparse.Namespace) -> list[Workload]:
    """The workloads asked for, with their overrides. Raises UserError for an unknown one."""
    found = []
    for name in args.workloads.split(","):
        if name not in WORKLOADS:
            raise UserError(f"workload {name!r} is not known; known are {', '.join(WORKLOADS)}")
        names = ("input_tokens", "output_tokens", "num_prompts")
        overrides = {key: getattr(args, key) for key in names if getattr(args, key) is not None}
        found.append(replace(WORKLOADS[name].scaled(args.scale), **overrides))
    return found


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    workloads = chosen(args)
    command = "tracklayer bench " + " ".join(argv)

    def emit(text: str) -> None:
        print(text, flush=True)
        if args.out:
            with Path(args.out).open("a") as file:
                file.write(text + "\n")

    if args.curves:
        curves.run(args, command, emit)
    elif args.url:
        online.run(args.url, workloads, args, command, emit)
    else:
        offline(args, workloads, command, emit)
    return 0


def start(args: argparse.Namespace, workloads: list[Workload]) -> tuple[dict[bool, Stopwatch], ModelSpec, float]:
    """An engine per recording mode over the same weights; the model's spec, and the seconds until they were ready."""
    modes = {"on": (True,), "off": (False,), "pairs": (True, False)}[args.recording]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = args.model or str(write_shape(args.shape, Path(folder)))
        config = EngineConfig(
            model_path=path,
            load_format="auto" if args.model else "dummy",
            skip_tokenizer_init=True,
            random_seed=args.seed,
            enable_return_routed_experts=True,
            mem_fraction_static=args.mem_fraction_static,
            disable_cuda_graph=args.disable_cuda_graph,
            disable_overlap_schedule=args.disable_overlap_schedule,
            max_running_requests=max(w.num_requests for w in workloads),
            max_total_tokens=cache_tokens(workloads) if len(modes) > 1 else None,
        )
        model = load_model(config, args.seed)
        watches = {}
        for recording in modes:
            one = replace(config, enable_return_routed_experts=recording)
            watches[recording] = Stopwatch(EngineThread(one, model=model))
    return watches, model.spec, time.perf_counter() - began


def offline(args: argparse.Namespace, workloads: list[Workload], command: str, emit: Callable[[str], None]) -> None:
    """Measure each workload on each engine, alternating; the best run of each is a JSON line as soon as it is known."""
    watches, spec, start_seconds = start(args, workloads)
    engines = {recording: Engine.over(watch, None) for recording, watch in watches.items()}
    env, feet = environment(), footprint(spec)
    common = {"shape": args.model or args.shape, "start_seconds": round(start_seconds, 1), "command": command, **env}
    modes, shown = tuple(engines), []
    try:
        for workload in workloads:
            runs: dict[bool, list[Measurement]] = {recording: [] for recording in modes}
            warm_up = replace(workload, output_tokens=min(workload.output_tokens, WARM_UP_TOKENS))
            for repeat in range(-1, args.repeats):
                for recording in modes if repeat % 2 else modes[::-1]:
                    what, seed = workload if repeat >= 0 else warm_up, args.seed + 1 + repeat
                    m = measure(engines[recording], watches[recording], what, seed, recording=recording)
                    if repeat >= 0:
                        runs[recording].append(m)
            pairs = zip(runs[True], runs[False], strict=True) if len(modes) > 1 else ()
            ratios = [on.value(workload.metric) / off.value(workload.metric) for on, off in pairs]
            for measured in runs.values():
                best = max(measured, key=lambda m: m.value(workload.metric))
                best.extra = share_of_floor(best, workload, feet, env["device"])
                best.extra[f"all_{workload.metric}"] = [round(m.value(workload.metric), 1) for m in measured]
                if len(modes) > 1:
                    best.extra["recording_on_over_off"] = [round(r, 4) for r in ratios]
                    best.extra["recording_on_over_off_median"] = round(statistics.median(ratios), 4)
                shown.append(best)
                emit(line(best, workload, **common))
        table(shown)
    finally:  # also when interrupted: an engine's thread must not outlive the interpreter
        for engine in engines.values():
            engine.shutdown()


def cache_tokens(workloads: list[Workload]) -> int:
    """KV slots that the largest workload needs when copies of a prompt share it: two engines share one GPU."""
    needs = (w.num_prompts * w.input_tokens + w.num_requests * w.output_tokens for w in workloads)
    return int(1.1 * max(needs)) + 1024
