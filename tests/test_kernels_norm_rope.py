"""Norms, activations, rope tables and the fused split, rotation and store: torch references against plain formulas."""

from __future__ import annotations

import math

import pytest
import torch

from tracklayer.kernels.activation import act_mul
from tracklayer.kernels.norm import add_rms_norm, layer_norm, rms_norm
from tracklayer.kernels.qk_rope import Heads, qk_rope_store
from tracklayer.kernels.rope import rope_frequencies, rope_table, yarn_mscale


def exact_rms(x, gain, eps, offset):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (gain.double() + offset)


@pytest.mark.parametrize("dtype,bound", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("tokens,offset", [(0, 0.0), (1, 1.0), (7, 0.0)])
def test_rms_norm(dtype, bound, tokens, offset):
    x, gain = torch.randn(tokens, 3, 48).to(dtype), torch.randn(48).to(dtype)
    got = rms_norm(x, gain, 1e-5, offset)
    assert got.dtype == dtype and got.shape == x.shape
    torch.testing.assert_close(got.double(), exact_rms(x, gain, 1e-5, offset), rtol=bound, atol=bound)


def test_add_rms_norm_changes_the_residual_and_norms_what_it_stored():
    delta, residual, gain = torch.randn(5, 32).bfloat16(), torch.randn(5, 32).bfloat16(), torch.randn(32).bfloat16()
    want = (residual.double() + 0.25 * delta.double()).to(torch.bfloat16)
    got = add_rms_norm(delta, residual, gain, 1e-6, 1.0, 0.25)
    assert residual.equal(want)
    torch.testing.assert_close(got.double(), exact_rms(want, gain, 1e-6, 1.0), rtol=1e-2, atol=1e-2)


def test_layer_norm():
    x, gain, bias = torch.randn(5, 40) * 3 + 7, torch.randn(40), torch.randn(40)
    centred = x.double() - x.double().mean(-1, keepdim=True)
    want = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain
    torch.testing.assert_close(layer_norm(x, gain, bias, 1e-5).double(), want + bias, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer_norm(x, gain, None, 1e-5).double(), want, rtol=1e-5, atol=1e-5)


SCALARS = {
    "silu": lambda v: v / (1 + math.exp(-v)),
    "gelu": lambda v: 0.5 * v * (1 + math.erf(v / math.sqrt(2))),
    "gelu_tanh": lambda v: 0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))),
    "relu2": lambda v: max(v, 0.0) ** 2,
}


