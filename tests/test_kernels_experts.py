"""The experts' torch path against the definition, token by token in float64; bad input; tuned tables."""

from __future__ import annotations

import math

import pytest
import torch

from tracklayer.kernels import tuning
from tracklayer.kernels.experts import ExpertSpec, fused_experts
from tracklayer.kernels.topk import Routing
from tracklayer.kernels.tuning import FLOAT32, ROOMY, SMALL, TIGHT, default, device_key, pick, table

ACT = {
    "silu": lambda z: z / (1 + math.exp(-z)),
    "gelu": lambda z: 0.5 * z * (1 + math.erf(z / math.sqrt(2))),
    "gelu_tanh": lambda z: 0.5 * z * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
    "relu2": lambda z: max(z, 0.0) ** 2,
    "swiglu_oai": lambda z: z / (1 + math.exp(-1.702 * z)),
}


def hidden(inner, spec):
    """One expert's hidden vector from its inner products, element by element."""
    half = len(inner) // 2
    pairs = zip(inner[:half], inner[half:], strict=True) if spec.gated else ((g, None) for g in inner)
    out = []
    for gate, up in pairs:
        for limit, when in ((spec.clamp_before, "before"), (spec.clamp_after, "after")):
            if when == "after":
                gate = ACT[spec.activation](gate)
            if limit is not None:
                gate = min(gate, limit)
                up = None if up is None else max(-limit, min(limit, up))
        up = 1.0 if up is None else up + (spec.activation == "swiglu_oai")
        out.append(gate * up)
    return torch.tensor(out, dtype=torch.float64)


