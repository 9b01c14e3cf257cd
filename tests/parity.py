"""The engine against a reference model, on one tiny checkpoint: log-probabilities and routes in five ways of running.

`python tests/parity.py [variant ...]` prints the matrix. `--write` runs all, writes tracklayer/models/checked.json and
docs/models.md (the registry's table and this matrix).

The engine runs on the CPU in float32 with recording on. Each finished sequence goes once, whole and without a cache,
through the reference, which gives log-probabilities at every position and the experts of every MoE layer.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
import transformers

from tracklayer.config import EngineConfig
from tracklayer.engine.engine import EngineCore
from tracklayer.models import listing
from tracklayer.models.registry import all_families
from tracklayer.types import EngineRequest, SamplingParams, TokenLogprobs

MODES = ("prefill", "decode", "chunked", "batch", "prefix")
CHUNK = 64
TOLERANCE = 1e-4


@dataclass
class Mode:
    """What one way of running gave: largest log-probability difference, route rows compared and wrong."""

    error: float = 0.0
    rows: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.rows > 0 and self.error <= TOLERANCE and not self.wrong

    def __str__(self) -> str:
        return f"{self.error:.0e}" if self.ok else f"FAIL {self.error:.0e}, {len(self.wrong)} of {self.rows} rows"


class Reference:
    """A plain model, and which experts its MoE layers used: {layer: ids [T, K]}."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.routes: dict[int, torch.Tensor] = {}
        if not isinstance(model, torch.nn.Module):  # a plain model, which says its routes itself
            self.routes = model.routes
            return
        for name, module in model.named_modules():
            kind = type(module).__name__
            if kind == "Llama4Router":
                module.register_forward_hook(self._llama4(name), with_kwargs=True)
            elif kind.endswith("Experts"):
                module.register_forward_pre_hook(self._called_with(name), with_kwargs=True)

    def _layer(self, name: str) -> int:
        return int(re.search(r"(?:layers|blocks)\.(\d+)\.", name)[1])

    def _called_with(self, name: str):
        def hook(module, args, kwargs):
            for value in (*args, *kwargs.values()):
                if torch.is_tensor(value) and not value.is_floating_point() and value.dim() == 2:
                    self.routes[self._layer(name)] = value.clone()

        return hook

    def _llama4(self, name: str):
        def hook(module, args, kwargs, output):  # the experts see a dense [T, E]; the chosen are the largest logits
            self.routes[self._layer(name)] = output[1].topk(module.top_k, -1).indices

        return hook

    @torch.no_grad()
    def __call__(self, tokens: list[int]) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """(log-probabilities [T, V] of the next token, experts per layer) of a whole sequence."""
        self.routes.clear()
        out = self.model(input_ids=torch.tensor([tokens]), use_cache=False)
        logits_TV = out.logits[0].float()
        routes = {layer: ids.reshape(len(tokens), -1).sort(-1).values.numpy() for layer, ids in self.routes.items()}
        return logits_TV.log_softmax(-1).numpy(), routes


def tiny_engine(folder: Path, **options: Any) -> EngineCore:
    settings = {
        "device": "cpu",
        "dtype": "float32",
        "enable_return_routed_experts": True,
        "max_total_tokens": 2000,
        "max_running_requests": 8,
        "chunked_prefill_size": CHUNK,
        "random_seed": 0,
    }
    return EngineCore(EngineConfig(model_path=str(folder), **{**settings, **options}))


def check_variant(variant: str, folder: Path, **overrides: Any) -> tuple[dict[str, Mode], EngineCore]:
    """Save the variant's checkpoint in `folder`, run all modes; returns them by name, and the engine."""
    reference = Reference(tiny.save(variant, folder, **overrides))
    core = tiny_engine(folder)
    vocab = core.info.vocab_size
    random = np.random.default_rng(5)
    prompts = {n: random.integers(0, vocab, n).tolist() for n in (40, 100, 1, 5, 23, 50)}
    modes = {name: Mode() for name in MODES}
    alone = generate(core, {"a": prompts[40]}, 12)
    compare(core, reference, alone, modes["prefill"], 0, 40)
    compare(core, reference, alone, modes["decode"], 40, None)
    compare(core, reference, generate(core, {"b": prompts[100]}, 2), modes["chunked"], 0, None)
    compare(core, reference, generate(core, {str(n): prompts[n] for n in (1, 5, 23, 50)}, 8), modes["batch"], 0, None)
    branch = prompts[40][:30] + prompts[23][:6]
    again = generate(core, {"c": branch}, 4, logprob_start=-1)
    cached, reusable = again["c"].cached, 0 if core.model.decoder.recurrents else 30
    if cached != reusable:
        modes["prefix"].wrong.append(f"{cached} of {reusable} tokens were reused")
    compare(core, reference, again, modes["prefix"], 0, None)
    return modes, core


@dataclass
class Answer:
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    inputs: TokenLogprobs | None = None
    outputs: list[TokenLogprobs] = field(default_factory=list)
    routes: np.ndarray | None = None
    cached: int = 0


