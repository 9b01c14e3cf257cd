"""SDAR and LLaDA2: blocks filled in over passes, against transformers' layers under a block mask and a plain loop."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from engine_tools import make_core, request, run
from parity import Reference

from tracklayer.engine import delivery
from tracklayer.errors import CheckpointError, UserError
from tracklayer.models.registry import resolve
from tracklayer.types import FinishReason

MASK = 96
LENGTH = 4
MODELS = {
    "SDARMoeForCausalLM": ("qwen3_moe", {"block_length": LENGTH}),
    "LLaDA2MoeModelLM": ("bailing_moe_v2", {"block_length": LENGTH}),
}
PROMPTS = [np.random.default_rng(n).integers(0, MASK, n).tolist() for n in (1, 4, 7, 18, 40)]
NEW = 11


@dataclass
class Plain:
    """A whole forward for each pass, no cache; what the engine must give."""

    model: Any
    reference: Reference

    @torch.no_grad()
    def forward(self, tokens: list[int]) -> tuple[torch.Tensor, dict[int, np.ndarray]]:
        """(logits [T, V], experts by layer) under a mask in which a block sees itself whole."""
        block_T = torch.arange(len(tokens)) // LENGTH
        mask = torch.where(block_T[None] <= block_T[:, None], 0.0, torch.finfo(torch.float32).min)[None, None]
        self.reference.routes.clear()
        out = self.model(input_ids=torch.tensor([tokens]), attention_mask=mask, use_cache=False)
        return out.logits[0].float(), {
            layer: ids.reshape(len(tokens), -1).sort(-1).values.numpy() for layer, ids in self.reference.routes.items()
        }

    def generate(self, prompt: list[int], new: int, confidence: float, stop: int | None = None) -> list[int]:
        """Greedy: of a pass's tokens those above the confidence stay, and the best one."""
        tokens, output = list(prompt), []
        while True:
            begin = len(tokens) // LENGTH * LENGTH if not output else len(tokens)
            tokens += [MASK] * (begin + LENGTH - len(tokens))
            while MASK in tokens:
                logits_TV, _ = self.forward(tokens)
                chances_TV = logits_TV.softmax(-1)
                chances_TV[:, MASK] = -1.0  # never taken
                best = chances_TV.max(-1)
                masked = [p for p in range(len(tokens)) if tokens[p] == MASK]
                top = max(masked, key=lambda p: best.values[p].item())
                for p in masked:
                    if best.values[p] > confidence or p == top:
                        tokens[p] = int(best.indices[p])
            for token in tokens[max(begin, len(prompt)) :]:
                output.append(token)
                if token == stop or len(output) == new:
                    return output

    def rows(self, prompt: list[int], output: list[int], final: list[int]) -> np.ndarray:
        """Experts [P + C - 1, L, K] sorted, of the pass over the final tokens (whole blocks)."""
        _, routes = self.forward(final)
        return np.stack([routes[layer] for layer in sorted(routes)], 1)[: len(prompt) + len(output) - 1]


def save(architecture: str, folder: Path, **overrides: Any) -> Any:
    """A tiny checkpoint of that architecture; returns the transformers model with the same weights."""
    variant, differences = MODELS[architecture]
    model = tiny.save(variant, folder, **overrides)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": [architecture], "mask_token_id": MASK, **differences}
    (folder / "config.json").write_text(json.dumps(config))
    return model


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request, tmp_path_factory) -> tuple[Path, Plain]:
    folder = tmp_path_factory.mktemp("blocks")
    model = save(request.param, folder)
    return folder, Plain(model, Reference(model))


def engine(folder: Path, **options: Any):
    return make_core(folder, **{"chunked_prefill_size": 16, **options})