def definition(x_TD, routing, w13, w2, spec, bias13, bias2, add_TD):
    x_TD, w13, w2, y_TD = x_TD.double(), w13.double(), w2.double(), add_TD.double().clone()
    for t, (ids, weights) in enumerate(zip(routing.ids_TK.tolist(), routing.weights_TK.tolist(), strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            if expert >= len(w13):
                y_TD[t] += spec.scale * weight * x_TD[t]
            elif expert >= 0:
                into, out = (weight, 1.0) if spec.weight_on_input else (1.0, weight)
                inner = w13[expert] @ (into * x_TD[t]) + bias13[expert].double()
                row = w2[expert] @ hidden(inner.tolist(), spec) + bias2[expert].double()
                y_TD[t] += spec.scale * out * row
    return y_TD


@pytest.mark.parametrize(
    "spec",
    [
        ExpertSpec(),
        ExpertSpec(activation="swiglu_oai", clamp_before=0.7, scale=1.5),
        ExpertSpec(activation="relu2", gated=False),
        ExpertSpec(activation="silu", clamp_after=0.3),
        ExpertSpec(activation="gelu", weight_on_input=True),
        ExpertSpec(activation="gelu_tanh", num_zero_experts=4, scale=2.0),
        ExpertSpec(activation="silu", gated=False, clamp_before=0.2),
    ],
    ids=lambda s: s.activation,
)
@pytest.mark.parametrize("num_tokens", [1, 2, 13])
def test_equals_the_definition(spec, num_tokens):
    torch.manual_seed(num_tokens)
    experts, top_k, width, inner = 6, 3, 20, 12
    rows = inner * (2 if spec.gated else 1)
    w13, w2 = torch.randn(experts, rows, width) * 0.4, torch.randn(experts, width, inner) * 0.4
    bias13, bias2 = torch.randn(experts, rows) * 0.3, torch.randn(experts, width) * 0.3
    x_TD, add_TD = torch.randn(num_tokens, width), torch.randn(num_tokens, width)
    ids_TK = torch.rand(num_tokens, experts + spec.num_zero_experts).topk(top_k).indices.int()
    if num_tokens > 1:
        ids_TK[-1], ids_TK[0, 1] = -1, -1
    routing = Routing(ids_TK, torch.rand(num_tokens, top_k))
    got = fused_experts(x_TD, routing, w13, w2, spec, bias13=bias13, bias2=bias2, add_TD=add_TD)
    want = definition(x_TD, routing, w13, w2, spec, bias13, bias2, add_TD)
    assert (got - want).norm() / want.norm() < 1e-6


def test_bfloat16_keeps_its_dtype_and_a_bound():
    torch.manual_seed(0)
    w13, w2 = torch.randn(4, 64, 48).bfloat16() * 0.1, torch.randn(4, 48, 32).bfloat16() * 0.1
    x_TD = torch.randn(9, 48).bfloat16()
    routing = Routing(torch.rand(9, 4).topk(2).indices.int(), torch.rand(9, 2))
    got = fused_experts(x_TD, routing, w13, w2, ExpertSpec())
    zeros = torch.zeros(4, 64), torch.zeros(4, 48), torch.zeros(9, 48)
    want = definition(x_TD, routing, w13, w2, ExpertSpec(), *zeros)
    assert got.dtype == torch.bfloat16 and (got.double() - want).norm() / want.norm() < 1e-2


def test_no_tokens_and_tokens_without_experts():
    w13, w2 = torch.randn(4, 8, 6), torch.randn(4, 6, 4)
    none = Routing(torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2))
    assert fused_experts(torch.empty(0, 6), none, w13, w2, ExpertSpec()).shape == (0, 6)
    for num_tokens in (1, 3):
        padding = Routing(torch.full((num_tokens, 2), -1, dtype=torch.int32), torch.zeros(num_tokens, 2))
        x_TD = torch.randn(num_tokens, 6)
        assert torch.equal(fused_experts(x_TD, padding, w13, w2, ExpertSpec()), torch.zeros(num_tokens, 6))
        assert torch.equal(fused_experts(x_TD, padding, w13, w2, ExpertSpec(), add_TD=x_TD), x_TD)


@pytest.mark.parametrize("name", ["w13_EFD", "ids_TK", "bias13", "bias2", "add_TD"])
def test_shapes_are_checked(name):
    given = {
        "w13_EFD": torch.zeros(4, 8, 6),
        "ids_TK": torch.zeros(3, 2, dtype=torch.int32),
        "bias13": torch.zeros(4, 8),
        "bias2": torch.zeros(4, 6),
        "add_TD": torch.zeros(3, 6),
    }
    given[name] = given[name][:-1]
    routing = Routing(given.pop("ids_TK"), torch.zeros(3, 2))
    with pytest.raises(ValueError, match=name):
        fused_experts(torch.zeros(3, 6), routing, given.pop("w13_EFD"), torch.zeros(4, 6, 4), ExpertSpec(), **given)


@pytest.mark.parametrize(
    "bad",
    [
        {"activation": "tanh"},
        {"activation": "swiglu_oai", "gated": False},
        {"weight_on_input": True, "num_zero_experts": 1},
    ],
)
def test_impossible_experts_are_refused(bad):
    with pytest.raises(ValueError):
        ExpertSpec(**bad)


def test_the_default_goes_by_pairs_per_expert():
    assert default(1, 8, 4, ROOMY) is SMALL and default(4, 8, 128, ROOMY) is SMALL
    assert default(4, 2, 8, ROOMY) is ROOMY[8], "8 pairs on 8 experts share them"
    assert default(256, 8, 128, ROOMY) is ROOMY[24] and default(1 << 20, 8, 8, ROOMY) is ROOMY[float("inf")]
    cpu = torch.device("cpu")
    assert pick(cpu, (128, 8, 9), 8, 128, torch.bfloat16) is TIGHT[8], "a device of unknown size gets what fits all"
    assert pick(cpu, (128, 8, 9), 8, 4096, torch.float32) is FLOAT32[float("inf")]


def test_the_largest_entry_not_above_the_batch_holds(monkeypatch):
    monkeypatch.setattr(tuning, "_device", lambda device: ("NVIDIA H200", 232448))
    rows = table("NVIDIA H200")["128,2048,768"]
    for num_tokens, entry in ((1, 1), (3, 2), (255, 128), (256, 256), (1 << 20, 16384)):
        assert pick(torch.device("cpu"), (128, 2048, 768), 8, num_tokens, torch.bfloat16) is rows[entry]
    assert pick(torch.device("cpu"), (7, 8, 9), 2, 1, torch.bfloat16) is SMALL
    assert device_key("NVIDIA H200") == "nvidia_h200" and table("no such device") == {}


def test_shipped_tables_are_whole():
    """Every entry names a form, its tiles and one row height for the sort that both products share."""
    configs = [SMALL, *ROOMY.values(), *TIGHT.values(), *FLOAT32.values()]
    for rows in table("NVIDIA H200").values():
        assert 1 in rows, "every batch size needs an entry"
        configs += rows.values()
    for config in configs:
        assert config["form"] in ("small", "sorted")
        for product in (config["up"], config["down"]):
            assert {"n", "b", "stages", "warps"} <= product.keys()
            if config["form"] == "sorted":
                assert product["tall"] in ("weights", "rows") and product["m"] == config["up"]["m"]
                assert {"tma", "group"} <= product.keys()