def generate(core: EngineCore, prompts: dict[str, list[int]], count: int, logprob_start: int = 0) -> dict[str, Answer]:
    """Run all prompts together, greedily, with the log-probabilities of the whole vocabulary."""
    answers = {rid: Answer(prompt) for rid, prompt in prompts.items()}
    for rid, prompt in prompts.items():
        core.add(
            EngineRequest(
                rid=rid,
                input_ids=prompt,
                sampling=SamplingParams(temperature=0.0, max_new_tokens=count),
                return_routed_experts=True,
                return_logprob=True,
                logprob_start_len=logprob_start,
                top_logprobs_num=core.info.vocab_size,
            )
        )
    while core.has_work:
        for news in core.step():
            assert news.error is None, news.error
            answer = answers[news.rid]
            answer.tokens += news.new_token_ids
            answer.cached = news.cached_tokens
            if news.input_logprobs is not None:
                answer.inputs = news.input_logprobs
            if news.output_logprobs is not None:
                answer.outputs.append(news.output_logprobs)
            if news.routes is not None:
                answer.routes = news.routes
    return answers


def routes_of(core: EngineCore) -> np.ndarray:
    """Routes [T, L, K] of a short answer: to see whether two engines are the same model."""
    routes = generate(core, {"a": [3, 1, 4, 1, 5, 9, 2, 6]}, 4)["a"].routes
    assert routes is not None
    return routes


def compare(
    core: EngineCore, reference: Reference, answers: dict[str, Answer], mode: Mode, start: int, end: int | None
) -> None:
    """Positions start..end of each answer against the reference, into `mode`."""
    for rid, answer in answers.items():
        tokens = answer.prompt + answer.tokens
        expected_TV, expected_routes = reference(tokens[:-1])
        assert answer.routes is not None and len(answer.routes) == len(tokens) - 1
        if tuple(sorted(expected_routes)) != core.info.layer_ids:
            mode.wrong.append(f"MoE layers {core.info.layer_ids}, the reference's are {sorted(expected_routes)}")
            return
        ids = {layer: answer.routes[:, column] for column, layer in enumerate(core.info.layer_ids)}
        for layer, expected_TK in expected_routes.items():
            found_TK = np.sort(ids[layer][:, : expected_TK.shape[1]].astype(np.int64), -1)
            for t in range(*slice(start, end).indices(len(tokens) - 1)):
                mode.rows += 1
                if not np.array_equal(found_TK[t], expected_TK[t]):
                    mode.wrong.append(f"{rid} token {t} layer {layer}: {found_TK[t]}, reference {expected_TK[t]}")
        for position, row_V in _rows(answer, core.info.vocab_size):
            if start <= position < (end or len(tokens)):
                mode.error = max(mode.error, float(np.abs(row_V - expected_TV[position]).max()))


def _rows(answer: Answer, vocab: int):
    """(position, log-probabilities over the vocabulary from the logits at it) of all that the engine reported."""
    last = len(answer.prompt) - 1
    pieces = [(0, answer.inputs)] if answer.inputs is not None else []
    for piece in answer.outputs:
        pieces.append((last, piece))
        last += len(piece.token_ids)
    for first, piece in pieces:
        for n, (ids, values) in enumerate(zip(piece.top_ids, piece.top_logprobs, strict=True)):
            row_V = np.full(vocab, np.nan)
            row_V[ids] = values
            assert not np.isnan(row_V).any()
            yield first + n, row_V


def matrix(variants: list[str]) -> tuple[list[str], dict[str, bool]]:
    """Markdown rows, one a variant with one column a mode, and whether each family's variants all passed."""
    lines = [f"| variant | family | routes compared | {' | '.join(MODES)} |", "|-|-|-|" + "-|" * len(MODES)]
    passed: dict[str, bool] = {}
    for variant in variants:
        with tempfile.TemporaryDirectory() as folder:
            modes, core = check_variant(variant, Path(folder))
        family, rows = core.model.family.name, sum(mode.rows for mode in modes.values())
        passed[family] = passed.get(family, True) and all(mode.ok for mode in modes.values())
        lines.append(f"| {variant} | {family} | {rows} | {' | '.join(str(modes[name]) for name in MODES)} |")
        print(lines[-1], flush=True)
    return lines, passed


def write(lines: list[str], passed: dict[str, bool]) -> None:
    versions = f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}"
    checked = listing.data("checked.json")
    for family, ok in passed.items():
        checked.setdefault(family, {}).pop("cpu", None)
        if ok:
            checked[family]["cpu"] = versions
    (listing.HERE / "checked.json").write_text(json.dumps(checked, indent=1, sort_keys=True) + "\n")
    page = Path(__file__).parent.parent / "docs" / "models.md"
    text = page.read_text()
    table = listing.markdown([listing.describe(family) for family in all_families()])
    for name, body in (("registry", table), ("parity", "\n".join(lines))):
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}\n{body}\n{end}{rest.partition(end)[2]}"
    page.write_text(text)


def main(argv: list[str]) -> int:
    wanted = [a for a in argv if a != "--write"] or list(tiny.VARIANTS)
    began = time.perf_counter()
    lines, passed = matrix(wanted)
    print(f"{len(wanted)} variants in {time.perf_counter() - began:.0f} s")
    if "--write" in argv:
        write(lines, passed)
    return int(not all(passed.values()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
