"""What a pass over blocks (block diffusion) costs: the whole step, and what the host does of it while nothing runs.

    python benchmarks/block_passes.py [--shape sdar-30b] [--device cuda] [--disable-cuda-graph] [--requests 64]
                                      [--prompt 400] [--passes 60] [--confidence 1.0] [--routes]

Dummy weights: with them a confidence of 1.0 fills one token a pass, 0.0 all of a block. Every request is past its
prompt when timing begins. Figures are means a pass; the last line is JSON. `idle_ms` is the time from the arrival of a
pass's tokens to the next launch, in which the device has nothing of these requests to do.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tracklayer.bench.report import environment
from tracklayer.config import EngineConfig
from tracklayer.engine.engine import EngineCore
from tracklayer.types import EngineRequest, SamplingParams

LENGTH = 4
SDAR: dict[str, Any] = {
    "architectures": ["SDARMoeForCausalLM"],
    "model_type": "sdar_moe",
    "block_length": LENGTH,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
NAMES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "moe_intermediate_size", "num_experts", "num_experts_per_tok", "vocab_size", "max_position_embeddings",
    "mask_token_id",
)  # fmt: skip
SHAPES = {
    "tiny": (64, 3, 4, 2, 16, 128, 32, 12, 4, 128, 8192, 127),
    "sdar-30b": (2048, 48, 32, 4, 128, 6144, 768, 128, 8, 151936, 32768, 151669),
}


class Watch:
    """Seconds spent in the calls that it wraps, by name; `moments` of the last return of each."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self.moments: dict[str, float] = {}

    def on(self, owner: Any, name: str, before: Callable[[], None] | None = None) -> None:
        call = getattr(owner, name)
        self.spent[name] = 0.0

        def timed(*args: Any, **keywords: Any) -> Any:
            if before is not None:
                before()
            began = time.perf_counter()
            result = call(*args, **keywords)
            self.moments[name] = time.perf_counter()
            self.spent[name] += self.moments[name] - began
            return result

        setattr(owner, name, timed)


def build(args: argparse.Namespace, folder: Path) -> EngineCore:
    """An engine with all requests past their prompts."""
    values = dict(zip(NAMES, SHAPES[args.shape], strict=True))
    (folder / "config.json").write_text(json.dumps(SDAR | values))
    new = LENGTH * (args.passes + 16)
    config = EngineConfig(
        model_path=str(folder),
        load_format="dummy",
        device=args.device,
        dtype=args.dtype,
        random_seed=1,
        max_running_requests=args.requests,
        max_total_tokens=args.requests * (args.prompt + new + 2 * LENGTH),
        block_confidence=args.confidence,
        disable_cuda_graph=args.disable_cuda_graph,
        enable_return_routed_experts=args.routes,
        skip_route_selftest=True,
    )
    core = EngineCore(config)
    random = np.random.default_rng(1)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=new)
    for n in range(args.requests):
        prompt = random.integers(2, 120, args.prompt).tolist()
        core.add(EngineRequest(rid=str(n), input_ids=prompt, sampling=sampling, return_routed_experts=args.routes))
    while core.scheduler.num_waiting or any(not record.started for record in core.records.values()):
        core.step()
    for _ in range(4):
        core.step()
    return core


def measure(core: EngineCore, passes: int) -> dict[str, float]:
    """Means of that many passes, milliseconds."""
    watch, idle = Watch(), [0.0]

    def launching() -> None:
        idle[0] += time.perf_counter() - arrived[0]

    arrived = [time.perf_counter()]
    watch.on(core.scheduler, "plan")
    watch.on(core.runner, "launch", before=launching)
    watch.on(core.scheduler, "commit", before=lambda: arrived.__setitem__(0, time.perf_counter()))
    watch.on(core, "_commit")
    tokens = core.counters.generated_tokens
    steps, began = core.counters.steps, time.perf_counter()
    while core.counters.steps < steps + passes:
        core.step()
    spent = time.perf_counter() - began
    per_pass = {name: 1e3 * seconds / passes for name, seconds in watch.spent.items()}
    return {
        "pass_ms": 1e3 * spent / passes,
        "idle_ms": 1e3 * idle[0] / passes,
        "plan_ms": per_pass["plan"],
        "launch_ms": per_pass["launch"],
        "tokens_per_s": (core.counters.generated_tokens - tokens) / spent,
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--disable-cuda-graph", action="store_true")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=400)
    parser.add_argument("--passes", type=int, default=60)
    parser.add_argument("--confidence", type=float, default=1.0)
    parser.add_argument("--routes", action="store_true", help="record and return routes")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        core = build(args, Path(folder))
        found = {name: round(value, 3) for name, value in measure(core, args.passes).items()}
    print(", ".join(f"{name} {value:,}" for name, value in found.items()))
    print(json.dumps({**vars(args), **found, "environment": environment()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
