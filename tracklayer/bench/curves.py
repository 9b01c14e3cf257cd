"""`tracklayer bench --curves`: what a decode step costs, by batch size and by context.

No prompt is run: each sequence is laid in the engine's own tables as if it had been running for `context` tokens, over
a cache of random numbers, and then decodes by the path that serves requests: a CUDA graph of just that batch size,
sampling, the routes' pool, the copy of the tokens to the host, the next step launched before the one before is read.
Planning is not in it (the scheduler plans while the device works). Routes follow from dummy weights, so each line says
how many distinct experts a layer's step has in fact read.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tracklayer.bench.plot import Chart, Series, page
from tracklayer.bench.report import READ_BANDWIDTH, environment
from tracklayer.bench.shapes import footprint, write_shape
from tracklayer.config import EngineConfig
from tracklayer.engine.engine import EngineCore
from tracklayer.errors import UserError
from tracklayer.runner.graphs import DecodeGraphs
from tracklayer.types import EngineRequest, SamplingParams, Share, StepPlan

WARM_UP, STEPS, RUNS = 3, 16, 3
NO_COPIES = np.empty((0, 2), np.int32)


def numbers(text: str, name: str, least: int = 1) -> list[int]:
    """Rising numbers of a comma-separated list. Raises UserError for others."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) >= least for part in parts):
        raise UserError(f"{name} {text!r}: numbers of {least} or more, separated by commas")
    return sorted({int(part) for part in parts})


def start(args: argparse.Namespace, batches: list[int], contexts: list[int]) -> EngineCore:
    """An engine whose cache is as large as the memory allows, with graphs of the asked batch sizes alone."""
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            model_path=args.model or str(write_shape(args.shape, Path(folder))),
            load_format="auto" if args.model else "dummy",
            skip_tokenizer_init=True,
            random_seed=args.seed,
            enable_return_routed_experts=args.recording != "off",
            mem_fraction_static=args.mem_fraction_static,
            context_length=contexts[-1],
            max_running_requests=batches[-1],
            disable_hybrid_swa_memory=True,  # sequences are laid in one table
            chunked_prefill_size=max(batches[-1], 256),  # no prompt is run: leave its memory to the cache
            disable_cuda_graph=True,  # the engine's ladder; those of the asked sizes are captured below
            skip_route_selftest=True,
        )
        core = EngineCore(config)
    runner = core.runner
    with torch.inference_mode():
        for caches in runner.caches.kv:
            for cache in caches:
                if cache.is_floating_point():
                    cache.normal_()
        if runner.device.type == "cuda" and not args.disable_cuda_graph:
            runner.graphs = DecodeGraphs(core.model.decoder, runner.rows, runner.caches, batches, runner.device)
            runner.graphs.capture()
    return core


class Point:
    """`batch` sequences that end at `context` tokens after the steps of one run."""

    def __init__(self, core: EngineCore, batch: int, context: int, seed: int) -> None:
        self.core, self.batch, self.context = core, batch, context
        self.runner = core.runner
        first = core.config.page_size  # page 0 is the padding's
        self.slots_BT = np.arange(batch * context, dtype=np.int32).reshape(batch, context) + first
        self.generator = torch.Generator().manual_seed(seed)

    @property
    def slots_needed(self) -> int:
        return self.slots_BT.size + self.core.config.page_size

    def lay(self) -> None:
        """Enter the sequences' slots, and random tokens as if they had just been sampled."""
        rows = self.runner.rows
        rows.slot_table_RC[: self.batch, : self.context] = torch.from_numpy(self.slots_BT).to(self.runner.device)
        tokens = torch.randint(self.core.info.vocab_size, (self.batch,), generator=self.generator, dtype=torch.int32)
        rows.last_token_R[: self.batch] = tokens.to(self.runner.device)

    def plans(self) -> list[StepPlan]:
        total = WARM_UP + STEPS
        return [StepPlan(i, [*self.shares(self.context - total + i, i == 0)], NO_COPIES) for i in range(total)]

    def shares(self, position: int, first: bool) -> Iterator[Share]:
        for row in range(self.batch):
            rid = f"curve-{row}"
            yield Share(
                rid=rid, row=row, start=position, num_tokens=1, slots=self.slots_BT[row, position : position + 1],
                table_start=position, token_ids=None, samples=True,
                admitted=EngineRequest(rid=rid, input_ids=[0], sampling=SamplingParams(temperature=0.0))
                if first else None,
            )  # fmt: skip

    def seconds_a_step(self) -> float:
        """Of STEPS steps, each launched before the one before is read, as the engine does."""
        plans, before, began = self.plans(), None, 0.0
        for i, plan in enumerate(plans):
            if i == WARM_UP:
                assert before is not None
                before.wait()
                began = time.perf_counter()
            launched = self.runner.launch(plan)
            if before is not None:
                before.wait()
            before = launched
        assert before is not None
        before.wait()
        return (time.perf_counter() - began) / STEPS

    def experts_hit(self) -> float | None:
        """Distinct experts that the last step chose, mean over the MoE layers; None when nothing was recorded."""
        pool = self.runner.caches.pool
        if pool is None:
            return None
        slots = torch.from_numpy(self.slots_BT[:, -1]).long().to(self.runner.device)
        rows_BLK = pool.tensor_SLK[slots].cpu().numpy()
        return float(np.mean([len(np.unique(rows_BLK[:, layer])) for layer in range(rows_BLK.shape[1])]))


