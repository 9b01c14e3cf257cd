"""`tracklayer tune`: find the expert kernels' tiles for a model shape on this GPU, and write them where they are read.

Each batch size starts from the rule that holds where nothing was measured; every configuration is timed in a chain of
layers, its result compared with the rule's, and the fastest is written at once, so that a run that is cut short leaves
what it found. One JSON line a batch size.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

from tracklayer.bench.chain import Chain, ExpertShape, compile_job
from tracklayer.bench.precompile import compile_ahead
from tracklayer.bench.report import environment
from tracklayer.bench.shapes import SHAPES, write_shape
from tracklayer.bench.tiles import Form, forms
from tracklayer.config import load_model_config
from tracklayer.errors import UserError
from tracklayer.kernels import combine, experts_small, grouped_gemm, route_sort, tuning
from tracklayer.layers.experts import kernel_spec
from tracklayer.layers.spec import MoESpec
from tracklayer.models.registry import resolve

Config = dict[str, Any]
# Most telling first: a run that is cut short has those. Between two of them the smaller one's entry holds.
BATCHES = (1, 256, 16, 64, 16384, 4, 1024, 4096, 128, 32, 8, 2, 512)
TUNED = Path(str(resources.files("tracklayer.kernels"))) / "tuned"
COMPILE_SHARE = 0.4  # of the time limit
FAR_BEHIND = 2.0  # a form whose first tiles take so many times the best is left
SAME = 3e-2  # relative difference that 16 bits may make between two configurations' results


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="tracklayer tune", description=__doc__)
    p.add_argument(
        "--shape", nargs="+", default=[], metavar="NAME|E,K,H,W",
        help=f"experts, chosen, model width, expert width; or one of {', '.join(SHAPES)}",
    )  # fmt: skip
    p.add_argument(
        "--model", nargs="+", default=[], metavar="PATH", help="checkpoint directories (config.json is read)"
    )
    p.add_argument("--batches", help="tokens of a step, comma-separated, most important first")
    p.add_argument("--time-limit", type=float, default=600, help="seconds for all shapes together")
    p.add_argument("--processes", type=int, help="that compile (default: one a core)")
    p.add_argument("--out", help="table to write or extend (default: the one that the engine reads for this GPU)")
    return p


def shapes_of(args: argparse.Namespace) -> list[ExpertShape]:
    """What to tune, each once. Raises UserError for what is neither a shape nor a MoE model."""
    found: dict[str, ExpertShape] = {}
    for text in args.shape:
        numbers = text.split(",")
        if len(numbers) == 4 and all(n.isdigit() and int(n) > 0 for n in numbers):
            experts, top_k, width, inner = map(int, numbers)
            if top_k > experts:
                raise UserError(f"--shape {text}: {top_k} of {experts} experts can not be chosen; the order is E,K,H,W")
            found.setdefault(f"{experts},{width},{inner}", ExpertShape(text, experts, top_k, width, inner))
            continue
        with tempfile.TemporaryDirectory() as folder:
            for shape in model_shapes(text, str(write_shape(text, Path(folder)))):
                found.setdefault(shape.key, shape)
    for path in args.model:
        for shape in model_shapes(path, path):
            found.setdefault(shape.key, shape)
    if not found:
        raise UserError("nothing to tune: give --shape NAME, --shape E,K,H,W or --model PATH")
    return list(found.values())


def model_shapes(name: str, path: str) -> Iterator[ExpertShape]:
    """The expert shapes of a model. Raises UserError when it has none."""
    _, spec = resolve(load_model_config(path))
    bodies = {sub.body for layer in spec.layers for sub in layer if isinstance(sub.body, MoESpec)}
    if not bodies:
        raise UserError(f"{name} has no MoE layer, so there is nothing to tune")
    for body in bodies:
        router, width = body.router, body.latent or spec.hidden_size
        yield ExpertShape(name, router.num_experts, router.top_k, width, body.width, kernel_spec(body), bool(body.bias))


def batches_of(text: str | None) -> list[int]:
    if text is None:
        return list(BATCHES)
    if not all(n.strip().isdigit() and int(n) > 0 for n in text.split(",")):
        raise UserError(f"--batches {text!r}: numbers of tokens above 0, separated by commas")
    return list(dict.fromkeys(int(n) for n in text.split(",")))


def rule(shape: ExpertShape, num_tokens: int, device: torch.device) -> Config:
    """What the engine takes where nothing was tuned."""
    return tuning.untuned(device, shape.experts, shape.top_k, num_tokens, torch.bfloat16)


class Search:
    """The best configuration of one batch size, until a deadline."""

    def __init__(self, chain: Chain, num_tokens: int, deadline: float, usable: dict[str, bool]) -> None:
        self.chain, self.deadline, self.usable = chain, deadline, usable
        self.num_tokens = num_tokens
        chain.batch(num_tokens)
        self.best: Config = rule(chain.shape, num_tokens, chain.device)
        self.wanted_TD: Tensor = chain.run(self.best)
        self.rule_us = self.best_us = chain.us_per_layer(self.best)
        self.timed: dict[str, float | None] = {repr(self.best): self.best_us}
        self.wrong: list[Config] = []

    @property
    def over(self) -> bool:
        return time.monotonic() > self.deadline

    def run(self) -> None:
        shape = self.chain.shape
        for form in forms(self.num_tokens, shape.experts, shape.top_k, shape.inner):
            if self.over:
                return
            self.form(form)
        if len(self.timed) > 1:  # both again, side by side, with more replays: the least of many times is a lucky one
            again = rule(shape, self.num_tokens, self.chain.device)
            self.rule_us, self.best_us = (self.chain.us_per_layer(c, replays=20) for c in (again, self.best))
            if self.best_us > self.rule_us:
                self.best, self.best_us = again, self.rule_us

    def form(self, form: Form) -> None:
        """The second product's tiles beside the first's first, then the first's beside the second's best."""
        ups, downs = ([t for t in tiles if self.compiled(form, t)] for tiles in (form.ups, form.downs))
        best: tuple[float, Config, Config] | None = None
        for choose_down in (True, False):
            for tile in downs if choose_down else ups:
                if self.over or not ups or not downs:
                    return
                up, down = (best[1], best[2]) if best else (ups[0], downs[0])
                pair = (up, tile) if choose_down else (tile, down)
                us = self.time(form.config(*pair))
                if us is not None and (best is None or us < best[0]):
                    best = (us, *pair)
                if choose_down and tile is downs[0] and us is not None and us > FAR_BEHIND * self.best_us:
                    return

    def compiled(self, form: Form, tile: Config) -> bool:
        return self.usable.get(job_key(self.chain.shape, self.num_tokens, form, tile), True)

    def time(self, config: Config) -> float | None:
        """Microseconds a layer, None for what the device can not run; what computes something else is never taken."""
        name = repr(config)
        if name not in self.timed:
            us = self.timed[name] = self.measure(config)
            if us is not None and us < self.best_us:
                self.best_us, self.best = us, config
        return self.timed[name]

    def measure(self, config: Config) -> float | None:
        try:
            y_TD = self.chain.run(config)
        except (TritonError, RuntimeError) as error:
            if self.chain.device.type == "cuda":
                torch.cuda.synchronize()  # raises anew what has broken more than this launch
            print(f"can not run {config}: {str(error)[:200]}", flush=True)
            return None
        if not float((y_TD - self.wanted_TD).norm()) <= SAME * float(self.wanted_TD.norm()):
            self.wrong.append(config)
            return None
        return self.chain.us_per_layer(config)


def job_key(shape: ExpertShape, num_tokens: int, form: Form, tile: Config) -> str:
    """Names a compilation: which kernel of a shape, its tiles, and what Triton specialises of the token count."""
    of = [num_tokens == 1, num_tokens % 16 == 0, num_tokens >= 1024]
    return f"{shape.key},{shape.top_k} {form.name} {form.m} {sorted(tile.items())} {of}"


def capability() -> int | None:
    """The GPU's, as in 90; None without one. Asked in a child: this process must not know CUDA before it forks."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        if not pool.apply(torch.cuda.is_available):
            return None
        major, minor = pool.apply(torch.cuda.get_device_capability)
    return 10 * major + minor


