"""What breaks the record where mixers are latent or recurrent: layer axis, lists, stacked experts."""

from __future__ import annotations

import pytest
import tiny
import torch
from parity import routes_of, tiny_engine
from safetensors.torch import save_file

from tracklayer.errors import CheckpointError
from tracklayer.layers.recurrent_spec import RecurrentSpec
from tracklayer.layers.spec import AttentionSpec, CompressedSpec, MLASpec
from tracklayer.models import listing
from tracklayer.models.registry import resolve
from tracklayer.models.weights import Loader

EXAMPLES = listing.data("examples.json")

# family -> (decoder layers, MoE layers, ids to record, top-k, attention sublayers, recurrent sublayers)
FACTS = {
    "deepseek_v2": (60, range(1, 60), 160, 6, 60, 0),
    "deepseek_v3": (61, range(3, 61), 256, 8, 61, 0),
    "deepseek_v32": (61, range(3, 61), 256, 8, 61, 0),
    "deepseek_v4": (43, range(43), 256, 6, 43, 0),
    "glm4_moe_lite": (47, range(1, 47), 64, 4, 47, 0),
    "longcat_flash": (28, range(28), 768, 12, 56, 0),
    "qwen3_next": (48, range(48), 512, 10, 12, 36),
    "qwen3_5_moe": (40, range(40), 256, 8, 10, 30),
    "kimi_linear": (27, range(1, 27), 256, 8, 7, 20),
    "bailing_hybrid": (42, range(2, 42), 512, 8, 7, 35),
    "bailing_moe_v2_5": (20, range(1, 20), 256, 8, 4, 16),
    "granite_moe_hybrid": (40, range(40), 72, 10, 4, 36),
    "jamba": (32, range(1, 32, 2), 16, 2, 4, 28),
    "lfm2_moe": (24, range(2, 24), 32, 4, 6, 18),
}


def config_of(name: str, **changes) -> dict:
    return {**EXAMPLES[name]["config"], **changes}


@pytest.mark.parametrize("name", FACTS)
def test_layer_axis_of_a_well_known_checkpoint(name):
    family, spec = resolve(config_of(name))
    layers, moe, experts, top_k, attentions, recurrents = FACTS[name]
    assert (family.name, len(spec.layers), spec.moe_layers) == (name, layers, tuple(moe))
    assert {(router.num_logits, router.top_k) for router in spec.routers} == {(experts, top_k)}
    assert sum(len(spec.bodies(kind)) for kind in (AttentionSpec, MLASpec, CompressedSpec)) == attentions
    assert len(spec.bodies(RecurrentSpec)) == recurrents


def test_nemotron_layers_are_letters():
    """One sublayer a layer; the record's columns are the E letters, 23 scattered over 52."""
    _, spec = resolve(config_of("nemotron_h"))
    pattern = EXAMPLES["nemotron_h"]["config"]["hybrid_override_pattern"]
    assert all(len(subs) == 1 for subs in spec.layers)
    assert (
        spec.moe_layers == tuple(i for i, letter in enumerate(pattern) if letter == "E") and len(spec.moe_layers) == 23
    )
    words = {"M": "mamba", "E": "moe", "*": "attention"}
    by_words = config_of("nemotron_h", layers_block_type=[words[letter] for letter in pattern])
    assert resolve(by_words)[1] == spec
    with pytest.raises(CheckpointError, match="'X'"):
        resolve(config_of("nemotron_h", hybrid_override_pattern="MEX"))
    with pytest.raises(CheckpointError, match="'lstm'"):
        resolve(config_of("nemotron_h", layers_block_type=["lstm"]))


def test_kimi_lists_count_from_one():
    _, spec = resolve(config_of("kimi_linear"))
    full = [i for i, subs in enumerate(spec.layers) if isinstance(subs[0].body, MLASpec)]
    assert full == [3, 7, 11, 15, 19, 23, 26]
    kinds = ["full_attention" if i in full else "linear_attention" for i in range(27)]
    listed = EXAMPLES["kimi_linear"]["config"]["linear_attn_config"]
    bare = {key: listed[key] for key in ("head_dim", "num_heads")}
    assert resolve(config_of("kimi_linear", linear_attn_config=bare, layer_types=kinds))[1] == spec