def measure(core: EngineCore, batch: int, context: int, seed: int, bandwidth: float | None = None) -> dict[str, Any]:
    """Milliseconds of a step (median, least, most), tokens a second, bytes it must read, the share of the floor."""
    point = Point(core, batch, context, seed)
    available = core.scheduler.config.num_slots
    if point.slots_needed > available:
        return {"batch": batch, "context": context, "skipped": f"needs {point.slots_needed} slots of {available}"}
    point.lay()
    times = sorted(point.seconds_a_step() for _ in range(RUNS))
    seconds = times[len(times) // 2]
    hit, feet = point.experts_hit(), footprint(core.model.spec)
    found: dict[str, Any] = {
        "batch": batch,
        "context": context,
        "ms_a_step": round(seconds * 1e3, 4),
        "ms_least_most": [round(times[0] * 1e3, 4), round(times[-1] * 1e3, 4)],
        "output_tokens_per_s": round(batch / seconds, 1),
        "experts_hit": None if hit is None else round(hit, 1),
    }
    if feet is not None:
        mean_context = context - (STEPS - 1) / 2
        needed = feet.bytes_per_step(batch, round(mean_context), core.model.dtype.itemsize, experts_hit=hit)
        found |= {"needed_bytes": needed, "needed_bytes_per_s": needed / seconds}
        if bandwidth:
            found |= {"floor_ms": round(needed / bandwidth * 1e3, 4), "share_of_floor": needed / bandwidth / seconds}
    return found


def charts(shape: str, points: list[dict[str, Any]]) -> list[Chart]:
    """Milliseconds and tokens a second against the batch, a line for each context; dashed: the floor, where known."""
    contexts = sorted({p["context"] for p in points})

    def lines(key: str, label: str = "{} tokens", dashed: bool = False) -> list[Series]:
        found = []
        for colour, context in enumerate(contexts):
            own = sorted((p["batch"], p[key]) for p in points if p["context"] == context and key in p)
            found.append(Series(label.format(context), own, colour, dashed))
        return found

    floors = [Series("floor", s.points, s.colour, True) for s in lines("floor_ms")]
    return [
        Chart(f"{shape}: a decode step", "sequences", "ms", [*lines("ms_a_step"), *(floors[:1] + floors[1:][-1:])]),
        Chart(f"{shape}: throughput", "sequences", "output tokens/s", lines("output_tokens_per_s")),
        Chart(f"{shape}: share of the floor", "sequences", "floor / time", lines("share_of_floor")),
    ]


def run(args: argparse.Namespace, command: str, emit: Callable[[str], None]) -> None:
    """Measure every batch size at every context until the time is over; a JSON line each, and the plot
    anew. Raises UserError for lists that make no sense."""
    batches = numbers(args.batches, "--batches")
    contexts = numbers(args.contexts, "--contexts", WARM_UP + STEPS)
    deadline = time.monotonic() + args.time_limit
    core, env, shape = start(args, batches, contexts), environment(), args.model or args.shape
    recording = args.recording != "off"
    points: list[dict[str, Any]] = []
    with torch.inference_mode():
        for context, batch in product(contexts, batches):
            if time.monotonic() > deadline:
                print(f"the time is over before batch {batch} at {context} tokens; raise --time-limit", flush=True)
                break
            found = measure(core, batch, context, args.seed, READ_BANDWIDTH.get(env["device"]))
            emit(json.dumps({"curve": shape, **found, "recording": recording, "command": command, **env}))
            points += [found] if "ms_a_step" in found else []
            if args.plot and points:
                Path(args.plot).write_text(page(charts(shape, points)))
