"""Faults planted into the routes of a real forward: a tiny random transformers model, run in bf16 as an engine would.

The planters are those of audit_planting; here "logits" are token ids, and the scores are those of a reference pass
that is guided by the spoiled routes themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
import transformers
from audit_planting import CASES, NAMES, Planter

from tracklayer.audit.compare import Observed
from tracklayer.audit.reference import reference_scores
from tracklayer.audit.scores import ReferenceScores
from tracklayer.audit.verdict import audit
from tracklayer.replay.hf import replay_routes

EXPERTS, TOP_K, LAYERS, VOCABULARY = 32, 4, 5, 300


def model_of(seed: int) -> torch.nn.Module:
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        max_position_embeddings=8192,
    )
    model = transformers.Qwen3MoeForCausalLM(config).eval().float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                scale = 1.0 if "embed" in name else weight.shape[-1] ** -0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    return model


class Served:
    """Has the faces of `World` that planters use."""

    experts, top_k, layers = EXPERTS, TOP_K, LAYERS

    def __init__(self) -> None:
        self.model = model_of(0)
        self.engine = copy.deepcopy(self.model).to(torch.bfloat16)
        self.rng = np.random.default_rng(0)

    def logits(self, tokens: int) -> np.ndarray:
        return self.rng.integers(3, VOCABULARY, tokens)

    def record(self, token_ids: np.ndarray, engine: torch.nn.Module | None = None) -> np.ndarray:
        with torch.no_grad(), replay_routes(engine or self.engine, None, observe=True) as replay:
            (engine or self.engine)(input_ids=torch.tensor(token_ids[None]), use_cache=False)
        ids = torch.stack([replay.observed[r.layer].live_ids_NK for r in replay.routers], 1)
        return ids.numpy().astype(np.int32)

    def scores(self, token_ids: np.ndarray, name: str = "reference", observed=None) -> ReferenceScores:
        return reference_scores(self.model, token_ids, observed, name=name)


@pytest.fixture(scope="module")
def served() -> Served:
    return Served()


FORWARDS = [(f, p) for f, p in CASES if not p.__name__.startswith("version")]  # other weights: below, with real ones


@pytest.mark.parametrize(("fault", "planter"), FORWARDS, ids=[n for n in NAMES if not n.startswith("version")])
def test_names_the_planted_fault(served: Served, fault: str, planter: Planter) -> None:
    token_ids = served.logits(64)
    ids, keywords = planter(served, token_ids, served.record(token_ids))
    observed = Observed(ids)
    report = audit(observed, served.scores(token_ids, observed=observed), **keywords)
    assert report.finding is not None and report.finding.fault == fault, report.sentence


def late(ids: np.ndarray) -> np.ndarray:
    return np.concatenate([ids[:1], ids[:-1]])


def zero_tail(ids: np.ndarray) -> np.ndarray:
    ids[-3:] = 0
    return ids


@pytest.mark.parametrize(("spoil", "fault"), [(late, "shifted rows"), (zero_tail, "zero rows"), (np.array, None)])
def test_long_sequences(served: Served, spoil: Callable[[np.ndarray], np.ndarray], fault: str | None) -> None:
    token_ids = served.logits(4096)
    observed = Observed(spoil(served.record(token_ids)))
    report = audit(observed, served.scores(token_ids, observed=observed))
    assert (report.finding.fault if report.finding else None) == fault, report.sentence
    assert fault or report.verdict == "clean"


def test_bf16_runs_are_clean(served: Served) -> None:
    ties = 0
    for _ in range(20):
        token_ids = served.logits(64)
        observed = Observed(served.record(token_ids))
        report = audit(observed, served.scores(token_ids, observed=observed))
        assert report.verdict == "clean" and not report.comparison.wrong_TL.any(), report.sentence
        ties += int(report.comparison.tie_TL.sum())
    assert ties > 20  # bf16 did choose otherwise


def test_routes_of_other_weights(served: Served) -> None:
    """A training step's worth of difference, known and unknown to the audit; and weights that share nothing."""
    older = copy.deepcopy(served.model)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in older.parameters():
            weight += 0.15 * weight.std() * torch.randn(weight.shape, generator=generator)
    token_ids = served.logits(128)
    observed = Observed(served.record(token_ids, copy.deepcopy(older).to(torch.bfloat16)))
    scores = served.scores(token_ids, observed=observed)
    found = audit(observed, scores).finding
    assert found is not None and found.fault == "wrong weight version", found
    versions = [reference_scores(m, token_ids, observed, name=n) for m, n in ((model_of(9), "far"), (older, "older"))]
    found = audit(observed, scores, versions=versions).finding
    assert found is not None and found.evidence == {"version": "older"}
