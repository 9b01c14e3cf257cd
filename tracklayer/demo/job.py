"""`tracklayer demo`: build the model, serve it, ask it over HTTP, check every returned route, show what came.

Steps: build (demo/model.py), serve and ask (demo/client.py), check (demo/check.py), show (demo/show.py).
The server uses a GPU when there is one: in float32 to compare routes exactly, then in bfloat16 to compare answers.
The last line printed is one JSON object (`summary`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from tracklayer.config import cache_dir, load_model_config
from tracklayer.demo import check, client, model, show
from tracklayer.demo.prompts import PROMPTS
from tracklayer.routes.forms import RouteShape
from tracklayer.routes.store import RouteWriter


def route_shape(model_dir: Path) -> RouteShape:
    """What routes of the demonstration model look like, from its config.json: every layer routes."""
    config = load_model_config(str(model_dir))
    layers = int(config["num_hidden_layers"])
    return RouteShape(
        layer_ids=tuple(range(layers)),
        top_k=int(config["num_experts_per_tok"]),
        num_experts=int(config["num_experts"]),
        num_hidden_layers=layers,
    )


def summary(samples: list[client.Sample], verdicts: list[check.Verdict]) -> dict[str, Any]:
    """The last line. `requests` counts prompts, `complete` and `agreement` are shares (1.0 is all)."""
    sets, differing = sum(v.sets for v in verdicts), sum(v.differing for v in verdicts)
    return {
        "requests": len({s.prompt.question for s in samples}),
        "samples": len(samples),
        "tokens": sum(len(s.output_ids) for s in samples),
        "rows": sum(len(s.routes) for s in samples),
        "complete": sum(s.complete for s in samples) / len(samples),
        "agreement": (sets - differing) / sets,
        "ties": sum(v.ties for v in verdicts),
        "wrong": sum(v.wrong for v in verdicts),
    }


def run(model_dir: Path, out_dir: Path, flags: list[str]) -> dict[str, Any]:
    """The whole demonstration; returns the summary. Raises TracklayerError when a step fails."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gpu = uses_gpu(flags)
    console = Console(width=None if sys.stdout.isatty() else 150)
    out_dir.mkdir(parents=True, exist_ok=True)
    model.build(model_dir, log=console.print)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)

    def ask(name: str, more: list[str]) -> list[client.Sample]:
        console.print(f"starting the server on {torch.cuda.get_device_name() if gpu else 'the CPU'}")
        with client.server(model_dir, out_dir / name, [*more, *flags]) as url:
            console.print(f"asking {len(PROMPTS)} prompts at once at {url}/generate")
            answers = asyncio.run(client.ask_all(url, PROMPTS, tokenizer, route_shape(model_dir)))
        return [sample for group in answers for sample in group]

    samples = ask("server.log", ["--dtype", "float32"])
    console.print("checking every route against a plain Hugging Face forward in float32")
    referee = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    verdicts = [check.compare(referee, [*s.input_ids, *s.output_ids][: len(s.routes)], s.routes) for s in samples]
    console.print(show.table(samples, verdicts))
    show.picture(samples, out_dir / "expert_load.png")
    write_routes(samples, out_dir / "routes.safetensors", model_dir)
    console.print(f"routes: {out_dir / 'routes.safetensors'}\nexpert load by layer: {out_dir / 'expert_load.png'}")
    facts = summary(samples, verdicts) | {"gpu": gpu} | greedy(referee, samples)
    if gpu:
        in_16_bits = greedy(referee, ask("server_bfloat16.log", ["--dtype", "bfloat16"]))
        console.print(
            f"in bfloat16 {in_16_bits['greedy_same']} of {in_16_bits['greedy_tokens']} greedy tokens are the float32 "
            f"model's best; the worst falls short by {in_16_bits['greedy_gap']:.3f} nats"
        )
        facts |= {f"bfloat16_{name}": value for name, value in in_16_bits.items()}
    return facts


def uses_gpu(flags: list[str]) -> bool:
    """Whether a server with these flags runs on a GPU: the rule of `--device auto`."""
    import torch

    args, _ = _device_parser().parse_known_args(flags)
    return args.device != "cpu" and torch.cuda.is_available()


def _device_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device", default="auto")
    return parser


def greedy(referee: Any, samples: list[client.Sample]) -> dict[str, Any]:
    """Tokens of greedy answers, how many are the referee's best, and by how many nats the worst falls short."""
    answers = [check.answer(referee, s.input_ids, s.output_ids) for s in samples if s.prompt.n == 1]
    tokens = sum(a.tokens for a in answers)
    return {
        "greedy_tokens": tokens,
        "greedy_same": tokens - sum(a.differing for a in answers),
        "greedy_gap": max(a.worst_gap for a in answers),
    }


def passed(facts: dict[str, Any]) -> bool:
    """Every row is there, every differing set of experts is a tie, no greedy token falls short by much."""
    gaps = [value for name, value in facts.items() if name.endswith("greedy_gap")]
    return facts["complete"] == 1.0 and not facts["wrong"] and max(gaps) <= check.NEAR


def write_routes(samples: list[client.Sample], file: Path, model_dir: Path) -> None:
    """All samples with their token ids in one route file (docs/reading_routes.md says how to open it)."""
    with RouteWriter(file, route_shape(model_dir), with_tokens=True, metadata={"model": model_dir.name}) as out:
        for sample in samples:
            out.add(sample.routes, [*sample.input_ids, *sample.output_ids])


def main(argv: list[str]) -> int:
    """`tracklayer demo`: exit status 0 when `passed`, else 1."""
    parser = argparse.ArgumentParser(
        prog="tracklayer demo", description="Serve the demonstration model, ask it, check every returned route."
    )
    parser.add_argument("--model-dir", type=Path, default=model.default_dir(), help="default: %(default)s")
    parser.add_argument(
        "--out", type=Path, default=cache_dir() / "demo", help="where results go (default: %(default)s)"
    )
    args, flags = parser.parse_known_args(argv)  # the rest are flags of the server
    facts = run(args.model_dir, args.out, ["--random-seed", "0", *flags])
    print(json.dumps(facts), flush=True)
    return 0 if passed(facts) else 1