def whole_blocks(tokens: list[int]) -> int:
    return -(-len(tokens) // LENGTH) * LENGTH


def check(plain: Plain, prompt: list[int], result, confidence: float, new: int = NEW) -> None:
    """Tokens equal the plain loop's; rows are those of a pass over the whole blocks that they lie in."""
    expected = plain.generate(prompt, new, confidence)
    assert result.tokens == expected
    # What stood in the last block past the cut is not told; the plain loop makes it again.
    longer = plain.generate(prompt, whole_blocks(prompt + expected) - len(prompt), confidence)
    rows = plain.rows(prompt, expected, prompt + longer)
    np.testing.assert_array_equal(np.sort(result.routes, -1), rows)


@pytest.mark.parametrize("confidence", [0.0, 0.02, 1.0])
def test_every_way_of_running_equals_the_plain_loop(checkpoint, confidence):
    folder, plain = checkpoint
    asked = [request(str(i), p, tokens=NEW) for i, p in enumerate(PROMPTS)]
    for options in ({}, {"page_size": 3}, {"disable_radix_cache": True}, {"max_total_tokens": 90}):
        core = engine(folder, block_confidence=confidence, **options)
        for depth in (0, 1):
            core.depth = depth
            results = run(core, asked)
            for i, prompt in enumerate(PROMPTS):
                check(plain, prompt, results[str(i)], confidence)


def test_retracted_passes_begin_again(checkpoint):
    folder, plain = checkpoint
    core = engine(folder, block_confidence=0.02)

    def between(core, step):
        if step % 4 == 3:
            core.drain()
            core.scheduler.retract_all()
            core.save_preempted()

    results = run(core, [request(str(i), p, tokens=NEW) for i, p in enumerate(PROMPTS)], between=between)
    assert sum(r.retractions for r in results.values()) > 0
    for i, prompt in enumerate(PROMPTS):
        check(plain, prompt, results[str(i)], 0.02)


def test_prefixes_are_reused_at_borders_of_blocks(checkpoint):
    folder, plain = checkpoint
    core = engine(folder, block_confidence=0.02)
    prompt = PROMPTS[-1]
    run(core, [request("warm", prompt, tokens=NEW)])
    branch = [*prompt[:30], 1, 2, 3]
    found = run(core, [request("again", prompt, tokens=NEW), request("branch", branch, tokens=NEW)])
    assert found["again"].cached_tokens == len(prompt) // LENGTH * LENGTH
    assert found["branch"].cached_tokens == 28
    check(plain, prompt, found["again"], 0.02)
    check(plain, branch, found["branch"], 0.02)


def test_a_stop_token_ends_inside_a_block(checkpoint):
    folder, plain = checkpoint
    prompt = PROMPTS[2]
    expected = plain.generate(prompt, NEW, 0.02)
    stop = expected[5]
    cut = expected[: expected.index(stop) + 1]
    core = engine(folder, block_confidence=0.02)
    result = run(core, [request("a", prompt, tokens=NEW, stop_token_ids=frozenset({stop}), return_logprob=True)])["a"]
    assert result.tokens == cut and result.finish.type == "stop" and result.finish.matched == stop
    assert len(result.routes) == len(prompt) + len(cut) - 1
    assert len(result.output_logprobs.logprobs) == len(cut) and (result.output_logprobs.logprobs <= 0).all()
    assert result.output_logprobs.token_ids.tolist() == cut


def test_log_probabilities_are_those_of_the_pass_that_chose(checkpoint):
    folder, plain = checkpoint
    prompt = PROMPTS[1]
    result = run(engine(folder, block_confidence=0.0), [request("a", prompt, tokens=LENGTH, return_logprob=True)])["a"]
    logits_TV, _ = plain.forward(prompt + [MASK] * LENGTH)  # confidence 0: one pass fills the block
    chances_TV = logits_TV.log_softmax(-1)
    chances_TV[:, MASK] = -torch.inf
    want = chances_TV[len(prompt) :].max(-1)
    assert result.tokens == want.indices.tolist()
    np.testing.assert_allclose(result.output_logprobs.logprobs, want.values.numpy(), atol=1e-4)


def test_finish_and_abort(checkpoint, monkeypatch):
    """What a front end does: cut at a stop string, or end with what there is."""
    monkeypatch.setattr(delivery, "PIECE_ROWS", 3)
    folder, plain = checkpoint
    prompt = PROMPTS[3]
    whole = plain.generate(prompt, 40, 0.0)
    core = engine(folder, block_confidence=0.0)

    def between(core, step):
        record = core.records.get("a")
        if record is not None and record.num_output >= 6 and record.blocks.ending is None:
            core.finish("a", 5, FinishReason("stop", matched="text"))
        record = core.records.get("b")
        if record is not None and record.num_output >= 6:
            core.abort("b")

    found = run(core, [request(rid, prompt, tokens=40) for rid in "ab"], between=between)
    assert found["a"].tokens[:5] == whole[:5] and found["a"].finish.matched == "text"
    assert len(found["a"].routes) == len(prompt) + 4
    rows = plain.rows(prompt, whole[:5], (prompt + whole)[: whole_blocks(prompt + whole[:5])])
    np.testing.assert_array_equal(np.sort(found["a"].routes, -1), rows)
    done = len(found["b"].tokens)
    assert found["b"].finish.type == "abort" and found["b"].tokens == whole[:done]
    assert 0 < len(found["b"].routes) <= len(prompt) + done - 1


def test_sampling_depends_on_seed_and_position_only(checkpoint):
    folder, _ = checkpoint
    sampling = {"temperature": 1.0, "top_k": 20}
    alone = run(engine(folder), [request("a", PROMPTS[2], tokens=NEW, seed=7, sampling=sampling)])["a"]
    beside = run(
        engine(folder),
        [request(str(n), PROMPTS[n % 4], tokens=NEW, seed=n, sampling=sampling) for n in range(4)]
        + [request("a", PROMPTS[2], tokens=NEW, seed=7, sampling=sampling)],
    )
    assert beside["a"].tokens == alone.tokens and MASK not in alone.tokens
    assert beside["0"].tokens != beside["3"].tokens


def test_prefill_only(checkpoint):
    folder, plain = checkpoint
    prompt = PROMPTS[-1]
    found = run(engine(folder), [request("a", prompt, tokens=0, routed_experts_include_last=True)])["a"]
    assert found.tokens == [] and found.finish.type == "length"
    _, routes = plain.forward(prompt)
    np.testing.assert_array_equal(np.sort(found.routes, -1), np.stack([routes[n] for n in sorted(routes)], 1))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"return_logprob": True, "logprob_start_len": 0}, "log-probabilities of the prompt"),
        ({"return_logprob": True, "top_logprobs_num": 2}, "top_logprobs_num"),
        ({"sampling": {"repetition_penalty": 1.2}}, "penalties"),
        ({"sampling": {"min_new_tokens": 2}}, "min_new_tokens"),
        ({"sampling": {"regex": "a+"}}, "structured output"),
        ({"tokens": 597}, "do not fit"),
    ],
)
def test_what_has_no_meaning_is_refused(checkpoint, fields, says):
    folder, _ = checkpoint
    found = run(engine(folder), [request("a", [1, 2, 3], **fields)])["a"]
    assert found.finish.type == "abort" and says in found.finish.message
    found = run(engine(folder), [request("a", [1, MASK, 3])])["a"]
    assert f"holds {MASK}" in found.finish.message


def test_configs(checkpoint):
    folder, _ = checkpoint
    config = json.loads((folder / "config.json").read_text())
    _, spec = resolve(config)
    assert spec.blocks.length == LENGTH and spec.blocks.mask_id == MASK
    assert all(layer[0].body.block == LENGTH for layer in spec.layers)
    with pytest.raises(CheckpointError, match="blocks of 1 tokens"):
        resolve({**config, "block_length": 1})
    with pytest.raises(UserError, match="can not hold a block"):
        engine(folder, chunked_prefill_size=2, max_running_requests=1)
    if config["architectures"] == ["LLaDA2MoeModelLM"]:
        with pytest.raises(CheckpointError, match="expert_capacity"):
            resolve({**config, "expert_capacity": 4})
