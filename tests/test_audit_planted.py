"""Faults planted into good routes: the audit names each one, and only it, at 64 tokens as at 4,096.

The generator draws logits with popular experts and per-token variation, as trained routers have them, and records the
choice of a noisy forward. T tokens, L MoE layers, E experts, K chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from tracklayer.audit.compare import Observed
from tracklayer.audit.scores import GroupRule, ReferenceScores, noise_of
from tracklayer.audit.verdict import audit
from tracklayer.errors import UserError

RULES = ("softmax", "sigmoid_bias", "groups")


@dataclass
class World:
    """A model's scores for a request, a second request, and other weights; and how its engine records."""

    rng: np.random.Generator
    experts: int
    top_k: int
    layers: int
    rule: str = "softmax"
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        self.popular_LE = self.rng.normal(0, 0.7, (self.layers, self.experts))
        self.bias_LE = self.rng.normal(0, 0.03, (self.layers, self.experts))

    def logits(self, tokens: int) -> np.ndarray:
        own = self.rng.normal(0, 1.2, (tokens, self.layers, self.experts))
        return (self.popular_LE + own).astype(np.float32)

    def choice(self, logits_TLE: np.ndarray) -> np.ndarray:
        if self.rule == "softmax":
            return logits_TLE
        return (1 / (1 + np.exp(-logits_TLE)) + self.bias_LE).astype(np.float32)

    def scores(self, logits_TLE: np.ndarray, name: str = "reference") -> ReferenceScores:
        groups = GroupRule(4, 2) if self.rule == "groups" else None
        slope = 1.0 if self.rule == "softmax" else 0.25
        noise = noise_of(logits_TLE, slope, self.dtype)
        layer_ids = tuple(range(1, self.layers + 1))
        return ReferenceScores(self.choice(logits_TLE), noise, layer_ids, self.top_k, groups, name)

    def record(self, logits_TLE: np.ndarray) -> np.ndarray:
        """What the engine stores: the choice of logits with the noise of its number type."""
        sigma = noise_of(logits_TLE, 1.0, self.dtype)[..., None]
        noisy = logits_TLE + sigma * self.rng.normal(size=logits_TLE.shape).astype(np.float32)
        return self.scores(noisy).ids_TLK.copy()


def world(seed: int, experts: int = 64, top_k: int = 6, layers: int = 5, **more: str) -> World:
    return World(np.random.default_rng(seed), experts, top_k, layers, **more)


# Each planter: (world, logits, good ids) -> (ids, keywords of `audit`).
Planter = Callable[[World, np.ndarray, np.ndarray], tuple[np.ndarray, dict]]


def elsewhere(w: World, tokens: int) -> np.ndarray:
    return w.record(w.logits(tokens))


def zero_all(w, logits, ids):
    return np.zeros_like(ids), {}


