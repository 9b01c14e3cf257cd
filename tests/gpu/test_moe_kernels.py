"""Router and expert kernels on a GPU: fresh random inputs each run (the seed is printed when a test fails)."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests import moe_checks as checks
from tracklayer.kernels.experts import ExpertSpec, fused_experts
from tracklayer.kernels.norm import as_tensor
from tracklayer.kernels.route import route, route_ref
from tracklayer.kernels.topk import RouterSpec, RouteStore, Routing
from tracklayer.kernels.tuning import FLOAT32, ROOMY, SMALL, TIGHT, sorted_config

pytestmark = pytest.mark.gpu
TILE = {"n": 64, "b": 64, "stages": 3, "warps": 4}
CONFIGS = {
    "small": SMALL,
    "tall weights 16": sorted_config("weights", 16, TILE, TILE),
    "tall weights 32": sorted_config("weights", 32, {**TILE, "tma": False}, {**TILE, "n": 128}),
    "tall weights 64": ROOMY[48],
    "tall rows": ROOMY[512],
    "tall rows, halves": sorted_config("rows", 128, {**TILE, "halves": True}, {**TILE, "n": 128, "halves": True}),
    "tight weights": TIGHT[48],
    "tall rows without the copy engine": sorted_config("rows", 64, {**TILE, "tma": False}, {**TILE, "tma": False}),
}


@pytest.fixture
def seed():
    value = random.SystemRandom().randrange(1 << 30)
    print("seed", value)
    return value


@pytest.mark.parametrize("name", checks.ROUTERS | checks.LARGE_ROUTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_choice_equals_the_reference(name, dtype, seed):
    for num_tokens in (1, 17, 509):
        checks.check_select((checks.ROUTERS | checks.LARGE_ROUTERS)[name], num_tokens, dtype, "cuda", seed)


@pytest.mark.parametrize("name", [n for n, s in checks.ROUTERS.items() if s.score_dtype == "float32"])
def test_one_launch_router(name, seed):
    for num_tokens in (1, 3, 16):
        for dtype in (torch.float32, torch.bfloat16):
            checks.check_route_few(checks.ROUTERS[name], num_tokens, dtype, "cuda", seed)


@pytest.mark.parametrize("kind", ["spread", "all to one", "padded"])
def test_pairs_are_grouped_in_order(kind, seed):
    for num_tokens, top_k, experts in ((1, 2, 5), (97, 3, 9), (2053, 8, 128), (16384, 8, 300), (8191, 4, 384)):
        ids_TK = checks.some_ids(kind, num_tokens, top_k, experts + 2, torch.Generator().manual_seed(seed))
        checks.check_sort(ids_TK, experts, 128, "cuda")


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", checks.EXPERTS)
def test_experts_equal_the_definition(name, config):
    for dtype in (torch.bfloat16, torch.float16):
        checks.check_experts(checks.EXPERTS[name], CONFIGS[config], "padded", (37, 3, 5, 200, 72), dtype, "cuda")


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", ["spread", "all to one"])
def test_experts_under_uneven_load(kind, config):
    for num_tokens in (1, 5, 211):
        checks.check_experts(ExpertSpec(), CONFIGS[config], kind, (num_tokens, 4, 12, 256, 192), torch.bfloat16, "cuda")


def test_float32_experts():
    for config in (SMALL, *FLOAT32.values()):
        checks.check_experts(ExpertSpec(), config, "spread", (37, 3, 5, 200, 72), torch.float32, "cuda")


@pytest.mark.parametrize("first", [True, False])
def test_one_product(first):
    for config in (c for c in CONFIGS.values() if c["form"] == "sorted"):
        checks.check_grouped_gemm(config["up"], first, torch.bfloat16, "cuda")


def test_combine_never_reads_rows_without_an_expert():
    checks.check_combine(torch.bfloat16, "cuda")


@pytest.mark.parametrize("num_tokens", [1, 4, 16, 64, 700])
def test_graph_replay_equals_eager(num_tokens, seed):
    """Route, store and experts in one CUDA graph, replayed on new inputs, bit for bit what eager launches give."""
    torch.manual_seed(seed)
    spec = RouterSpec(num_experts=32, top_k=4, renormalize=True)
    make = lambda *size: torch.randn(*size, device="cuda", dtype=torch.bfloat16) * size[-1] ** -0.5  # noqa: E731
    gate, w13, w2 = make(32, 256), make(32, 384, 256), make(32, 256, 192)
    pool = torch.full((num_tokens + 1, 2, 4), 255, dtype=torch.uint8, device="cuda")
    store = RouteStore(pool, torch.arange(1, num_tokens + 1, dtype=torch.int32, device="cuda"), 1)
    x = torch.randn(num_tokens, 256, device="cuda", dtype=torch.bfloat16)

    def forward() -> tuple[Routing, torch.Tensor]:
        routing = route(x, gate, spec, store=store)
        return routing, as_tensor(fused_experts(x, routing, w13, w2, ExpertSpec(), add_TD=x))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            forward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routing, y = forward()
    for _ in range(5):
        x.copy_(torch.randn_like(x))
        pool.fill_(255)
        graph.replay()
        torch.cuda.synchronize()
        stored, got_ids, got = pool.clone(), routing.ids_TK.clone(), y.clone()
        eager_routing, eager = forward()
        assert torch.equal(got, eager) and torch.equal(got_ids, eager_routing.ids_TK)
        assert torch.equal(stored[1:, 1].int(), got_ids) and (stored[:, 0] == 255).all() and (stored[0] == 255).all()
        agree = (route_ref(x, gate, spec).ids_TK == got_ids).all(1).float().mean()
        assert agree > 0.8, f"only {agree:.2f} of rows agree with the reference"
