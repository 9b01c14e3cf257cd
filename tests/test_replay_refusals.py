"""What replay refuses before or after a forward, and that nothing of the model stays patched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from replay_families import TOKENS_BS, WHOLE, attributes, build, forward, other_routes, own_routes, replayed  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from tracklayer.errors import UserError  # noqa: E402
from tracklayer.replay.hf import find_routers, replay_routes, route_shape  # noqa: E402
from tracklayer.replay.packing import ReplayBatch, lay_out  # noqa: E402
from tracklayer.routes.record import Routes  # noqa: E402


def _batch(model: nn.Module, **changes: Any) -> ReplayBatch:
    shape = route_shape(model)
    layer_ids = changes.get("layer_ids", shape.layer_ids)
    top_k, experts = changes.get("top_k", shape.top_k), changes.get("num_experts", shape.num_experts)
    routes = [Routes(np.tile(np.arange(top_k), (7, len(layer_ids), 1)), layer_ids, experts) for _ in range(2)]
    return lay_out(routes, WHOLE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_ids": (0, 1)}, r"routes are of layers \[0, 1\], the model routes in layers \[0, 1, 2\]"),
        ({"layer_ids": (1, 2, 3)}, r"routes are of layers \[1, 2, 3\]"),
        ({"top_k": 3}, "routes have top_k 3, the model has 2"),
        ({"num_experts": 9}, "routes have num_experts 9, the model has 8"),
    ],
)
def test_routes_of_another_model_are_refused_before_the_forward(changes: dict[str, Any], message: str) -> None:
    model = build("qwen3_moe")
    before = attributes(model)
    with pytest.raises(UserError, match=message), replay_routes(model, _batch(model, **changes)):
        raise AssertionError("the block must not be entered")
    assert attributes(model) == before


def test_an_exception_leaves_nothing_behind() -> None:
    model = build("dbrx")
    before, out = attributes(model), forward(model)
    with pytest.raises(KeyError), replay_routes(model, _batch(model)):
        forward(model)
        raise KeyError
    assert attributes(model) == before
    with pytest.raises(UserError, match="the forward has 12 tokens"), replay_routes(model, _batch(model)):
        forward(model, TOKENS_BS[:, :6])
    assert attributes(model) == before
    assert torch.equal(forward(model), out)


def test_a_forward_attribute_set_by_others_survives() -> None:
    model = build("qwen3_moe")
    module = find_routers(model)[1].module
    calls = []
    original = module.forward
    module.forward = lambda *a, **k: (calls.append(1), original(*a, **k))[1]
    mine = module.forward
    replayed(model, _batch(model))
    assert calls == [1] and module.forward is mine


def test_silent_no_replay_is_an_error() -> None:
    model = build("qwen3_moe")
    with pytest.raises(UserError, match="no forward ran"), replay_routes(model, _batch(model)):
        pass
    router = find_routers(model)[1]

    def fused(x_ND: Tensor) -> Any:  # a kernel that chooses by itself
        logits_NE = x_ND @ router.module.weight.T
        ids_NK = logits_NE.argsort(-1, descending=True)[:, :2]
        return logits_NE, logits_NE.softmax(-1).gather(1, ids_NK), ids_NK

    router.module.forward = fused
    with pytest.raises(UserError, match=r"layers\.1\.mlp .* chose its experts 0 times"):
        replayed(model, _batch(model))
    del router.module.forward
    model.model.layers[2].mlp.forward = lambda x: x  # the whole block is computed elsewhere
    with pytest.raises(UserError, match=r"layers \[2\] were not called"):
        replayed(model, _batch(model))


def test_blocks_can_not_be_nested() -> None:
    model = build("qwen3_moe")
    with replay_routes(model, _batch(model)):
        with pytest.raises(UserError, match="nested"), replay_routes(model, _batch(model)):
            pass
        forward(model)


def test_models_built_twice_or_dropped_do_not_matter() -> None:
    """There is no registry: the live model's routers are found in its own tree."""
    first = build("qwen3_moe")
    model = build("qwen3_moe")
    batch = lay_out(other_routes(own_routes(model)), WHOLE)
    untouched = forward(first)
    assert not torch.equal(replayed(model, batch), untouched)
    assert torch.equal(forward(first), untouched)


def test_which_modules_are_routers() -> None:
    with pytest.raises(UserError, match="not a MoE model"):
        find_routers(nn.Sequential(nn.Linear(2, 2)))
    two = nn.ModuleDict({"text": build("qwen3_moe"), "vision": build("qwen3_moe")})
    with pytest.raises(UserError, match=r"layer 0 has routers at text.* and vision.*: pass the decoder"):
        find_routers(two)
    assert len(find_routers(two["text"])) == 3
    two = nn.ModuleDict({"model": build("qwen3_moe"), "mtp": build("qwen3_moe")})
    assert [r.path.split(".")[0] for r in find_routers(two)] == ["model"] * 3


def test_route_shape() -> None:
    shape = route_shape(build("deepseek_v3"))
    assert (shape.layer_ids, shape.num_hidden_layers) == ((1, 2), 3)
    shape = route_shape(build("longcat_flash"))
    assert (shape.num_experts, shape.top_k, shape.layer_ids, shape.num_hidden_layers) == (12, 4, (0, 1), 2)
    shape = route_shape(build("gemma4"))
    assert (shape.num_experts, shape.top_k, shape.num_hidden_layers) == (8, 3, 3)
