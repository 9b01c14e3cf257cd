"""Good routes, and planters that put one fault into them.

The generator draws logits with popular experts and per-token variation, as trained routers have them, and records the
choice of a noisy forward. T tokens, L MoE layers, E experts, K chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tracklayer.audit.scores import GroupRule, ReferenceScores, noise_of

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
