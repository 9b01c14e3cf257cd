"""What breaks the record in other engines, family by family: layer axis, counts under odd names, MTP layers, wrappers.

Configs are those of well-known checkpoints (as far as they shape the model); expected values are stated here.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from parity import Reference, generate, routes_of, tiny_engine
from safetensors.torch import save_file

from tracklayer.errors import CheckpointError
from tracklayer.models import listing
from tracklayer.models.decoder import Decoder
from tracklayer.models.registry import all_families, resolve
from tracklayer.models.weights import Loader

EXAMPLES = listing.data("examples.json")

# family -> (layers, MoE layers, first MoE layer, experts, top-k); MoE layers have no gap after the first unless said
LAYERS = {
    "afmoe": (56, 54, 2, 128, 8),
    "bailing_moe": (28, 28, 0, 64, 6),
    "bailing_moe_v2": (20, 19, 1, 256, 8),
    "cohere2_moe": (49, 48, 1, 128, 8),
    "dbrx": (40, 40, 0, 16, 4),
    "deepseek_v1": (28, 27, 1, 64, 6),
    "dots1": (62, 61, 1, 128, 6),
    "ernie4_5_moe": (28, 27, 1, 64, 6),
    "exaone_moe": (48, 47, 1, 128, 8),
    "gemma4_moe": (30, 30, 0, 128, 8),
    "glm4_moe": (46, 45, 1, 128, 8),
    "gpt_oss": (24, 24, 0, 32, 4),
    "granite_moe": (32, 32, 0, 40, 8),
    "grok1": (64, 64, 0, 8, 2),
    "hunyuan_moe": (32, 32, 0, 64, 8),
    "llama4": (48, 48, 0, 16, 1),
    "mimo_v2": (48, 47, 1, 256, 8),
    "minimax_m2": (62, 62, 0, 256, 8),
    "mixtral": (32, 32, 0, 8, 2),
    "olmoe": (16, 16, 0, 64, 8),
    "phimoe": (32, 32, 0, 16, 2),
    "qwen2_moe": (24, 24, 0, 60, 4),
    "qwen3_moe": (48, 48, 0, 128, 8),
    "step3p5": (45, 42, 3, 288, 8),
    "xverse_moe": (28, 28, 0, 64, 6),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_axis_of_a_well_known_checkpoint(name):
    family, spec = resolve(EXAMPLES[name]["config"])
    assert family.name == name
    count, moe, first, experts, top_k = LAYERS[name]
    assert len(spec.layers) == count
    assert spec.moe_layers == tuple(range(first, first + moe))
    assert {(router.num_logits, router.top_k) for router in spec.routers} == {(experts, top_k)}


def test_every_example_is_of_a_family_and_tested():
    names = {family.name for family in all_families()}
    assert set(EXAMPLES) <= names and set(LAYERS) <= set(EXAMPLES)


# Published sizes in billions of parameters (language model): what the whole spec amounts to.
SIZES = {
    "afmoe": 6.1,
    "bailing_moe": 16.8,
    "bailing_moe_v2": 16.3,
    "dbrx": 132,
    "deepseek_v1": 16.4,
    "dots1": 142,
    "ernie4_5_moe": 21.9,
    "exaone_moe": 236,
    "gemma4_moe": 25.2,
    "glm4_moe": 106,
    "gpt_oss": 20.9,
    "granite_moe": 3.4,
    "grok1": 314,
    "hunyuan_moe": 80,
    "llama4": 108,
    "mimo_v2": 309,
    "minimax_m2": 229,
    "mixtral": 46.7,
    "olmoe": 6.9,
    "phimoe": 41.9,
    "qwen2_moe": 14.3,
    "qwen3_moe": 30.5,
    "step3p5": 196,
    "xverse_moe": 25.8,
}


@pytest.mark.parametrize("name", SIZES)
def test_whole_model_has_the_published_size_and_a_name_for_every_part(name):
    family, spec = resolve(EXAMPLES[name]["config"])
    with torch.device("meta"):
        whole, few = Decoder(spec, 16), Decoder(replace(spec, layers=spec.layers[:4]), 16)
    assert sum(p.numel() for p in whole.parameters()) / 1e9 == pytest.approx(SIZES[name], rel=0.015)
    with pytest.raises(CheckpointError, match=r"^missing tensors: "):  # a part without a name would be another error
        Loader(few, family, dry=True).finish()


def config_of(name: str, **changes) -> dict:
    return {**EXAMPLES[name]["config"], **changes}


def test_scattered_layers():
    """Layers by stride and list: the axis is the list of MoE layers, not range(count)."""
    maverick = {"text_config": {**EXAMPLES["llama4"]["config"]["text_config"], "interleave_moe_layer_step": 2}}
    assert resolve(config_of("llama4", **maverick))[1].moe_layers == tuple(range(1, 48, 2))
    listed = {"text_config": {**maverick["text_config"], "moe_layers": [3, 7]}}
    assert resolve(config_of("llama4", **listed))[1].moe_layers == (3, 7)
    assert resolve(config_of("qwen3_moe", mlp_only_layers=[0, 5], decoder_sparse_step=3))[1].moe_layers == tuple(
        i for i in range(48) if (i + 1) % 3 == 0 and i != 5
    )
    ernie = config_of("ernie4_5_moe", moe_layer_interval=3, moe_layer_start_index=4, moe_layer_end_index=-1)
    assert resolve(ernie)[1].moe_layers == tuple(i for i in range(4, 28) if (i + 1) % 3 == 0)
    assert resolve(config_of("step3p5", moe_layers_enum="5,6,44"))[1].moe_layers == (5, 6, 44)
    assert resolve(config_of("deepseek_v1", moe_layer_freq=2))[1].moe_layers == tuple(range(2, 28, 2))
    exaone = config_of("exaone_moe", is_moe_layer=[i % 2 == 1 for i in range(48)])
    assert resolve(exaone)[1].moe_layers == tuple(range(1, 48, 2))


def test_top_k_may_differ_by_layer(tmp_path):
    """Hunyuan: k is a list; the record is as wide as the largest, narrower rows end in the fill."""
    tiny.save("hunyuan_moe", tmp_path)  # moe_topk [2, 3, 1]
    core = tiny_engine(tmp_path)
    assert core.info.top_k == 3 and [router.top_k for router in core.model.spec.routers] == [2, 3, 1]
    rows_TLK = generate(core, {"a": [1, 2, 3, 4, 5]}, 2)["a"].routes
    assert ((rows_TLK != 255).sum(-1) == [[2, 3, 1]]).all()
    assert core.info.layer_top_k == core.model.route_shape.layer_top_k == (2, 3, 1)


def test_an_unused_place_is_no_expert_of_256(tmp_path):
    """255 in a byte is an expert of 256: where layers differ in top-k the pool takes a type with a fill of its own."""
    tiny.save("hunyuan_moe", tmp_path, num_experts=256)
    core = tiny_engine(tmp_path)
    answer = generate(core, {"a": list(range(40))}, 2)["a"]
    assert answer.routes.dtype == np.int16
    assert ((answer.routes != -1).sum(-1) == [[2, 3, 1]]).all()


@pytest.mark.parametrize(("variant", "top_k"), [("gemma4_moe", 3), ("dbrx", 3), ("llama4", 1)])
def test_ids_where_the_reference_has_none(variant, top_k, tmp_path):
    """Gemma 4 hands out softmaxed logits, DBRX logits only, Llama 4 dense scores: the ids come from what was used."""
    model = tiny.save(variant, tmp_path)
    core = tiny_engine(tmp_path)
    answer = generate(core, {"a": [5, 6, 7, 8, 9, 10, 11]}, 3)["a"]
    _, expected = Reference(model)((answer.prompt + answer.tokens)[:-1])
    for column, layer in enumerate(core.info.layer_ids):
        assert answer.routes[:, column].shape[-1] == top_k
        assert [sorted(row) for row in answer.routes[:, column].tolist()] == expected[layer].tolist()


@pytest.mark.parametrize(
    ("variant", "extra"),
    [
        ("glm4_moe", "model.layers.3.mlp.gate.weight"),
        ("bailing_moe_v2", "model.layers.3.mlp.gate.weight"),
        ("step3p5", "model.layers.4.moe.gate.weight"),
        ("minimax_m2", "model.layers.3.block_sparse_moe.gate.weight"),
        ("exaone_moe", "mtp.layers.0.mlp.gate.weight"),
        ("mimo_v2", "model.mtp.layers.0.mlp.gate.weight"),
        ("ernie4_5_moe", "model.mtp_block.0.mlp.gate.weight"),
        ("deepseek_v3", "model.layers.3.mlp.gate.weight"),
        ("glm4_moe_lite", "model.layers.3.mlp.gate.weight"),
        ("bailing_hybrid", "model.layers.4.mlp.gate.weight"),
        ("bailing_moe_v2_5", "model.layers.4.mlp.gate.weight"),
        ("longcat_flash", "model.mtp.layers.0.mlp.router.classifier.weight"),
        ("qwen3_next", "mtp.layers.0.mlp.gate.weight"),
        ("qwen3_5_moe", "mtp.layers.0.mlp.gate.weight"),
        ("nemotron_h", "mtp.layers.0.mixer.gate.weight"),
    ],
)
def test_draft_layers_are_not_loaded_and_write_no_rows(variant, extra, tmp_path):
    """MTP layers, numbered past the last or from zero: skipped, and the record is as without them."""
    tiny.save(variant, tmp_path)
    before = routes_of(tiny_engine(tmp_path))
    save_file({**tiny.tensors_of(tmp_path), extra: torch.full((8, 32), 9.0)}, tmp_path / "model.safetensors")
    core = tiny_engine(tmp_path)
    assert (routes_of(core) == before).all()
    assert len(core.info.layer_ids) == before.shape[1]


def test_a_surplus_layer_is_no_draft_layer_where_there_are_none(tmp_path):
    tiny.save("mixtral", tmp_path)
    surplus = {"model.layers.3.block_sparse_moe.gate.weight": torch.ones(8, 32)}
    save_file({**tiny.tensors_of(tmp_path), **surplus}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="surplus tensor"):
        tiny_engine(tmp_path)


@pytest.mark.parametrize(
    ("variant", "architecture", "prefix", "tower"),
    [
        ("llama4", "Llama4ForConditionalGeneration", ("", "language_model."), "vision_model.patch.weight"),
        ("gemma4_moe", "Gemma4ForConditionalGeneration", ("model.", "model.language_model."), "model.vision_tower.x"),
        ("step3p5", "Step3p7ForConditionalGeneration", ("", ""), "vision_model.conv1.weight"),
        ("kimi_k2", "KimiK25ForConditionalGeneration", ("", "language_model."), "vision_tower.patch.weight"),
        ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", ("model.", "model.language_model."), "model.visual.x"),
    ],
)
def test_multimodal_wrappers(variant, architecture, prefix, tower, tmp_path):
    """Keys in text_config, tensors below a prefix, another tower's tensors beside them: same model, same routes."""
    tiny.save(variant, tmp_path)
    before = routes_of(tiny_engine(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("architectures")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "text_config": config}))
    bare, wrapped = prefix
    renamed = {
        wrapped + name.removeprefix(bare) if name.startswith(bare) else name: tensor
        for name, tensor in tiny.tensors_of(tmp_path).items()
    }
    save_file({**renamed, tower: torch.ones(3)}, tmp_path / "model.safetensors")
    assert (routes_of(tiny_engine(tmp_path)) == before).all()


