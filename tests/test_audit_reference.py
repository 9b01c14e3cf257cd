"""The reference pass on tiny random models of every family: own routes are clean, one wrong set does not cascade."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from replay_families import EXPERTS, FAMILIES, VOCAB, build

from tracklayer.audit.compare import Observed, compare
from tracklayer.audit.reference import reference_scores, slope_at_threshold
from tracklayer.audit.verdict import audit
from tracklayer.errors import UserError
from tracklayer.replay.hf import replay_routes

TOKENS = 24


def tokens(seed: int = 0, count: int = TOKENS) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, VOCAB, count)


def live_routes(model: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
    """[T, L, K] as the model itself chooses, read off its routers."""
    with torch.no_grad(), replay_routes(model, None, observe=True) as replay:
        model(input_ids=torch.tensor(ids[None]), use_cache=False)
    return torch.stack([replay.observed[r.layer].live_ids_NK for r in replay.routers], 1).numpy().astype(np.int32)


@pytest.mark.parametrize("family", FAMILIES)
def test_own_routes_are_clean(family: str) -> None:
    model = build(family)
    ids = tokens()
    routes = live_routes(model, ids)[:-1]
    scores = reference_scores(model, ids, Observed(routes), noise_dtype="float32")
    assert scores.layer_ids == FAMILIES[family].layers
    assert scores.num_experts >= EXPERTS and len(scores) == TOKENS
    result = compare(Observed(routes), scores)
    assert result.equal_TL.all() or not result.wrong_TL.any()
    assert result.equal_TL.mean() > 0.99
    assert audit(Observed(routes), scores).verdict == "clean"


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "deepseek_v2", "gpt_oss", "deepseek_v4"])
def test_a_wrong_set_does_not_cascade(family: str) -> None:
    """One set in the first layer is spoiled in the record only: later layers must still be judged equal."""
    model = build(family)
    ids = tokens(1)
    routes = live_routes(model, ids)
    worst = reference_scores(model, ids, None, noise_dtype="float32")
    order = np.argsort(worst.choice_TLE[5, 0])
    routes[5, 0] = order[: routes.shape[2]]
    scores = reference_scores(model, ids, Observed(routes), noise_dtype="float32")
    result = compare(Observed(routes), scores)
    assert np.argwhere(result.wrong_TL).tolist() == [[5, 0]]


def test_a_near_tie_is_forced() -> None:
    """The engine took the runner-up of a near tie: with it forced, all later layers see what the engine saw."""
    model = build("qwen3_moe")
    ids = tokens(2)
    free = reference_scores(model, ids, None)
    t, k = 7, free.top_k
    order = np.argsort(-free.choice_TLE[t, 0])
    engine = free.ids_TLK.copy()
    engine[t, 0, -1] = order[k]

    class Engine(torch.overrides.TorchFunctionMode):
        """The first call of top-k is layer 0's: give the runner-up there."""

        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func in (torch.topk, torch.Tensor.topk):
                self.calls += 1
                if self.calls == 1:
                    indices = torch.tensor(engine[:, 0]).long()
                    return torch.return_types.topk((args[0].gather(1, indices), indices))
            return result

    from tracklayer.replay.hf import find_routers

    routers = find_routers(model)
    seen: list[torch.Tensor] = []
    hooks = [r.module.register_forward_hook(lambda m, i, o: seen.append(o[2].clone())) for r in routers]
    with torch.no_grad(), Engine():
        model(input_ids=torch.tensor(ids[None]), use_cache=False)
    for hook in hooks:
        hook.remove()
    recorded = torch.stack(seen, 1).numpy().astype(np.int32)
    assert sorted(recorded[t, 0]) == sorted(engine[t, 0]) != sorted(free.ids_TLK[t, 0])
    # With the noise so large that the runner-up is a near tie, the pass follows the engine in every later layer.
    margin = compare(Observed(recorded), free).sigmas_TL[t, 0]
    factor = 1.01 * margin / 8.0
    guided = reference_scores(model, ids, Observed(recorded), noise_factor=max(factor, 1e-3))
    result = compare(Observed(recorded), guided)
    assert result.tie_TL[t, 0] and not result.wrong_TL.any()
    assert result.equal_TL[:, 1:].all()


@pytest.mark.parametrize(("rule", "bias"), [("none", 0), ("softmax", 0), ("sigmoid", 1), ("sqrt_softplus", 1)])
def test_slope_is_the_derivative(rule: str, bias: int) -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 2, (40, 16))
    score = {
        "none": lambda x: x,
        "softmax": lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True),
        "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
        "sqrt_softplus": lambda x: np.sqrt(np.log1p(np.exp(x))),
    }[rule]
    choice = score(logits) + bias * rng.normal(0, 0.1, 16)
    slopes = slope_at_threshold(logits, choice, top_k=4)
    step = 1e-5
    near = np.argsort(-choice, -1)[:, :8]
    for t in range(40):
        measured = []
        for e in near[t]:
            moved = logits[t].copy()
            moved[e] += step
            measured.append((score(moved[None])[0, e] - score(logits[t][None])[0, e]) / step)
        assert slopes[t] == pytest.approx(max(measured), rel=1e-3)


@pytest.mark.parametrize(
    ("bad", "says"), [([], "non-empty"), ([VOCAB + 4], "outside the model's vocabulary"), ([-1, 3], "token id -1")]
)
def test_bad_tokens_are_refused(bad: list[int], says: str) -> None:
    with pytest.raises(UserError, match=says):
        reference_scores(build("qwen3_moe"), np.asarray(bad, int), None)


def test_model_is_unchanged() -> None:
    model = build("mixtral")
    before = {name: module.__dict__.get("forward") for name, module in model.named_modules()}
    reference_scores(model, tokens(), None)
    assert {name: module.__dict__.get("forward") for name, module in model.named_modules()} == before
