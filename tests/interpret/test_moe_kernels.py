"""Router and expert kernels in Triton's interpreter, against references in float32 and float64."""

from __future__ import annotations

import pytest
import torch

from tests import moe_checks as checks
from tracklayer.kernels import route_sort
from tracklayer.kernels.experts import ExpertSpec
from tracklayer.kernels.experts_cuda import fused_experts_triton
from tracklayer.kernels.select import select_experts_triton
from tracklayer.kernels.topk import RouterSpec, Routing
from tracklayer.kernels.tuning import sorted_config

TILE = {"n": 16, "b": 16, "stages": 2, "warps": 4}
CONFIGS = {
    "small": {
        "form": "small",
        "up": {"n": 16, "b": 32, "stages": 2, "warps": 4},
        "down": {"n": 16, "b": 16, "stages": 2, "warps": 4},
    },
    "tall weights": sorted_config("weights", 16, TILE, TILE),
    "tall rows": sorted_config("rows", 16, {**TILE, "group": 2}, {**TILE, "group": 2}),
    "tall rows, halves": sorted_config("rows", 32, {**TILE, "halves": True}, {**TILE, "halves": True}),
    "tall rows without the copy engine": sorted_config("rows", 16, {**TILE, "tma": False}, {**TILE, "tma": False}),
}


@pytest.mark.parametrize("name", checks.ROUTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_choice_equals_the_reference(name, dtype):
    spec = checks.ROUTERS[name]
    if dtype == torch.bfloat16 and "model" in (spec.score_dtype, spec.weights_dtype):
        pytest.skip("the interpreter truncates to bfloat16; tests/gpu rounds")
    for num_tokens in (1, 16) if dtype == torch.float32 else (5,):
        checks.check_select(spec, num_tokens, dtype, "cpu", seed=num_tokens)


@pytest.mark.parametrize("name", checks.LARGE_ROUTERS)
def test_choice_among_many_experts(name):
    checks.check_select(checks.LARGE_ROUTERS[name], 9, torch.float32, "cpu", seed=3)


def test_choice_of_no_tokens_launches_nothing():
    routing = select_experts_triton(torch.empty(0, 8), RouterSpec(num_experts=8, top_k=2))
    assert routing.ids_TK.shape == (0, 2) and routing.weights_TK.shape == (0, 2)


@pytest.mark.parametrize("name", ["softmax", "noaux", "zero experts", "sparsemixer", "expert scale"])
def test_one_launch_router(name):
    for num_tokens in (1, 5):
        checks.check_route_few(checks.ROUTERS[name], num_tokens, torch.float32, "cpu", seed=num_tokens)


@pytest.mark.parametrize("kind", ["spread", "all to one", "padded"])
def test_pairs_are_grouped_in_order(kind):
    for num_tokens, top_k, experts in ((1, 2, 5), (97, 3, 9)):
        ids_TK = checks.some_ids(kind, num_tokens, top_k, experts + 2, torch.Generator().manual_seed(0))
        checks.check_sort(ids_TK, experts, 16, "cpu")


@pytest.mark.parametrize("kind", ["spread", "all to one", "padded"])
def test_many_pairs_are_grouped_in_two_launches(kind, monkeypatch):
    for name, value in {"MANY_PAIRS": 1, "MOST_CHUNKS": 4, "SUB": 32}.items():
        monkeypatch.setattr(route_sort, name, value)
    for num_tokens, top_k, experts in ((1, 2, 5), (97, 3, 9), (130, 4, 70)):
        ids_TK = checks.some_ids(kind, num_tokens, top_k, experts + 2, torch.Generator().manual_seed(1))
        checks.check_sort(ids_TK, experts, 16, "cpu")


@pytest.mark.parametrize("config", ["small", "tall weights", "tall rows"])
@pytest.mark.parametrize("name", checks.EXPERTS)
def test_experts_equal_the_definition(name, config):
    checks.check_experts(checks.EXPERTS[name], CONFIGS[config], "padded", (5, 3, 4, 40, 24), torch.float32, "cpu")


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", ["spread", "all to one"])
def test_experts_under_uneven_load(kind, config):
    checks.check_experts(ExpertSpec(), CONFIGS[config], kind, (19, 2, 5, 32, 20), torch.float32, "cpu")


def test_no_tokens_and_one_token():
    empty = fused_experts_triton(
        torch.empty(0, 8), Routing(torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2)), torch.empty(3, 8, 8),
        torch.empty(3, 8, 4), ExpertSpec(),
    )  # fmt: skip
    assert empty.shape == (0, 8)
    for config in CONFIGS.values():
        checks.check_experts(ExpertSpec(), config, "spread", (1, 2, 4, 16, 8), torch.float32, "cpu")


def test_combine_never_reads_rows_without_an_expert():
    checks.check_combine(torch.float32, "cpu")


@pytest.mark.parametrize("first", [True, False])
def test_one_product(first):
    for config in (c for c in CONFIGS.values() if c["form"] == "sorted"):
        checks.check_grouped_gemm(config["up"], first, torch.float32, "cpu")
