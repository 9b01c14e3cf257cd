"""The start-up self-test notices every way in which a layer can fail to record, and names the layer."""

from __future__ import annotations

import pytest
import tiny
import torch
from engine_tools import make_core, prompts, request, run

from tracklayer.errors import SelfTestError
from tracklayer.layers.router import TopK
from tracklayer.runner.selftest import self_test


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen2_moe")
    tiny.save("qwen2_moe", folder, num_hidden_layers=4)
    return folder


@pytest.fixture
def core(checkpoint):
    return make_core(checkpoint)


LAYERS = (0, 2, 3)  # layer 1 of the variant is dense


def router(core, layer: int) -> TopK:
    return next(m for m in core.model.decoder.modules() if isinstance(m, TopK) and m.layer_id == layer)


def test_a_sound_engine_passes(core):
    self_test(core.runner, page_size=1)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_store_taken_out_fails_the_start(checkpoint, monkeypatch, layer):
    whole = TopK.store

    def without(self, batch):
        return None if self.layer_id == layer else whole(self, batch)

    monkeypatch.setattr(TopK, "store", without)
    with pytest.raises(SelfTestError, match=rf"layer {layer} did not record"):
        make_core(checkpoint)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_store_missing_in_one_mode_only(core, monkeypatch, layer):
    """Decode steps that skip one layer's store: the row keeps its sentinel, never an older token's ids."""
    whole = TopK.store

    def without(self, batch):
        return None if self.layer_id == layer and batch.max_query == 1 else whole(self, batch)

    monkeypatch.setattr(TopK, "store", without)
    with pytest.raises(SelfTestError, match=rf"decode: layer {layer} did not record"):
        self_test(core.runner, page_size=1)


def test_swapped_columns_are_wrong_routes(core, monkeypatch):
    first, second = router(core, 0), router(core, 2)
    reference = core.runner.model.decoder
    assert first.column == 0 and second.column == 1
    whole = TopK.store

    def swapped(self, batch):
        store = whole(self, batch)
        if batch.max_query == 1 and self in (first, second):
            other = second if self is first else first
            return type(store)(store.pool_SLK, store.slots_T, other.column)
        return store

    monkeypatch.setattr(TopK, "store", swapped)
    with pytest.raises(SelfTestError, match="layer 0 recorded experts of which only"):
        self_test(core.runner, page_size=1)
    assert reference is core.model.decoder


def test_constant_rows_are_wrong_routes(core, monkeypatch):
    whole = TopK.forward

    def constant(self, x_TD, gate_ED, gate_bias_E, batch):
        routing = whole(self, x_TD, gate_ED, gate_bias_E, batch)
        if self.layer_id == 3 and batch.max_query == 1:
            ids = torch.arange(self.spec.top_k, dtype=batch.pool_SLK.dtype)
            batch.pool_SLK[batch.slots_T.long(), self.column] = ids
        return routing

    monkeypatch.setattr(TopK, "forward", constant)
    with pytest.raises(SelfTestError, match="layer 3 recorded"):
        self_test(core.runner, page_size=1)


def test_skipping_warns(checkpoint, caplog):
    make_core(checkpoint, skip_route_selftest=True)
    assert "self-test was skipped" in caplog.text


def test_a_row_that_was_not_written_is_an_error_of_its_request(checkpoint, monkeypatch):
    """Past the self-test, too: the request ends with an error that names layer and token, and without rows."""
    core = make_core(checkpoint)
    whole = TopK.store

    def without(self, batch):
        return None if self.layer_id == 2 and batch.max_query == 1 else whole(self, batch)

    monkeypatch.setattr(TopK, "store", without)
    prompt = prompts(1)[0]
    asked = [request("asks", prompt, tokens=4), request("does not", prompt, tokens=4, return_routed_experts=False)]
    results = run(core, asked)
    assert results["asks"].finish.status == 500 and results["asks"].routes is None
    assert f"token {len(prompt)} layer 2" in results["asks"].finish.message
    assert results["does not"].finish.type == "length"
    assert core.counters.incomplete_rows == 3
