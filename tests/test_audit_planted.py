"""Faults planted into good routes: the audit names each one, and only it, at 64 tokens as at 4,096."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from audit_planting import CASES, NAMES, RULES, TRUNCATED, Planter, elsewhere, world

from tracklayer.audit.compare import Observed
from tracklayer.audit.scores import GroupRule, ReferenceScores, noise_of
from tracklayer.audit.verdict import audit
from tracklayer.errors import UserError


@pytest.mark.parametrize("tokens", [64, 4096])
@pytest.mark.parametrize(("fault", "planter"), CASES, ids=NAMES)
def test_names_the_planted_fault(fault: str, planter: Planter, tokens: int) -> None:
    w = world(seed=tokens)
    logits = w.logits(tokens)
    ids, keywords = planter(w, logits, w.record(logits))
    report = audit(Observed(ids), w.scores(logits), **keywords)
    assert report.finding is not None, report.sentence
    assert report.finding.fault == fault, report.sentence
    assert report.status == 1


@pytest.mark.parametrize("tokens", [64, 4096])
@pytest.mark.parametrize("planter", TRUNCATED["truncated ids"], ids=lambda p: p.__name__)
def test_names_truncated_ids(planter: Planter, tokens: int) -> None:
    w = world(seed=3, experts=384, top_k=8, layers=3)
    logits = w.logits(tokens)
    ids, _ = planter(w, logits, w.record(logits))
    report = audit(Observed(ids), w.scores(logits))
    assert report.finding is not None and report.finding.fault == "truncated ids", report.sentence


SHAPES = [(8, 2, 4), (16, 4, 4), (128, 8, 6)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("fault", "planter"), CASES, ids=NAMES)
def test_names_it_in_models_of_other_shapes(fault: str, planter: Planter, rule: str) -> None:
    for i, (experts, top_k, layers) in enumerate(SHAPES):
        w = world(seed=17 + i, experts=experts, top_k=top_k, layers=layers, rule=rule)
        logits = w.logits(96)
        ids, keywords = planter(w, logits, w.record(logits))
        report = audit(Observed(ids), w.scores(logits), **keywords)
        got = report.finding.fault if report.finding else report.verdict
        assert got == fault, f"{experts} experts, top {top_k}: {report.sentence}"


def test_clean_runs_raise_no_alarm() -> None:
    """200 seeded runs with the noise of bf16, of all rules and several shapes."""
    ties = 0
    for seed in range(200):
        experts, top_k, layers = [*SHAPES, (256, 8, 3)][seed % 4]
        w = world(seed, experts, top_k, layers, rule=RULES[seed % 3])
        logits = w.logits(64)
        report = audit(Observed(w.record(logits)), w.scores(logits))
        assert report.verdict == "clean" and report.finding is None, f"seed {seed}: {report.sentence}"
        assert not report.comparison.wrong_TL.any(), f"seed {seed}: {report.sentence}"
        ties += int(report.comparison.tie_TL.sum())
    assert ties > 200  # the noise did change sets: the runs were not trivially equal


def test_noise_beyond_the_type_is_not_clean() -> None:
    """The engine ran in bf16 but float32 is claimed: its ties are too wide for that."""
    w = world(seed=1)
    logits = w.logits(512)
    recorded = w.record(logits)
    w.dtype = "float32"
    assert audit(Observed(recorded), w.scores(logits)).verdict != "clean"


def test_evidence_is_the_planted_one() -> None:
    w = world(seed=9)
    logits = w.logits(512)
    good = w.record(logits)
    maps = [w.rng.permutation(w.experts) for _ in range(w.layers)]
    physical_TLK = np.stack([maps[c][good[:, c]] for c in range(w.layers)], 1)
    found = audit(Observed(physical_TLK), w.scores(logits)).finding
    assert found is not None
    for c, layer in enumerate(range(1, w.layers + 1)):
        to_logical = np.asarray(found.evidence["physical_to_logical"][layer])
        seen = np.unique(physical_TLK[:, c])
        assert (maps[c][to_logical[seen]] == seen).all()

    found = audit(Observed(np.roll(good, -3, 0)), w.scores(logits)).finding
    assert found is not None and found.evidence == {"shift": -3}

    shifted = good.copy()
    shifted[:, 1:], shifted[:, 0] = good[:, :-1], 0
    found = audit(Observed(shifted), w.scores(logits)).finding
    assert found is not None and found.evidence["source"] == {2: 1, 3: 2, 4: 3, 5: 4}

    others = [w.scores(w.logits(512), f"request {i}") for i in range(3)]
    found = audit(Observed(others[1].ids_TLK), w.scores(logits), others=others).finding
    assert found is not None and found.evidence == {"request": "request 1"}


def test_a_start_offset_is_honoured() -> None:
    w = world(seed=2)
    logits = w.logits(96)
    good = w.record(logits)
    assert audit(Observed(good[40:], start=40), w.scores(logits)).verdict == "clean"
    found = audit(Observed(good[:56], start=40), w.scores(logits)).finding
    assert found is not None and (found.fault, found.evidence) == ("shifted rows", {"shift": 40})
    late = good[40:].copy()
    late[-1] = elsewhere(w, 1)[0]
    found = audit(Observed(late, start=40), w.scores(logits)).finding
    assert found is not None and found.fault == "stale rows" and found.evidence["last"] == 95


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda ids: ids[:, :-1], "4 layers"),
        (lambda ids: ids[..., :-1], "5 experts per row"),
        (lambda ids: ids[:0], "do not lie in"),
        (lambda ids: np.concatenate([ids, ids]), "do not lie in"),
        (lambda ids: ids.astype(float), "must be integers"),
        (lambda ids: ids[0], "must be integers"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: Callable[[np.ndarray], np.ndarray], says: str) -> None:
    w = world(seed=4)
    logits = w.logits(32)
    with pytest.raises(UserError, match=says):
        audit(Observed(change(w.record(logits))), w.scores(logits))


def test_broken_reference_scores_are_refused() -> None:
    w = world(seed=4)
    logits = w.logits(8)
    logits[3, 2, 5] = np.nan
    with pytest.raises(UserError, match="token 3 layer 3 expert 5 is not finite"):
        w.scores(logits)
    with pytest.raises(UserError, match="noise of 'fp4'"):
        noise_of(logits, 1.0, "fp4")


def test_group_limit_counts_in_the_margin() -> None:
    """A set of a dropped group is wrong by the group's shortfall, although each id scores well."""
    choice = np.full((1, 1, 8), 0.1, np.float32)
    choice[0, 0, :4] = [0.9, 0.1, 0.8, 0.7]  # groups of two: sums of best two 1.0, 1.5, 0.2, 0.2
    scores = ReferenceScores(choice, np.full((1, 1), 0.01, np.float32), (0,), 2, GroupRule(4, 1))
    assert sorted(scores.ids_TLK[0, 0]) == [2, 3]
    zero = np.zeros(1, int)
    assert scores.deficit(np.array([[2, 3]]), zero, zero) == 0
    assert scores.deficit(np.array([[0, 1]]), zero, zero) == pytest.approx([50.0], rel=1e-3)
    assert scores.deficit(np.array([[0, 2]]), zero, zero) == np.inf  # two groups where one is kept
    assert scores.deficit(np.array([[2, 2]]), zero, zero) == np.inf
    assert scores.deficit(np.array([[2, 8]]), zero, zero) == np.inf


def test_two_faults_at_once_are_not_given_one_name() -> None:
    w = world(seed=6)
    logits = w.logits(200)
    ids = w.record(logits)
    ids[:60] = 0
    ids[100:, 1:3] = elsewhere(w, 100)[:, 1:3]
    report = audit(Observed(ids), w.scores(logits))
    assert report.verdict == "unexplained" and report.status == 1
    assert "zero rows would account for 6" in report.sentence


def test_a_few_sets_beyond_the_noise_are_told_not_alarmed() -> None:
    """Heavy tails of real noise: one scattered set in a thousand passes, and the sentence says so."""
    w = world(seed=8)
    logits = w.logits(1024)
    ids = w.record(logits)
    for t in (100, 500, 900):
        ids[t, t % w.layers] = np.argsort(logits[t, t % w.layers])[: w.top_k]
    report = audit(Observed(ids), w.scores(logits))
    assert report.verdict == "clean" and "3 beyond it (tolerated)" in report.sentence
