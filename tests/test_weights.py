"""Checkpoints in and out of shape: everything missing, surplus or misshapen is an error that names the tensor."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
from engine_tools import make_core, prompts, request, run
from safetensors.torch import load_file, save_file

from tracklayer.errors import CheckpointError, UserError


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    tiny.save("glm4_moe", folder)
    return folder


@pytest.fixture
def checkpoint(source, tmp_path):
    """A copy whose tensors a test may change: (folder, tensors, save)."""
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")

    def save():
        save_file(tensors, tmp_path / "model.safetensors")

    return tmp_path, tensors, save


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


def test_missing_tensor_is_named(checkpoint):
    folder, tensors, save = checkpoint
    del tensors[EXPERT]
    save()
    with pytest.raises(CheckpointError, match=rf"missing tensors: {EXPERT}$"):
        make_core(folder)


def test_surplus_tensor_is_named(checkpoint):
    folder, tensors, save = checkpoint
    tensors["model.layers.1.mlp.experts.8.up_proj.weight"] = tensors[EXPERT].clone()
    save()
    with pytest.raises(CheckpointError, match=r"surplus tensor 'model.layers.1.mlp.experts.8.up_proj.weight'"):
        make_core(folder)


def test_misshapen_tensor_is_named(checkpoint):
    folder, tensors, save = checkpoint
    tensors[EXPERT] = tensors[EXPERT][:, :-1].clone()
    save()
    with pytest.raises(CheckpointError, match=rf"'{EXPERT}' has shape \[16, 31\], the model needs \[16, 32\]"):
        make_core(folder)


def test_next_token_prediction_layers_are_skipped(checkpoint):
    folder, tensors, save = checkpoint
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(4, 4)
    save()
    make_core(folder)


def test_sharded_checkpoint_gives_the_same(source, tmp_path):
    tiny.build("glm4_moe").save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    one, many = (run(make_core(f), [request("a", prompts(1)[0])])["a"] for f in (source, tmp_path))
    assert one.tokens == many.tokens and (one.routes == many.routes).all()
    next(tmp_path.glob("model-00002*")).unlink()
    with pytest.raises(CheckpointError, match=r"model-00002.*is not there"):
        make_core(tmp_path)


def test_no_tensors_at_all(source, tmp_path):
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors"):
        make_core(tmp_path)


def test_dummy_weights_are_seeded(source):
    a, b, c = (
        run(make_core(source, load_format="dummy", random_seed=seed), [request("a", prompts(1)[0])])["a"]
        for seed in (1, 1, 2)
    )
    assert a.tokens == b.tokens and (a.routes == b.routes).all()
    assert not (a.routes == c.routes).all()


def test_not_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="not a checkpoint directory"):
        make_core(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        make_core(tmp_path)


def test_a_broken_generation_config_is_named(tmp_path):
    tiny.save("qwen3_moe", tmp_path)
    for text, words in (("{", "not valid JSON"), ("[]", "must hold a JSON object, got list")):
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(CheckpointError, match=f"generation_config.json.*{words}"):
            make_core(tmp_path)


def test_unknown_architecture_lists_the_known(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["NopeForCausalLM"]}')
    with pytest.raises(CheckpointError, match=r"'NopeForCausalLM' is not known; known are:.*Qwen3MoeForCausalLM"):
        make_core(tmp_path)


def test_dense_model_with_recording(tmp_path):
    tiny.save("qwen3_moe", tmp_path, mlp_only_layers=[0, 1, 2])
    with pytest.raises(UserError, match="no MoE layer"):
        make_core(tmp_path)
    make_core(tmp_path, enable_return_routed_experts=False)


def test_bad_values_name_themselves(source):
    with pytest.raises(UserError, match="context_length 4096 is more than the model's 512"):
        make_core(source, context_length=4096)
    with pytest.raises(UserError, match="page_size must be a positive integer, got 0"):
        make_core(source, page_size=0)
    with pytest.raises(UserError, match="tp_size 2 was asked for, but an engine runs on one device"):
        make_core(source, tp_size=2)
    with pytest.raises(UserError, match="router_dtype must be one of"):
        make_core(source, router_dtype="float64")
    with pytest.raises(UserError, match="not valid JSON"):
        make_core(source, json_model_override_args="{")


def test_weights_from_disk_replace_and_a_wrong_checkpoint_changes_nothing(source, tmp_path):
    from tracklayer.engine.operations import Operations

    other, broken = tmp_path / "other", tmp_path / "broken"
    tiny.save("glm4_moe", other, seed=9)
    tiny.save("glm4_moe", broken, seed=9)
    tensors = load_file(broken / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, broken / "model.safetensors")

    def update(core, path, **arguments):
        steps = Operations(core).update_weights_from_disk(str(path), **arguments)
        with pytest.raises(StopIteration):
            while True:
                next(steps)

    core = make_core(source)
    before = run(core, [request("a", prompts(1)[0])])["a"]
    with pytest.raises(CheckpointError, match=r"missing tensors: lm_head.weight"):
        next(Operations(core).update_weights_from_disk(str(broken)))
    assert run(core, [request("a", prompts(1)[0])])["a"].tokens == before.tokens
    update(core, other, weight_version="7")
    after = run(core, [request("a", prompts(1)[0])])["a"]
    fresh = run(make_core(other), [request("a", prompts(1)[0])])["a"]
    assert after.tokens == fresh.tokens != before.tokens
    assert (after.routes == fresh.routes).all() and after.spans == [("7", 0, 8)] and after.cached_tokens == 0


def test_float32_routers_on_request(source):
    routers = make_core(source, router_dtype="float32", dtype="bfloat16").model.spec.routers
    assert all(r.gate_dtype == r.score_dtype == "float32" for r in routers)