def compile_all(
    shapes: list[ExpertShape], batches: list[int], target: int, deadline: float, processes: int | None
) -> dict[str, bool]:
    """Compile what the searches will try; which tiles were compiled in time, by `job_key`."""
    jobs: dict[str, Any] = {}
    names: dict[str, list[str]] = {}
    for num_tokens in batches:
        for shape in shapes:
            for form in forms(num_tokens, shape.experts, shape.top_k, shape.inner):
                for up, down in form.pairs():
                    keys = [job_key(shape, num_tokens, form, tile) for tile in (up, down)]
                    label = " ".join(keys)
                    if label not in jobs:
                        jobs[label] = compile_job(shape, num_tokens, form.config(up, down))
                        names[label] = keys
    began = time.monotonic()
    modules = [combine, experts_small, grouped_gemm, route_sort]
    done = compile_ahead(list(jobs.values()), modules, capability=target, deadline=deadline, processes=processes)
    print(f"compiled {sum(done)} of {len(done)} configurations in {time.monotonic() - began:.0f} s", flush=True)
    usable: dict[str, bool] = {}
    for label, ok in zip(jobs, done, strict=True):
        for key in names[label]:
            usable[key] = usable.get(key, False) or ok
    return usable


def write(out: Path, shipped: Path, shape: ExpertShape, num_tokens: int, config: Config) -> None:
    """Enter one configuration into the table `out`, which begins as the shipped one when it is not there."""
    source = out if out.is_file() else shipped
    table = json.loads(source.read_text()) if source.is_file() else {}
    table.setdefault(shape.key, {})[str(num_tokens)] = config
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = out.with_suffix(".new")
    fresh.write_text(json.dumps(table, indent=1) + "\n")
    os.replace(fresh, out)


