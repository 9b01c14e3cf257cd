"""A router without a layer can not be built, and a decoder whose routers are not its MoE layers neither."""

from __future__ import annotations

import pytest
import torch

from tracklayer.bench.shapes import SHAPES
from tracklayer.kernels.topk import RouterSpec
from tracklayer.layers.batch import Batch
from tracklayer.layers.router import HashTopK, TopK
from tracklayer.models.decoder import Decoder
from tracklayer.models.registry import resolve

SPEC = RouterSpec(num_experts=8, top_k=2)
HASH = RouterSpec(num_experts=8, top_k=2, score="sqrt_softplus", renormalize=True, scale=1.5, hash_vocab=16)
KINDS = [(TopK, SPEC), (HashTopK, HASH)]


@pytest.mark.parametrize(("kind", "spec"), KINDS)
def test_layer_id_has_no_default_and_no_place(kind, spec):
    with pytest.raises(TypeError, match="layer_id"):
        kind(spec)
    with pytest.raises(TypeError):
        kind(spec, 3)


@pytest.mark.parametrize(("kind", "spec"), KINDS)
@pytest.mark.parametrize(
    ("value", "error"), [(None, TypeError), (True, TypeError), ("3", TypeError), (1.0, TypeError), (-1, ValueError)]
)
def test_wrong_layer_ids_are_refused_by_value(kind, spec, value, error):
    with pytest.raises(error, match=repr(value)):
        kind(spec, layer_id=value)


def batch(tokens: list[int], pool: torch.Tensor | None) -> Batch:
    n = torch.arange(len(tokens), dtype=torch.int32)
    return Batch(torch.tensor(tokens, dtype=torch.int32), n, n + 1, n[:1], n[:2], n[:1], n[None], 1, 1, pool_SLK=pool)


def test_hash_routes_are_the_tables_whatever_the_hidden_state():
    """Ids are a function of the token; weights are the live scores of these ids; the pool gets the ids."""
    router = HashTopK(HASH, layer_id=4)
    router.column = 1
    table = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(v))[:2] for v in range(16)])
    router.table_VK.data.copy_(table)
    gate, tokens = torch.randn(8, 5), [3, 0, 15, 3]
    pool = torch.full((6, 3, 2), 255, dtype=torch.uint8)
    x = torch.randn(4, 5)
    routing = router(x, gate, None, batch(tokens, pool))
    assert routing.ids_TK.tolist() == table[tokens].tolist()
    scores = torch.nn.functional.softplus(x @ gate.T).sqrt().gather(1, table[tokens])
    torch.testing.assert_close(routing.weights_TK, 1.5 * scores / scores.sum(-1, keepdim=True))
    assert pool[1:5, 1].tolist() == table[tokens].tolist()
    assert (pool[:, [0, 2]] == 255).all() and (pool[[0, 5]] == 255).all()


def test_a_router_outside_a_decoder_can_not_record():
    router = TopK(SPEC, layer_id=0)
    pool = torch.zeros(6, 1, 2, dtype=torch.uint8)
    with pytest.raises(AssertionError, match="layer 0 has no column"):
        router(torch.randn(2, 5), torch.randn(8, 5), None, batch([1, 2], pool))


def test_hash_needs_its_table():
    with pytest.raises(ValueError, match="hash_vocab"):
        HashTopK(SPEC, layer_id=0)


def test_columns_follow_the_moe_layers(monkeypatch):
    _, spec = resolve({**SHAPES["tiny"], "mlp_only_layers": [1]})
    decoder = Decoder(spec, 16)
    routers = [m for m in decoder.modules() if isinstance(m, TopK)]
    assert [(r.layer_id, r.column) for r in routers] == [(0, 0), (2, 1), (3, 2)]
    monkeypatch.setattr(TopK, "__init__", _forgetful(TopK.__init__))
    with pytest.raises(ValueError, match=r"routers say layers \(0, 0, 0\), the model's MoE layers are \(0, 2, 3\)"):
        Decoder(spec, 16)


def _forgetful(init):
    return lambda self, spec, *, layer_id: init(self, spec, layer_id=0)
