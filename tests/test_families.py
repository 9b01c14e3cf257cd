"""Every family against a model that is not ours: log-probabilities and routes, however the engine runs it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import test_block_diffusion
import tiny
from parity import Reference, check_variant, generate, tiny_engine
from parity_gpu import check_on
from safetensors import safe_open
from safetensors.torch import save_file

from tracklayer.config import load_model_config
from tracklayer.errors import CheckpointError
from tracklayer.models.registry import all_families, resolve


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_equals_the_reference(variant, tmp_path):
    modes, core = check_variant(variant, tmp_path)
    for name, mode in modes.items():
        assert mode.ok, f"{name}: {mode}; {mode.wrong[:4]}"
    assert core.model.family.name in {f.name for f in all_families()}


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_runs_in_bfloat16(variant, tmp_path):
    """Every dtype conversion holds, the self-test passes, and most experts are the float32 reference's."""
    reference = Reference(tiny.save(variant, tmp_path))
    core = tiny_engine(tmp_path, dtype="bfloat16")
    answer = generate(core, {"a": list(range(40))}, 4)["a"]
    _, expected = reference((answer.prompt + answer.tokens)[:-1])
    same = [
        np.mean([len(set(row) & set(want)) / len(want) for row, want in zip(answer.routes[:, n], ids, strict=True)])
        for n, (_, ids) in enumerate(sorted(expected.items()))
    ]
    assert min(same) > 0.75, same


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_runs_on_dummy_weights(variant, tmp_path):
    """Random weights of our own making keep numbers finite, and more than a few experts in use."""
    tiny.save(variant, tmp_path)
    core = tiny_engine(tmp_path, load_format="dummy")
    answer = generate(core, {"a": list(range(40))}, 2)["a"]
    assert all(np.isfinite(piece.top_logprobs).all() for piece in [answer.inputs, *answer.outputs])
    assert len(np.unique(answer.routes)) > min(core.info.num_experts, 64) // 2


def test_every_family_has_a_variant(tmp_path):
    """No family is served that nothing was compared with."""
    shown = set()
    for variant in tiny.VARIANTS:
        folder = tmp_path / variant
        tiny.save(variant, folder)
        shown.add(resolve(load_model_config(str(folder)))[0].name)
    # Those that fill in blocks have no next token to compare: tests/test_block_diffusion.py.
    filling = {f.name for f in all_families() if f.architectures[0] in test_block_diffusion.MODELS}
    assert shown | filling == {f.name for f in all_families()} and not shown & filling


def test_the_comparison_sees_a_wrong_router(tmp_path):
    """One gate row changed in the checkpoint, not in the reference: routes and log-probabilities differ."""
    save = tiny.save

    def spoiled(variant, folder, **overrides):
        model = save(variant, folder, **overrides)
        tensors = read(folder)
        tensors["model.layers.2.mlp.gate.weight"][3] += 0.5
        save_file(tensors, folder / "model.safetensors")
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "save", spoiled)
        modes, _ = check_variant("qwen3_moe", tmp_path)
    assert all("layer 2" in mode.wrong[0] and mode.error > 1e-3 for mode in modes.values())


def test_the_device_comparison_sees_a_wrong_model(tmp_path):
    """The harness of the GPU tests, with a CPU in the GPU's place: equal to itself, unequal with another epsilon."""
    assert check_on("mixtral", tmp_path / "same", "float32", {})[0].ok
    other = {"json_model_override_args": '{"rms_norm_eps": 0.02}'}
    assert not check_on("mixtral", tmp_path / "other", "float32", other)[0].ok


def read(folder):
    with safe_open(folder / "model.safetensors", framework="pt") as handle:
        return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (not a dict)


def test_surplus_and_missing_tensors_are_named(tmp_path):
    tiny.save("mixtral", tmp_path)
    whole = read(tmp_path)
    gone = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    save_file({k: v for k, v in whole.items() if k != gone}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=gone):
        tiny_engine(tmp_path)
    surplus = {"model.layers.7.mlp.gate.weight": whole["lm_head.weight"].clone()}
    save_file({**whole, **surplus}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"surplus tensor 'model\.layers\.7"):
        tiny_engine(tmp_path)
    save_file({**whole, "lm_head.weight": whole["lm_head.weight"][:5].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' has shape \[5, 32\], the model needs \[97, 32\]"):
        tiny_engine(tmp_path)


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NobodysForCausalLM"]}))
    with pytest.raises(CheckpointError, match=r"'NobodysForCausalLM' is not known.*MixtralForCausalLM"):
        resolve(load_model_config(str(tmp_path)))