def zero_prefix(w, logits, ids):
    ids[: len(ids) // 3] = 0
    return ids, {}


def zero_last(w, logits, ids):
    ids[-1] = 0
    return ids, {}


def zero_layers(w, logits, ids):
    ids[:, :2] = 0
    return ids, {}


def constant_pad(w, logits, ids):
    ids[-5:] = np.arange(ids.shape[2])
    return ids, {}


def constant_255(w, logits, ids):
    ids[len(ids) // 2 :] = 255
    return ids, {}


def constant_layer(w, logits, ids):
    ids[:, 1] = ids[3, 1]
    return ids, {}


def stale_last(w, logits, ids):
    ids[-1] = elsewhere(w, 1)[0]
    return ids, {}


def stale_tail(w, logits, ids):
    ids[-4:] = elsewhere(w, 4)
    return ids, {}


def stale_prefix(w, logits, ids):
    n = len(ids) // 4
    ids[:n] = elsewhere(w, n)
    return ids, {}


def shift_late(w, logits, ids):
    ids[1:] = ids[:-1].copy()
    return ids, {}


def shift_early(w, logits, ids):
    ids[:-1] = ids[1:].copy()
    return ids, {}


def shift_from_turn(w, logits, ids):
    turn = len(ids) // 2
    ids[turn + 1 :] = ids[turn:-1].copy()
    return ids, {}


def shift_by_offset(w, logits, ids):
    return np.roll(ids, 17, axis=0), {}


def layers_later(w, logits, ids):
    """All decoder layers read as MoE layers only: one dense layer's zeros first."""
    ids[:, 1:] = ids[:, :-1].copy()
    ids[:, 0] = 0
    return ids, {}


def layers_earlier(w, logits, ids):
    """MoE layers only, read as all layers with two dense ones: the last two columns hold nothing."""
    ids[:, :-2] = ids[:, 2:].copy()
    ids[:, -2:] = 0
    return ids, {}


def layers_reversed(w, logits, ids):
    return ids[:, ::-1].copy(), {}


def duplicated_steps(w, logits, ids):
    half = len(ids) // 2
    for t in range(half + 1, len(ids), 2):
        ids[t] = ids[t - 1]
    return ids, {}


def frozen_decode(w, logits, ids):
    ids[-len(ids) // 4 :] = ids[-len(ids) // 4 - 1]
    return ids, {}


def physical(w, logits, ids):
    maps = np.stack([w.rng.permutation(w.experts) for _ in range(w.layers)])
    return np.stack([maps[c][ids[:, c]] for c in range(w.layers)], 1), {}


def physical_replicas(w, logits, ids):
    """Each expert has one place, every fourth a second one, chosen at random."""
    out = np.empty_like(ids)
    for c in range(w.layers):
        places = w.rng.permutation(w.experts + w.experts // 4)
        first, second = places[: w.experts], places[w.experts :]
        out[:, c] = first[ids[:, c]]
        replicated = (ids[:, c] % 4 == 0) & (w.rng.random(ids[:, c].shape) < 0.5)
        out[:, c][replicated] = second[ids[:, c][replicated] // 4]
    return out, {}


def shared_appended(w, logits, ids):
    extra = np.full((*ids.shape[:2], 1), w.experts)
    return np.concatenate([ids, extra], -1), {}


def shared_appended_wrapped(w, logits, ids):
    extra = np.full((*ids.shape[:2], 2), 255)
    return np.concatenate([ids, extra], -1), {}


def shared_inside(w, logits, ids):
    ids[..., -1] = w.experts
    return ids, {}


def other_unknown(w, logits, ids):
    return elsewhere(w, len(ids)), {}


def other_from_middle(w, logits, ids):
    half = len(ids) // 3
    ids[half:] = elsewhere(w, len(ids) - half)
    return ids, {}


def other_known(w, logits, ids):
    mine = w.logits(len(ids))
    ids[: len(ids) // 2] = w.record(mine)[: len(ids) // 2]
    return ids, {"others": [w.scores(w.logits(len(ids)), "request 7"), w.scores(mine, "request 8")]}


def draft_first(w, logits, ids):
    ids[:, 0] = elsewhere(w, len(ids))[:, 0]
    return ids, {}


def draft_decode(w, logits, ids):
    half = len(ids) // 2
    ids[half:, -1] = elsewhere(w, len(ids) - half)[:, -1]
    return ids, {}


def version_unknown(w, logits, ids):
    other = logits + 0.5 * w.rng.normal(size=logits.shape).astype(np.float32)
    return w.record(other), {}


def version_known(w, logits, ids):
    other = logits + 0.5 * w.rng.normal(size=logits.shape).astype(np.float32)
    return w.record(other), {"versions": [w.scores(w.logits(len(ids)), "step-1"), w.scores(other, "step-2")]}


def version_from_update(w, logits, ids):
    other = logits + 0.5 * w.rng.normal(size=logits.shape).astype(np.float32)
    ids[len(ids) // 2 :] = w.record(other)[len(ids) // 2 :]
    return ids, {}


def truncated_wrap(w, logits, ids):
    return ids % 256, {}


def truncated_signed(w, logits, ids):
    return ids.astype(np.int8).astype(np.int32), {}


def truncated_clip(w, logits, ids):
    return np.minimum(ids, 255), {}


def missing_prefix(w, logits, ids):
    ids[:10] = -1
    return ids, {}


PLANTED: dict[str, list[Planter]] = {
    "zero rows": [zero_all, zero_prefix, zero_last, zero_layers],
    "constant rows": [constant_pad, constant_255, constant_layer],
    "stale rows": [stale_last, stale_tail, stale_prefix],
    "shifted rows": [shift_late, shift_early, shift_from_turn, shift_by_offset],
    "shifted layers": [layers_later, layers_earlier, layers_reversed],
    "duplicated rows": [duplicated_steps, frozen_decode],
    "physical ids": [physical, physical_replicas],
    "shared-expert columns": [shared_appended, shared_appended_wrapped, shared_inside],
    "another request's rows": [other_unknown, other_from_middle, other_known],
    "draft-model rows": [draft_first, draft_decode],
    "wrong weight version": [version_unknown, version_known, version_from_update],
    "missing rows": [missing_prefix],
}
TRUNCATED: dict[str, list[Planter]] = {
    "truncated ids": [truncated_wrap, truncated_signed, truncated_clip],
}
CASES = [(fault, planter) for fault, planters in PLANTED.items() for planter in planters]
NAMES = [planter.__name__ for _, planter in CASES]


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


@pytest.mark.parametrize("tokens", [64, 1024])
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