def test_mimo_hub_spelling_is_the_same_model(tmp_path):
    """Lists of 0 and 1 and a window of earlier tokens, against transformers' words and its window."""
    tiny.save("mimo_v2", tmp_path)
    before = routes_of(tiny_engine(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    hub = {
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in config.pop("layer_types")],
        "moe_layer_freq": [int(kind == "sparse") for kind in config.pop("mlp_layer_types")],
        "sliding_window": config["sliding_window"] - 1,
        "sliding_window_size": config["sliding_window"] - 1,
        "rope_theta": 5000000,
        "swa_rope_theta": 10000,
        "partial_rotary_factor": 0.334,
    }
    config.pop("rope_parameters")
    (tmp_path / "config.json").write_text(json.dumps({**config, **hub}))
    assert (routes_of(tiny_engine(tmp_path)) == before).all()


def test_ambiguous_strings_are_decided_by_content():
    dense = config_of("xverse_moe")
    dense.pop("num_experts")
    with pytest.raises(CheckpointError, match="XverseForCausalLM' is served as xverse_moe only"):
        resolve(dense)
    small = {"text_config": {**EXAMPLES["gemma4_moe"]["config"]["text_config"], "enable_moe_block": False}}
    with pytest.raises(CheckpointError, match=r"gemma4_moe only.*enable_moe_block"):
        resolve(config_of("gemma4_moe", **small))
    rms = resolve(config_of("cohere2_moe"))[1].final_norm
    mean = resolve(config_of("cohere2_moe", rms_norm_eps=None))[1].final_norm
    assert (rms.kind, mean.kind) == ("rms", "layer")


@pytest.mark.parametrize(
    ("name", "change", "word"),
    [
        ("gpt_oss", {"swiglu_alpha": 2.0}, "swiglu_alpha"),
        ("bailing_moe", {"multi_gate": True}, "multi_gate"),
        ("mixtral", {"hidden_act": "mish"}, "mish"),
        ("dots1", {"moe_intermediate_size": None}, "moe_intermediate_size"),
    ],
)
def test_what_is_not_served_is_refused_by_name(name, change, word):
    with pytest.raises(CheckpointError, match=word):
        resolve(config_of(name, **change))


def test_gemma_with_layers_of_shared_keys_is_refused():
    shared = {"text_config": {**EXAMPLES["gemma4_moe"]["config"]["text_config"], "num_kv_shared_layers": 4}}
    with pytest.raises(CheckpointError, match="num_kv_shared_layers"):
        resolve(config_of("gemma4_moe", **shared))


def test_the_listing_tells_every_family(capsys):
    assert listing.main(["--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["family"] for row in rows} == {family.name for family in all_families()}
    grok = next(row for row in rows if row["family"] == "grok1")
    assert grok["routers"] == ["softmax, top 2 of 8, float32 gate"] and grok["num_moe_layers"] == 64
    assert listing.main([]) == 0 and "Mixtral 8x7B: 32 of 32" in capsys.readouterr().out
    assert listing.main(["--markdown"]) == 0 and "| step3p5 |" in capsys.readouterr().out


SPOILT = {
    "mixtral": "model.layers.1.block_sparse_moe.gate.weight",
    "glm4_moe": "model.layers.1.mlp.gate.weight",
    "granite_moe": "model.layers.1.block_sparse_moe.router.layer.weight",
    "minimax_m2": "model.layers.1.block_sparse_moe.gate.weight",
    "llama4": "model.layers.1.feed_forward.router.weight",
    "phimoe": "model.layers.1.block_sparse_moe.gate.weight",
    "gemma4_moe": "model.layers.1.router.proj.weight",
    "ernie4_5_moe": "model.layers.1.mlp.gate.weight",
}


@pytest.mark.parametrize("variant", SPOILT)
def test_a_nan_in_the_gate_is_never_chosen_and_never_spreads(variant, tmp_path):
    """One expert's logits are NaN: every row still holds distinct experts in range, and every number stays finite."""
    tiny.save(variant, tmp_path)
    tensors = tiny.tensors_of(tmp_path)
    tensors[SPOILT[variant]][3] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    core = tiny_engine(tmp_path)
    answer = generate(core, {"a": list(range(20))}, 3)["a"]
    column = core.info.layer_ids.index(1)
    for row in answer.routes[:, column].tolist():
        assert len(set(row)) == core.info.top_k and set(row) <= set(range(core.info.num_experts)) - {3}
    assert all(torch.isfinite(torch.tensor(piece.top_logprobs)).all() for piece in [answer.inputs, *answer.outputs])


@pytest.mark.parametrize(
    "variant", ["qwen2_moe", "dots1", "deepseek_v1", "granite_moe_shared", "step3p5", "gemma4_moe"]
)
def test_shared_experts_have_no_column(variant, tmp_path):
    tiny.save(variant, tmp_path)
    core = tiny_engine(tmp_path)
    routed = {body.router.top_k for subs in core.model.spec.layers for s in subs if hasattr(body := s.body, "router")}
    assert any(getattr(s.body, "shared", None) for subs in core.model.spec.layers for s in subs)
    rows_TLK = routes_of(core)
    assert rows_TLK.shape[2] == max(routed) and rows_TLK.max() < core.info.num_experts
