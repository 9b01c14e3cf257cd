"""Tokens per second of the engine over Hugging Face `generate` on the demonstration model, on this CPU, in one run.

    python benchmarks/cpu_vs_transformers.py [--tokens 32] [--pairs 5] [--model-dir DIR]

one          1 request, recording on, over transformers with the same request
concurrent   16 requests at once, recording on, over transformers one by one
recording    16 requests at once, recording on over off: the median of pairs that ran one after the other

Both sides decode greedily in float32, with the same threads, the same prompts and the same number of tokens (the end
of text is ignored), from an empty cache. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

import tracklayer
from tracklayer.demo import model as demo
from tracklayer.demo.prompts import PROMPTS

REQUESTS = 16
TOPICS = ("the sea", "a clock", "bread", "the moon", "a bridge", "rain", "a violin", "salt")


def prompts(tokenizer: Any) -> list[list[int]]:
    """REQUESTS different conversations as token ids."""
    talks = [p.messages for p in PROMPTS] + [[{"role": "user", "content": f"Tell me about {t}."}] for t in TOPICS]
    encode = tokenizer.apply_chat_template
    return [encode(talk, add_generation_prompt=True, return_dict=False) for talk in talks[:REQUESTS]]


def timed(work: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    """Generated tokens per second, and the tokens."""
    start = time.perf_counter()
    outputs = work()
    return sum(map(len, outputs)) / (time.perf_counter() - start), outputs


@torch.no_grad()
def with_transformers(model: Any, ids: list[list[int]], tokens: int) -> list[list[int]]:
    outputs = []
    for one in ids:
        prompt = torch.tensor([one])
        mask = torch.ones_like(prompt)  # left out, it would hide the prompt's own end-of-turn tokens
        out = model.generate(prompt, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
        outputs.append(out[0, len(one) :].tolist())
    return outputs


def with_engine(engine: Any, ids: list[list[int]], tokens: int, routes: bool) -> list[list[int]]:
    engine.flush_cache()
    sampling = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    replies = engine.generate(input_ids=ids, sampling_params=sampling, return_routed_experts=routes, progress=False)
    for one, reply in zip(ids, replies, strict=True):
        if routes:
            rows = len(reply["meta_info"]["routed_experts"])
            assert rows == len(one) + tokens - 1, f"{rows} rows for {len(one)} + {tokens} tokens"
    return [reply["output_ids"] for reply in replies]


def measure(model_dir: Path, tokens: int, pairs: int) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    ids = prompts(tokenizer)
    plain = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    plain.generation_config.eos_token_id = None  # go on after the end of text, as the engine is told to
    facts: dict[str, Any] = {}
    config = {"model_path": str(model_dir), "dtype": "float32", "device": "cpu", "max_total_tokens": 8192}
    with (
        tracklayer.Engine(**config, enable_return_routed_experts=True) as on,
        tracklayer.Engine(**config) as off,
    ):
        for engine, routes in ((on, True), (off, False)):  # warm up
            with_engine(engine, ids, 8, routes)
        with_transformers(plain, ids[:1], 8)
        singles = [
            (
                timed(lambda: with_transformers(plain, ids[:1], tokens))[0],
                timed(lambda: with_engine(on, ids[:1], tokens, True))[0],
            )
            for _ in range(pairs)
        ]
        facts["one"] = _ratio(*map(statistics.median, zip(*singles, strict=True)))
        slow, expected = timed(lambda: with_transformers(plain, ids, tokens))
        fast, outputs = timed(lambda: with_engine(on, ids, tokens, True))
        facts["concurrent"] = _ratio(slow, fast)
        facts["same_tokens"] = sum(a == b for a, b in zip(expected, outputs, strict=True)) / len(ids)
        facts["recording"] = recording_cost(on, off, ids, tokens, pairs)
    return facts


def recording_cost(on: Any, off: Any, ids: list[list[int]], tokens: int, pairs: int) -> dict[str, Any]:
    """Speed with recording over without, medians of pairs: by wall clock, and by this process's CPU seconds."""
    walls, cpus = [], []
    for pair in range(pairs):
        order = [(on, True), (off, False)] if pair % 2 else [(off, False), (on, True)]
        speed, cpu_seconds = {}, {}
        for engine, routes in order:
            before = time.process_time()
            speed[routes], _ = timed(lambda e=engine, r=routes: with_engine(e, ids, tokens, r))
            cpu_seconds[routes] = time.process_time() - before
        walls.append(speed[True] / speed[False])
        cpus.append(cpu_seconds[False] / cpu_seconds[True])
    return {
        "ratio": round(statistics.median(walls), 3),
        "cpu_ratio": round(statistics.median(cpus), 3),
        "pairs": [round(r, 3) for r in walls],
    }


def _ratio(transformers_speed: float, engine_speed: float) -> dict[str, float]:
    return {
        "transformers_tokens_per_s": round(transformers_speed, 1),
        "engine_tokens_per_s": round(engine_speed, 1),
        "ratio": round(engine_speed / transformers_speed, 2),
    }


def machine() -> dict[str, Any]:
    """Where the figures come from."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return {
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit.stdout.strip() or None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", type=Path, default=demo.default_dir())
    parser.add_argument("--tokens", type=int, default=32, help="generated per request")
    parser.add_argument("--pairs", type=int, default=5, help="repetitions of each comparison")
    parser.add_argument("--threads", type=int, help="torch threads of both sides; default: torch's own choice")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    facts = measure(demo.build(args.model_dir), args.tokens, args.pairs)
    view = Table(title="Output tokens per second, float32 on the CPU")
    for name in ("", "transformers", "Tracklayer, recording on", "ratio"):
        view.add_column(name, justify="right" if name else "left")
    for name, label in (("one", "1 request"), ("concurrent", f"{REQUESTS} at once (transformers: one by one)")):
        view.add_row(label, *(str(value) for value in facts[name].values()))
    view.add_row("recording on over off", "", "", str(facts["recording"]["ratio"]))
    Console().print(view)
    print(json.dumps({**facts, "tokens": args.tokens, "requests": REQUESTS, **machine()}))


if __name__ == "__main__":
    main()
