"""An AddNorm made inside a product's or the router's launch gives what add_rms_norm and then the op give."""

from __future__ import annotations

import pytest
import torch

from tracklayer.kernels.linear import launch_linear_norm
from tracklayer.kernels.norm import AddNorm, add_rms_norm_ref
from tracklayer.kernels.route_few import route_few
from tracklayer.kernels.topk import RouterSpec, RouteStore, select_experts_ref


def pending(width: int, monkeypatch) -> tuple[AddNorm, torch.Tensor, torch.Tensor]:
    """(AddNorm that a kernel may make, its normed token and its new residual by the reference)."""
    monkeypatch.setattr("tracklayer.kernels.norm.use_triton", lambda x: True)
    generator = torch.Generator().manual_seed(width)
    delta, residual = torch.randn(2, 1, width, generator=generator)
    weight = torch.randn(width, generator=generator)
    new = residual.clone()
    normed = add_rms_norm_ref(delta, new, weight, 1e-5, 1.0, 0.5)
    return AddNorm(delta, residual, weight, 1e-5, 1.0, 0.5), normed, new


@pytest.mark.parametrize(("width", "outputs", "bias"), [(64, 24, False), (80, 37, True), (200, 8, False)])
def test_product(width, outputs, bias, monkeypatch):
    x, normed, new = pending(width, monkeypatch)
    weight, b = torch.randn(outputs, width), torch.randn(outputs) if bias else None
    y = launch_linear_norm(x, weight, b)
    torch.testing.assert_close(y, torch.nn.functional.linear(normed, weight, b), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(x.tensor(), normed, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.residual_TD, new)
    assert not x.fusable, "it is made: no one makes it again"


@pytest.mark.parametrize(("width", "experts"), [(64, 8), (72, 12)])
def test_router(width, experts, monkeypatch):
    x, normed, new = pending(width, monkeypatch)
    spec = RouterSpec(num_experts=experts, top_k=3, renormalize=True)
    gate, pool = torch.randn(experts, width), torch.full((4, 2, 3), 255, dtype=torch.uint8)
    routing = route_few(x, gate, spec, store=RouteStore(pool, torch.tensor([2], dtype=torch.int32), 1))
    expected = select_experts_ref(normed @ gate.T, spec)
    assert torch.equal(routing.ids_TK, expected.ids_TK)
    torch.testing.assert_close(routing.weights_TK, expected.weights_TK, rtol=1e-4, atol=1e-5)
    assert pool[2, 1].tolist() == expected.ids_TK[0].tolist() and (pool[[0, 1, 3]] == 255).all()
    torch.testing.assert_close(x.tensor(), normed, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.residual_TD, new)