def tune(
    shapes: list[ExpertShape],
    batches: list[int],
    deadline: float,
    out: Path | None,
    device: str,
    usable: dict[str, bool],
) -> list[dict[str, Any]]:
    """Search every shape and batch size, sharing the time that is left; prints and returns a record of each."""
    env = environment()
    shipped = TUNED / f"{tuning.device_key(env['device'])}.json"
    records = []
    for i, shape in enumerate(shapes):
        shape_deadline = time.monotonic() + (deadline - time.monotonic()) / (len(shapes) - i)
        chain = Chain(shape, device)
        for j, num_tokens in enumerate(batches):
            left = shape_deadline - time.monotonic()
            if left <= 0:
                print(f"{shape.name}: no time for {', '.join(map(str, batches[j:]))} tokens; raise --time-limit")
                break
            search = Search(chain, num_tokens, time.monotonic() + left / (len(batches) - j), usable)
            search.run()
            write(out or shipped, shipped, shape, num_tokens, search.best)
            us = search.best_us
            record = {
                "shape": shape.name, "experts": shape.experts, "top_k": shape.top_k, "width": shape.width,
                "inner": shape.inner, "tokens": num_tokens, "us_per_layer": round(us, 2),
                "rule_us_per_layer": round(search.rule_us, 2), "tb_per_s": round(chain.bytes_per_layer / us / 1e6, 3),
                "tflop_per_s": round(chain.flop_per_layer / us / 1e6, 1), "tried": len(search.timed),
                "complete": not search.over, "wrong": search.wrong, "config": search.best, **env,
            }  # fmt: skip
            print(json.dumps(record), flush=True)
            records.append(record)
        del chain
        if device == "cuda":
            torch.cuda.empty_cache()
    return records


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    deadline = time.monotonic() + args.time_limit
    shapes, batches = shapes_of(args), batches_of(args.batches)
    folder = Path(args.out).parent if args.out else TUNED
    if folder.exists() and not os.access(folder, os.W_OK):
        raise UserError(f"{folder} can not be written; give --out FILE")
    target = capability()
    if target is None:
        raise UserError("tune measures kernels on a CUDA GPU and found none")
    usable = compile_all(shapes, batches, target, time.monotonic() + COMPILE_SHARE * args.time_limit, args.processes)
    with torch.inference_mode():
        records = tune(shapes, batches, deadline, Path(args.out) if args.out else None, "cuda", usable)
    wrong = sum(len(r["wrong"]) for r in records)
    if wrong:
        print(f"{wrong} configurations gave another result than the rule's and were left out: a fault of a kernel")
    return int(bool(wrong))
