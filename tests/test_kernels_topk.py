"""The router's torch reference against the rules written out in plain Python, one row at a time."""

from __future__ import annotations

import math

import pytest
import torch

from tracklayer.kernels.route import route
from tracklayer.kernels.topk import RouterSpec, RouteStore, Routing, select_experts

NOAUX = {"score": "sigmoid", "choice_bias": True, "renormalize": True, "renorm_eps": 1e-20, "scale": 2.5}


def best(values, count):
    """Indices of the `count` largest, ties to the lower index."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def by_hand(logits, spec, bias=None, scale_e=None):
    """(ids, weights) of one row of finite logits, in double precision."""
    score_of = {
        "softmax": lambda z: [math.exp(v - max(z)) / sum(math.exp(u - max(z)) for u in z) for v in z],
        "sigmoid": lambda z: [1 / (1 + math.exp(-v)) for v in z],
        "sqrt_softplus": lambda z: [math.sqrt(math.log1p(math.exp(v))) for v in z],
        "none": list,
    }[spec.score]
    if spec.softcap:
        logits = [spec.softcap * math.tanh(v / spec.softcap) for v in logits]
    score = logits if spec.after_topk else score_of(logits)
    choice = [s + (bias[i] if bias else 0) for i, s in enumerate(score)]
    if spec.num_groups > 1:
        size = len(choice) // spec.num_groups
        groups = [sorted(choice[g * size : (g + 1) * size], reverse=True) for g in range(spec.num_groups)]
        kept = best([g[0] if spec.group_score == "max" else g[0] + g[1] for g in groups], spec.topk_groups)
        choice = [c if i // size in kept else spec.group_mask for i, c in enumerate(choice)]
    ids = best(choice, spec.top_k)
    weights = [score[i] for i in ids]
    if spec.after_topk:
        weights = score_of(weights)
    if spec.renormalize:
        total = sum(w**spec.renorm_p for w in weights) ** (1 / spec.renorm_p) + spec.renorm_eps
        weights = [w / max(total, spec.renorm_min) for w in weights]
    if scale_e:
        weights = [w * scale_e[i] for w, i in zip(weights, ids, strict=True)]
    return ids, [w * (1 if spec.scale_output else spec.scale) for w in weights]


SPECS = {
    "softmax": RouterSpec(num_experts=12, top_k=3, renormalize=True),
    "noaux": RouterSpec(num_experts=24, top_k=4, num_groups=4, topk_groups=2, **NOAUX),
    "deepseek v2": RouterSpec(
        num_experts=20, top_k=3, num_groups=5, topk_groups=2, group_score="max", group_mask=0.0, scale=16.0
    ),
    "zero experts": RouterSpec(num_experts=10, num_zero_experts=5, top_k=3, choice_bias=True, scale=6.0),
    "sqrt_softplus": RouterSpec(num_experts=16, top_k=6, score="sqrt_softplus", choice_bias=True, renormalize=True),
    "softmax after": RouterSpec(num_experts=9, top_k=2, after_topk=True),
    "sigmoid after": RouterSpec(num_experts=16, top_k=1, score="sigmoid", after_topk=True),
    "expert scale": RouterSpec(num_experts=16, top_k=8, renormalize=True, per_expert_scale=True),
    "softcap": RouterSpec(num_experts=8, top_k=2, softcap=3.0),
    "p-norm": RouterSpec(num_experts=16, top_k=4, renormalize=True, renorm_p=2.0),
    "no score": RouterSpec(num_experts=8, top_k=8, score="none", scale=3.0, scale_output=True),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("num_tokens", [0, 1, 31])
def test_rule_by_hand(name, num_tokens):
    spec, width = SPECS[name], SPECS[name].num_logits
    torch.manual_seed(num_tokens)
    logits_TE = torch.randn(num_tokens, width) * 2
    bias_E = torch.randn(width) * 0.2 if spec.choice_bias else None
    scale_E = torch.rand(width) + 0.5 if spec.per_expert_scale else None
    got = select_experts(logits_TE, spec, bias_E=bias_E, expert_scale_E=scale_E)
    assert got.ids_TK.dtype == torch.int32 and got.weights_TK.dtype == torch.float32
    assert got.ids_TK.shape == got.weights_TK.shape == (num_tokens, spec.top_k)
    for t in range(num_tokens):
        ids, weights = by_hand(
            logits_TE[t].tolist(),
            spec,
            None if bias_E is None else bias_E.tolist(),
            None if scale_E is None else scale_E.tolist(),
        )
        assert got.ids_TK[t].tolist() == ids
        assert got.weights_TK[t].tolist() == pytest.approx(weights, rel=1e-5, abs=1e-6)


def test_ties_go_to_the_lower_id_and_both_zeros_tie():
    spec = RouterSpec(num_experts=300, top_k=4)
    logits_TE = torch.zeros(2, 300)
    logits_TE[1, ::2] = -0.0
    assert select_experts(logits_TE, spec).ids_TK.tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("name", ["softmax", "noaux", "deepseek v2", "sqrt_softplus", "no score"])
def test_any_row_gives_distinct_ids_in_range_and_finite_weights(name):
    spec = SPECS[name]
    width, inf, nan = spec.num_logits, float("inf"), float("nan")
    logits_TE = torch.randn(6, width)
    logits_TE[0], logits_TE[1], logits_TE[2] = nan, -inf, inf
    logits_TE[3, ::2], logits_TE[4, 1:], logits_TE[5] = nan, -inf, -1e30
    bias_E = torch.zeros(width) if spec.choice_bias else None
    got = select_experts(logits_TE, spec, bias_E=bias_E)
    assert all(len(set(row)) == spec.top_k and min(row) >= 0 and max(row) < width for row in got.ids_TK.tolist())
    if spec.score != "none":
        assert got.weights_TK.isfinite().all()


def test_sparsemixer_of_one_finite_logit_chooses_two_experts():
    logits_TE = torch.tensor([[float("-inf"), 1.0, float("-inf")], [float("nan")] * 3])
    assert select_experts(logits_TE, RouterSpec(num_experts=3, top_k=2, score="sparsemixer")).ids_TK.tolist() == [
        [1, 0],
        [0, 1],
    ]


def test_saturated_scores_do_not_tie():
    """sigmoid(40) and sigmoid(50) are both 1.0 in float32; the larger logit still comes first."""
    spec = RouterSpec(num_experts=3, top_k=2, score="sigmoid")
    assert select_experts(torch.tensor([[40.0, 0.0, 50.0]]), spec).ids_TK.tolist() == [[2, 0]]


def test_store_writes_one_column_of_the_given_slots_and_padding_chooses_none():
    spec = RouterSpec(num_experts=300, top_k=2)
    pool_SLK = torch.full((6, 3, 2), -1, dtype=torch.int16)
    logits_TE = torch.randn(3, 300)
    logits_TE[:, 299], logits_TE[:, 7] = 50, 40
    got = select_experts(
        logits_TE, spec, store=RouteStore(pool_SLK, torch.tensor([5, 2, 0], dtype=torch.int32), 1),
        num_tokens_1=torch.tensor([2], dtype=torch.int32),
    )  # fmt: skip
    assert pool_SLK[[5, 2, 0], 1].tolist() == [[299, 7]] * 3, "padding stores too, into page 0"
    pool_SLK[[5, 2, 0], 1] = -1
    assert (pool_SLK == -1).all()
    assert got.ids_TK.tolist() == [[299, 7], [299, 7], [-1, -1]] and got.weights_TK[2].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits_TE": torch.zeros(2, 7)}, r"\[tokens, 8\]"),
        ({"bias_E": torch.zeros(8)}, "choice_bias is False"),
        ({"expert_scale_E": torch.zeros(8)}, "per_expert_scale is False"),
        ({"store": (torch.zeros(4, 1, 2, dtype=torch.int8), 0)}, "int8"),
        ({"store": (torch.zeros(4, 1, 2, dtype=torch.uint8), 1)}, "column 1"),
        ({"store": (torch.zeros(4, 1, 1, dtype=torch.uint8), 0)}, "top_k 2"),
    ],
)
def test_bad_input_is_named(change, message):
    if "store" in change:
        pool, column = change["store"]
        change = {"store": RouteStore(pool, torch.zeros(2, dtype=torch.int32), column)}
    arguments = {"logits_TE": torch.zeros(2, 8), **change}
    with pytest.raises(ValueError, match=message):
        select_experts(arguments.pop("logits_TE"), RouterSpec(num_experts=8, top_k=2), **arguments)


def test_a_forgotten_bias_is_an_error():
    with pytest.raises(ValueError, match="choice_bias is True but the tensor is missing"):
        select_experts(torch.zeros(2, 8), RouterSpec(num_experts=8, top_k=2, choice_bias=True))


@pytest.mark.parametrize("gate_dtype", ["model", "float32"])
def test_route_forms_the_product_in_the_dtype_that_the_spec_says(gate_dtype):
    torch.manual_seed(0)
    spec = RouterSpec(num_experts=8, top_k=8, score="none", gate_dtype=gate_dtype, gate_bias=True)
    x_TD, gate_ED, bias_E = torch.randn(5, 64).bfloat16(), torch.randn(8, 64).bfloat16(), torch.randn(8)
    got = route(x_TD, gate_ED, spec, gate_bias_E=bias_E)
    exact_TE = x_TD.double() @ gate_ED.double().t() + bias_E.double()
    got_TE = torch.empty(5, 8).scatter_(1, got.ids_TK.long(), got.weights_TK)
    rounded = torch.equal(got_TE, got_TE.bfloat16().float())
    assert rounded == (gate_dtype == "model")
    assert (got_TE - exact_TE).abs().max() < (1e-5 if gate_dtype == "float32" else 0.2)
    with pytest.raises(ValueError, match=r"\[8, 64\]"):
        route(x_TD, gate_ED[:, :32], spec, gate_bias_E=bias_E)


def test_routing_is_frozen():
    with pytest.raises(AttributeError):
        Routing(torch.zeros(1), torch.zeros(1)).ids_TK = None