def test_deepseek_layers_by_stride_and_list():
    assert resolve(config_of("deepseek_v3", moe_layer_freq=4))[1].moe_layers == tuple(range(4, 61, 4))
    kinds = ["dense" if i % 2 else "sparse" for i in range(47)]
    assert resolve(config_of("glm4_moe_lite", mlp_layer_types=kinds))[1].moe_layers == tuple(range(0, 47, 2))


def test_deepseek_v4_kinds_of_layers_and_hashed_experts():
    """Published ratios, the last one an MTP layer's; the first three layers choose by token id and have no bias."""
    _, spec = resolve(config_of("deepseek_v4"))
    rates = [body.compressor and body.compressor.rate for body in spec.bodies(CompressedSpec)]
    assert rates == [None, None, *[4, 128] * 20, 4]
    assert [bool(router.hash_vocab) for router in spec.routers] == [True] * 3 + [False] * 40
    assert [router.choice_bias for router in spec.routers] == [False] * 3 + [True] * 40
    plain, far = (spec.bodies(CompressedSpec)[i].rope for i in (0, 2))
    assert (plain.theta, plain.scaling, far.theta, far.scaling["attention_factor"]) == (1e4, None, 1.6e5, 1.0)
    hashed = ["hash_moe", "moe"] * 21 + ["moe"]
    _, listed = resolve(config_of("deepseek_v4", mlp_layer_types=hashed))
    assert [bool(router.hash_vocab) for router in listed.routers] == [kind == "hash_moe" for kind in hashed]


def test_a_dense_granite_hybrid_is_not_taken_for_a_moe():
    with pytest.raises(CheckpointError, match="GraniteMoeHybridForCausalLM"):
        resolve(config_of("granite_moe_hybrid", num_local_experts=0))


@pytest.mark.parametrize(
    ("name", "change", "word"),
    [
        ("nemotron_h", {"mlp_bias": True}, "mlp_bias"),
        ("bailing_moe_v2_5", {"linear_silu": True}, "linear_silu"),
        ("bailing_moe_v2_5", {"layer_group_size": None}, "layer_group_size"),
        ("qwen3_next", {"linear_key_head_dim": None}, "linear_key_head_dim"),
    ],
)
def test_what_is_not_served_is_refused_by_name(name, change, word):
    with pytest.raises(CheckpointError, match=word):
        resolve(config_of(name, **change))


def test_fused_experts_load_as_single_ones(tmp_path):
    """Qwen3.5's published files stack the experts, transformers saves them one by one."""
    tiny.save("qwen3_5_moe", tmp_path)
    before = routes_of(tiny_engine(tmp_path))
    tensors = tiny.tensors_of(tmp_path)
    for i in range(4):
        base = f"model.layers.{i}.mlp.experts."
        one = [{p: tensors.pop(f"{base}{j}.{p}_proj.weight") for p in ("gate", "up", "down")} for j in range(8)]
        tensors[base + "gate_up_proj"] = torch.stack([torch.cat([e["gate"], e["up"]]) for e in one])
        tensors[base + "down_proj"] = torch.stack([e["down"] for e in one])
    save_file(tensors, tmp_path / "model.safetensors")
    assert (routes_of(tiny_engine(tmp_path)) == before).all()


def test_interleaved_projections_of_a_wrong_shape_or_asked_back_are_named(tmp_path):
    tiny.save("qwen3_next", tmp_path)
    name, whole = "model.layers.0.linear_attn.in_proj_ba.weight", tiny.tensors_of(tmp_path)
    loader = Loader(tiny_engine(tmp_path).model.decoder, resolve(config_of("qwen3_next"))[0])
    with pytest.raises(CheckpointError, match=f"{name}.*read back"):
        loader.read(name)
    save_file({**whole, name: whole[name][:5].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name}' of shape \[5, 32\]"):
        tiny_engine(tmp_path)
    save_file({**whole, name: whole[name][:, :30].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name}' has shape \[4, 30\]"):
        tiny_engine(tmp_path)


def test_a_missing_interleaved_projection_is_named(tmp_path):
    tiny.save("qwen3_next", tmp_path)
    gone = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    save_file({k: v for k, v in tiny.tensors_of(tmp_path).items() if k != gone}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=gone):
        tiny_engine(tmp_path)