@pytest.mark.parametrize("name", SCALARS)
def test_activations(name):
    x = 3 * torch.randn(4, 10)
    gate = torch.tensor([[SCALARS[name](float(v)) for v in r] for r in x])
    torch.testing.assert_close(act_mul(x, name, gated=False), gate, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(act_mul(x, name), gate[:, :5] * x[:, 5:], rtol=1e-5, atol=1e-6)


def test_activations_refuse_nonsense():
    with pytest.raises(ValueError, match="unknown activation 'tanh', expected one of silu"):
        act_mul(torch.zeros(1, 4), "tanh")
    with pytest.raises(ValueError, match="even width"):
        act_mul(torch.zeros(1, 5), "silu")


LONG = {
    "rope_type": "longrope",
    "long_factor": [1.0 + 0.5 * i for i in range(16)],
    "short_factor": [1.0 + 0.1 * i for i in range(16)],
    "original_max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
SCALINGS = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    YARN,
    {**YARN, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    {**YARN, "attention_factor": 1.5},
    LLAMA3,
    LONG,
    {**LONG, "attention_factor": 1.2},
    {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: "-".join(map(str, list(s)[:1] + list(s.values())[:1])))
def test_frequencies_equal_transformers(scaling):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {**scaling, "rope_theta": 5e5}
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=2, head_dim=32, max_position_embeddings=2048, rope_parameters=parameters
    )
    long = scaling["rope_type"] == "longrope"
    want, want_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu", seq_len=2048 if long else None)
    got, factor = rope_frequencies(32, 5e5, scaling, 2048)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0.0)
    assert factor == pytest.approx(want_factor)


def test_longrope_is_short_within_the_trained_length():
    short, _ = rope_frequencies(32, 1e4, LONG, 512)
    default, _ = rope_frequencies(32, 1e4, None, 512)
    torch.testing.assert_close(short * torch.tensor(LONG["short_factor"]), default)


def test_table_holds_angles_and_the_factor():
    table = rope_table(8, 1e4, YARN, 2048)
    inv_freq, factor = rope_frequencies(8, 1e4, YARN, 2048)
    assert table.shape == (2048, 8) and table.dtype == torch.float32 and factor == pytest.approx(yarn_mscale(4.0))
    for p in (0, 1, 77, 2047):
        angles = [p * float(f) for f in inv_freq]
        want = [factor * math.cos(a) for a in angles] + [factor * math.sin(a) for a in angles]
        assert table[p].tolist() == pytest.approx(want, abs=2e-4)


@pytest.mark.parametrize(
    "dim,scaling,message",
    [
        (32, {"rope_type": "spiral"}, "unknown rope type 'spiral', expected one of default"),
        (32, {"rope_type": "yarn", "factor": 4.0}, "'yarn' needs the key 'original_max_position_embeddings'"),
        (31, None, "positive even number, got 31"),
        (16, LONG, "must have 8 entries, got 16"),
    ],
)
def test_tables_refuse_nonsense(dim, scaling, message):
    with pytest.raises(ValueError, match=message):
        rope_table(dim, 1e4, scaling, 2048)


def exact_rotation(x, position, dim, interleaved):
    """One head in float64, as complex numbers."""
    x = x.double().clone()
    half = dim // 2
    angle = torch.tensor([position * 1e4 ** (-2 * i / dim) for i in range(half)], dtype=torch.float64)
    real, imaginary = (x[0:dim:2], x[1:dim:2]) if interleaved else (x[:half], x[half:dim])
    z = torch.complex(real.clone(), imaginary.clone()) * torch.polar(torch.ones_like(angle), angle)
    if interleaved:
        x[0:dim:2], x[1:dim:2] = z.real, z.imag
    else:
        x[:half], x[half:dim] = z.real, z.imag
    return x


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rope_dim", [0, 8, 16])
@pytest.mark.parametrize("norm,after", [(None, False), ("head", False), ("head", True), ("whole", False)])
def test_qk_rope_store(interleaved, rope_dim, norm, after):
    tokens, heads, kv_heads, width, value_width = 5, 4, 2, 16, 8
    qkv = torch.randn(tokens, heads * width + kv_heads * (width + value_width))
    positions = torch.tensor([0, 3, 50, 7, 63], dtype=torch.int32)
    slots = torch.tensor([9, 2, 11, 1, 4], dtype=torch.int32)
    gains = [torch.randn(n * width if norm == "whole" else width) if norm else None for n in (heads, kv_heads)]
    k, v = torch.full((12, kv_heads, width), 7.0), torch.full((12, kv_heads, value_width), 7.0)
    table = rope_table(rope_dim, 1e4, None, 64) if rope_dim else None
    original = qkv.clone()
    cut = Heads(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=width, value_dim=value_width, rope_dim=rope_dim,
        interleaved=interleaved, q_norm_D=gains[0], k_norm_D=gains[1], norm_whole=norm == "whole", norm_eps=1e-6,
        norm_after_rope=after,
    )  # fmt: skip
    q = qk_rope_store(qkv, table, positions, slots, k, v, cut)
    parts = original.split([heads * width, kv_heads * width, kv_heads * value_width], -1)
    for part, gain, got in zip(parts[:2], gains, (q, k[slots.long()]), strict=True):
        if norm == "whole":
            part = exact_rms(part, gain, 1e-6, 0.0)
        want = part.double().unflatten(-1, (-1, width))
        if norm == "head" and not after:
            want = exact_rms(want, gain, 1e-6, 0.0)
        if rope_dim:
            want = torch.stack(
                [
                    torch.stack([exact_rotation(head, int(p), rope_dim, interleaved) for head in token])
                    for token, p in zip(want, positions, strict=True)
                ]
            )
        if norm == "head" and after:
            want = exact_rms(want, gain, 1e-6, 0.0)
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
    assert v[slots.long()].flatten(1).equal(parts[2])
    assert qkv[:, heads * width : (heads + kv_heads) * width].equal(k[slots.long()].flatten(1))  # in place
    untouched = [s for s in range(12) if s not in slots.tolist()]
    assert (k[untouched] == 7.0).all() and (v[untouched] == 7.0).all()


def test_qk_rope_store_refuses_widths_that_do_not_add_up():
    index = torch.zeros(1, dtype=torch.int32)
    k = v = torch.zeros(2, 1, 16)
    heads = dict(num_heads=2, num_kv_heads=1, head_dim=16, value_dim=16)
    with pytest.raises(ValueError, match="width 65, its heads need 64"):
        qk_rope_store(torch.zeros(1, 65), None, index, index, k, v, Heads(**heads, rope_dim=0))
    with pytest.raises(ValueError, match="at most the head width 16, got 18"):
        Heads(**heads, rope_dim=18)
    with pytest.raises(ValueError, match="rope_dim 8 needs a table"):
        qk_rope_store(torch.zeros(1, 64), None, index, index, k, v, Heads(**heads, rope_dim=8))
    with pytest.raises(ValueError, match="both q and k"):
        Heads(**heads, rope_dim=0, q_norm_D=torch.ones(16))
