"""Quantised checkpoints: the arithmetic against loops and transformers, and whole models against their plain form."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
from parity import generate, tiny_engine
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tracklayer.errors import CheckpointError
from tracklayer.models.dequant import dequantised, from_float8, from_mxfp4

FP8 = {"quant_method": "fp8", "weight_block_size": [8, 16]}
INT4 = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4, "symmetric": True}}}}


def routes_of(folder):
    return generate(tiny_engine(folder), {"a": [3, 1, 4, 1, 5, 9, 2, 6]}, 4)["a"].routes


def reload(folder, tensors, settings=None):
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def to_float8(weight):
    """One scale per block of 8 x 16, edges cut; returns (values, scales, what they stand for)."""
    rows, columns = weight.shape
    scales = torch.zeros(-(-rows // 8), -(-columns // 16))
    values, plain = torch.zeros_like(weight).to(torch.float8_e4m3fn), torch.zeros_like(weight)
    for r in range(scales.shape[0]):
        for k in range(scales.shape[1]):
            block = (slice(8 * r, 8 * r + 8), slice(16 * k, 16 * k + 16))
            scales[r, k] = weight[block].abs().max() / 448
            values[block] = (weight[block] / scales[r, k]).to(torch.float8_e4m3fn)
            plain[block] = values[block].float() * scales[r, k]
    return values, scales, plain


def to_int4(weight, group=8):
    """Symmetric integers -8..7 with one scale per row and group, eight to an int32, lowest bits first."""
    rows, columns = weight.shape
    packed, scales = torch.zeros(rows, -(-columns // 8), dtype=torch.int32), torch.zeros(rows, columns // group)
    plain = torch.zeros_like(weight)
    for r in range(rows):
        for k in range(columns):
            if k % group == 0:
                scales[r, k // group] = weight[r, k : k + group].abs().max() / 7
            value = int((weight[r, k] / scales[r, k // group]).round().clamp(-8, 7))
            word = (int(packed[r, k // 8]) & 0xFFFFFFFF) | (value + 8) << 4 * (k % 8)
            packed[r, k // 8] = word - (1 << 32) if word >= 1 << 31 else word
            plain[r, k] = value * scales[r, k // group]
    return packed, scales, plain


def is_linear(name):
    return name.endswith("proj.weight")


def test_fp8_blocks_give_the_same_model(tmp_path):
    tiny.save("glm4_moe", tmp_path, num_hidden_layers=2, moe_intermediate_size=20)
    quantised, plain = {}, {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        quantised[name] = plain[name] = tensor
        if is_linear(name):
            quantised[name], quantised[f"{name}_scale_inv"], plain[name] = to_float8(tensor)
            quantised[name.replace("weight", "input_scale")] = torch.ones(1)
    reload(tmp_path, plain)
    expected = routes_of(tmp_path)
    reload(tmp_path, quantised, FP8)
    assert (routes_of(tmp_path) == expected).all()
    with pytest.raises(CheckpointError, match=r"scale_inv|surplus"):  # without the config's word it is no plain model
        reload(tmp_path, quantised)
        routes_of(tmp_path)


def test_an_update_reads_quantised_checkpoints_too(tmp_path):
    """A running engine takes the same checkpoints as a starting one."""
    tiny.save("qwen3_moe", tmp_path / "first")
    tiny.save("qwen3_moe", tmp_path / "second", seed=3)
    tensors = load_file(tmp_path / "second" / "model.safetensors")
    for name in [name for name in tensors if is_linear(name)]:
        tensors[name], tensors[name + "_scale_inv"], _ = to_float8(tensors[name])
    reload(tmp_path / "second", tensors, FP8)
    core, prompt = tiny_engine(tmp_path / "first"), {"a": [3, 1, 4, 1, 5, 9, 2, 6]}
    core.model.replace_weights(str(tmp_path / "second"))
    updated = generate(core, prompt, 4)["a"]
    started = generate(tiny_engine(tmp_path / "second"), prompt, 4)["a"]
    assert updated.tokens == started.tokens
    assert (updated.routes == started.routes).all()


def test_int4_gives_the_same_model(tmp_path):
    tiny.save("dots1", tmp_path, num_hidden_layers=2)
    quantised, plain = {}, {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        quantised[name] = plain[name] = tensor
        if is_linear(name) and ".experts." in name:
            del quantised[name]
            packed, scales, plain[name] = to_int4(tensor)
            quantised |= {
                f"{name}_packed": packed,
                f"{name}_scale": scales,
                f"{name}_shape": torch.tensor(tensor.shape),
            }
    reload(tmp_path, plain)
    expected = routes_of(tmp_path)
    reload(tmp_path, quantised, INT4)
    assert (routes_of(tmp_path) == expected).all()


def test_mxfp4_gives_the_same_model(tmp_path):
    """GPT-OSS's published form; transformers' own unpacking says what it stands for."""
    tiny.save("gpt_oss", tmp_path, intermediate_size=32)
    random = torch.Generator().manual_seed(3)
    quantised, plain = {}, {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        quantised[name] = plain[name] = tensor
        if tensor.dim() == 3:
            del quantised[name]
            experts, inputs, outputs = tensor.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=random, dtype=torch.uint8)
            scales = torch.randint(122, 126, blocks.shape[:-1], generator=random, dtype=torch.uint8)
            quantised |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert any(name.endswith("_blocks") for name in quantised)
    reload(tmp_path, plain)
    expected = routes_of(tmp_path)
    reload(tmp_path, quantised, {"quant_method": "mxfp4"})
    assert (routes_of(tmp_path) == expected).all()


def test_every_four_bit_float_and_the_ends_of_the_scale():
    codes = torch.arange(16, dtype=torch.uint8).repeat(2).view(1, 1, 16, 2)
    blocks = codes[..., 0] | codes[..., 1] << 4
    want = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6] * 2
    assert from_mxfp4(blocks, torch.tensor([[127]], dtype=torch.uint8)).tolist() == [want]
    assert from_mxfp4(blocks, torch.tensor([[130]], dtype=torch.uint8)).tolist() == [[8 * v for v in want]]
    assert from_mxfp4(blocks, torch.tensor([[0]], dtype=torch.uint8)).max() == 6 * 2.0**-127


def test_one_block_of_columns():
    weight = torch.randn(20, 10)
    values, scales, plain = to_float8(weight)
    assert scales.shape == (3, 1) and torch.equal(from_float8(values, scales, [8, 16]), plain)
    stacked = from_float8(values.expand(2, -1, -1), torch.stack([scales, 2 * scales]), [8, 16])
    assert torch.equal(stacked, torch.stack([plain, 2 * plain]))


@pytest.mark.parametrize("shape", [(), (1,), (6, 1), (6,)])
def test_float8_with_one_scale_or_one_a_row(shape):
    values = torch.randn(6, 5).to(torch.float8_e4m3fn)
    scale = torch.rand(shape) + 0.5
    rows = scale.reshape(-1).expand(6) if scale.numel() == 1 else scale.reshape(6)
    want = torch.stack([values[n].float() * rows[n] for n in range(6)])
    assert torch.equal(from_float8(values, scale), want)


def test_companions_in_any_order_and_what_is_wrong_is_named():
    scale, values = torch.tensor([[2.0]]), torch.ones(2, 3).to(torch.float8_e4m3fn)
    plain = ("norm.weight", torch.ones(3))
    for stream in (
        [("a.weight", values), plain, ("a.weight_scale_inv", scale)],
        [("a.weight_scale_inv", scale), plain],
    ):
        stream = stream if len(stream) == 3 else [*stream, ("a.weight", values)]
        out = dict(dequantised(stream, FP8))
        assert out.keys() == {"norm.weight", "a.weight"} and (out["a.weight"] == 2).all()
    with pytest.raises(CheckpointError, match=r"'a\.weight' has no scale"):
        list(dequantised([("a.weight", values)], FP8))
    with pytest.raises(CheckpointError, match=r"awq.*fp8, mxfp4, compressed-tensors"):
        list(dequantised([plain], {"quant_method": "awq"}))
    packed = {"a.weight_packed": torch.zeros(1, 1, dtype=torch.int32), "a.weight_zero_point": torch.zeros(1, 1)}
    rest = {"a.weight_scale": torch.ones(1, 1), "a.weight_shape": torch.tensor([1, 8])}
    with pytest.raises(CheckpointError, match="zero points"):
        list(dequantised({**packed, **rest}.items(), INT4))
    eight = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8}}}}
    packed.pop("a.weight_zero_point")
    with pytest.raises(CheckpointError, match="only symmetric 4-bit"):
        list(dequantised({**packed, **rest}.items(), eight))


def test_a_learned_scale_is_no_companion():
    learned = ("layers.0.router.per_expert_scale", torch.ones(4))
    assert [name for name, _ in dequantised([learned], FP8)] == [learned[0]]
