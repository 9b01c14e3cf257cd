"""Every wire form there and back, bytes checked by hand, and every misreading refused with both readings named."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest

from tracklayer.errors import IncompleteRoutes, UserError
from tracklayer.routes.codec import decode, decode_packed, encode, encode_packed, encode_sglang
from tracklayer.routes.forms import FORMS, RouteShape
from tracklayer.routes.record import Routes

LAYERS, HIDDEN = (1, 2, 4), 6


def random_routes(tokens: int = 9, experts: int = 60, top_k: int = 3, start: int = 0, layers=LAYERS) -> Routes:
    rng = np.random.default_rng(tokens + experts)
    ids = np.argsort(rng.random((tokens, len(layers), experts)), -1)[..., :top_k]
    return Routes(ids, layers, experts, start)


def holed(routes: Routes) -> Routes:
    ids = routes.to(np.int32)
    ids[2, 1], ids[-1] = -1, -1
    return Routes(ids, routes.layer_ids, routes.num_experts, routes.start)


SHAPE = RouteShape.of(random_routes(), HIDDEN)
ALL_FORMS = [
    (name, {} if form.layers else {"layers": layers})
    for name, form in FORMS.items()
    for layers in (("all", "moe") if form.layers is None else ("",))
]


@pytest.mark.parametrize("tokens", [0, 1, 9, 1000])
@pytest.mark.parametrize(("name", "layers"), ALL_FORMS)
def test_there_and_back(name: str, layers: dict[str, str], tokens: int) -> None:
    routes = random_routes(tokens)
    wire = encode(routes, name, SHAPE, **layers)
    assert decode(wire, name, SHAPE, **layers) == routes
    length = tokens + (FORMS[name].last_row is not True)
    assert decode(wire, name, SHAPE, num_tokens=length, **layers) == routes
    if isinstance(wire, (list, str)):
        assert decode(json.loads(json.dumps(wire)), name, SHAPE, **layers) == routes


@pytest.mark.parametrize(("name", "layers"), ALL_FORMS)
def test_missing_rows_travel_or_stop(name: str, layers: dict[str, str]) -> None:
    """Never as a silent zero: a form that can not say 'missing' refuses."""
    routes = holed(random_routes())
    if FORMS[name].missing is None:
        with pytest.raises(IncompleteRoutes, match="token 2 layer 2"):
            encode(routes, name, SHAPE, **layers)
        return
    wire = encode(routes, name, SHAPE, **layers)
    assert decode(wire, name, SHAPE, **layers) == routes


def test_sglang_bytes() -> None:
    """int32, little-endian, row-major, [rows, all decoder layers, top_k], zeros in dense layers, no header."""
    routes = random_routes(2)
    flat = np.frombuffer(base64.b64decode(encode_sglang(routes, HIDDEN)), "<i4").reshape(2, HIDDEN, 3)
    assert np.array_equal(flat[:, list(LAYERS)], routes.experts_TLK)
    assert (flat[:, [0, 3, 5]] == 0).all()
    moe = np.frombuffer(base64.b64decode(encode_sglang(routes)), "<i4")
    assert np.array_equal(moe.reshape(2, 3, 3), routes.experts_TLK)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 100, 1365, 1366, 1367, 5000])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_base64_in_blocks_equals_base64_in_one(tokens: int, dtype: str, top_k: int) -> None:
    """Block borders, and the padding characters at the end only."""
    routes = random_routes(tokens, top_k=top_k)
    assert encode_sglang(routes, dtype=dtype) == base64.b64encode(routes.to(dtype).tobytes()).decode()


def test_npy_is_numpys_own_format() -> None:
    routes = random_routes(5)
    array = np.load(io.BytesIO(base64.b64decode(encode(routes, "vllm_0.22", SHAPE, layers="moe"))))
    assert array.dtype == np.uint8 and array.shape == (5, 3, 3)
    wide = random_routes(5, experts=300)
    array = np.load(io.BytesIO(encode(wide, "npy")))
    assert array.dtype == np.uint16 and np.array_equal(array, wide.experts_TLK)
    array = np.load(io.BytesIO(encode(holed(wide), "npy")))
    assert array.dtype == np.int16 and (array[2, 1] == -1).all()


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
@pytest.mark.parametrize("dtype", ["<u2", ">u2", ">i4", "|u1"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_files_of_others(version: tuple[int, int], dtype: str, order: str) -> None:
    routes = random_routes(5)
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(routes.experts_TLK.astype(dtype), order=order), version)
    assert decode(file.getvalue(), "npy", SHAPE) == routes
    with pytest.raises(UserError, match=r"ids do not fill the shape|not a whole number"):
        decode(file.getvalue()[:-1], "npy", SHAPE)


def test_unchecked_reading_is_for_what_was_checked() -> None:
    routes = random_routes(5)
    assert decode(encode_sglang(routes), "sglang_moe", SHAPE, check=False) == routes
    assert decode_packed(encode_packed(routes), check=False) == routes
    same = np.zeros((5, 3, 3), np.int32)
    same[0, 0] = (1, 2, 61)
    with pytest.raises(UserError, match="expert id 61"):  # what a cast would lose is looked at even then
        decode(base64.b64encode(same.tobytes()).decode(), "sglang_moe", SHAPE, check=False)


def test_encoded_arrays_are_the_callers_own() -> None:
    routes = random_routes(5)
    array = encode(routes, "megatron", dtype="uint8")
    array[:] = 9
    assert routes == random_routes(5)


@pytest.mark.parametrize(("experts", "width"), [(255, 1), (256, 1), (257, 2), (512, 2), (768, 2), (40_000, 4)])
def test_width_is_chosen_from_the_expert_count_and_declared(experts: int, width: int) -> None:
    """More than 256 experts in a byte is how 7,400 calls once failed."""
    ids = np.array([[[experts - 1, 0]], [[1, experts - 2]]])
    routes = Routes(ids, (0,), experts)
    packed = encode_packed(routes)
    assert np.dtype(packed["dtype"]).itemsize == width
    assert len(base64.b64decode(packed["data"])) == 4 * width
    assert np.array_equal(decode_packed(packed).experts_TLK, ids)
    assert np.array_equal(decode(encode(routes, "prime_rl"), "prime_rl", RouteShape.of(routes)).experts_TLK, ids)


def test_ids_that_do_not_fit() -> None:
    with pytest.raises(UserError, match="ids up to 299 do not fit uint8"):
        encode_sglang(random_routes(experts=300), dtype="uint8")


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("complete", [True, False])
def test_packed(binary: bool, complete: bool) -> None:
    routes = random_routes(start=11) if complete else holed(random_routes(start=11))
    packed = encode_packed(routes, binary=binary)
    assert decode_packed(packed if binary else json.loads(json.dumps(packed))) == routes
    assert decode_packed(packed).start == 11
    for key in ("data", "shape", "dtype", "start", "layer_ids", "num_experts"):
        with pytest.raises(UserError, match=f"lack {key}"):
            decode_packed({k: v for k, v in packed.items() if k != key})
    for change, message in [
        ({"format": "tracklayer.routes/9"}, "format 'tracklayer.routes/1'"),
        ({"dtype": "int32"}, "int32 of shape .* is not how 60 experts are packed"),
        ({"shape": [9, 3]}, "is not how"),
        ({"shape": [8, 3, 3]}, "81 ids do not fill"),
        ({"data": "AAA"}, "not base64"),
    ]:
        with pytest.raises(UserError, match=message):
            decode_packed({**packed, **change})
    with pytest.raises(UserError, match="packed routes are an object"):
        decode_packed("text")


# sizes: refuse and name both


def test_two_readings_are_refused() -> None:
    """6 rows of 3 MoE layers are as many ids as 3 rows of 6 decoder layers."""
    wire = encode(random_routes(6), "sglang_moe")
    both = r'6 rows x 3 layers \(layers="moe"\) x 3; or 3 rows x 6 layers \(layers="all"\) x 3: declare'
    with pytest.raises(UserError, match=both):
        decode(wire, "sglang", SHAPE, layers=None)
    assert len(decode(wire, "sglang", SHAPE, layers=None, num_tokens=7)) == 6
    assert len(decode(wire, "sglang", SHAPE, layers="moe")) == 6


def test_last_row_or_not_is_told_by_the_token_count() -> None:
    wire = encode(random_routes(6), "megatron")
    assert len(decode(wire, "megatron", SHAPE, num_tokens=7)) == len(decode(wire, "megatron", SHAPE, num_tokens=6)) == 6
    with pytest.raises(UserError, match="not what was declared"):
        decode(wire, "megatron", SHAPE, num_tokens=8)
    flat = encode(random_routes(6), "sglang_moe")
    two = {"layers": None, "last_row": None}
    shape = RouteShape(layer_ids=(0, 1), top_k=3, num_experts=60, num_hidden_layers=3)
    # 2 layers x 9 rows = 3 layers x 6 rows: fits 9 tokens with a last row, and no other count
    assert len(decode(flat, "sglang", shape, num_tokens=9, **two)) == 9
    same = np.tile(np.arange(3), (3 * 2, 1)).astype("<i4")  # 3 rows x 2 layers = 2 rows x 3 layers
    with pytest.raises(UserError, match=r"with a row for the last token; or 2 rows .*without a row"):
        decode(base64.b64encode(same.tobytes()).decode(), "sglang", shape, num_tokens=3, **two)


@pytest.mark.parametrize(
    ("payload", "form", "declared", "message"),
    [
        (9, "sglang", {"num_tokens": 11}, "sequence of 11 tokens from position 0; it may have columns of shared"),
        (9, "sglang", {"num_tokens": 9}, r"it would fit as 9 rows x 6 layers .* with a row for the last token"),
        (9, "sglang_moe", {"num_tokens": 10}, r'it would fit as 9 rows x 6 layers \(layers="all"\)'),
        (9, "sglang", {"num_tokens": 10, "start": 4}, r"it would fit as 9 rows .* from position 0 \(was start ignored"),
    ],
)
def test_wrong_counts_name_what_would_fit(payload: int, form: str, declared: dict[str, int], message: str) -> None:
    wire = encode_sglang(random_routes(payload), HIDDEN)
    with pytest.raises(UserError, match=message):
        decode(wire, form, SHAPE, **declared)


def test_offset_replies() -> None:
    whole = random_routes(9)
    tail = decode(encode_sglang(whole.tokens(4), HIDDEN), "sglang", SHAPE, start=4, num_tokens=10)
    assert tail == whole.tokens(4) and whole.tokens(0, 4).append(tail) == whole
    none = decode(encode_sglang(whole.tokens(9), HIDDEN), "sglang", SHAPE, start=9, num_tokens=10)
    assert len(none) == 0 and none.start == 9


def test_layers_first_is_not_sglangs_layout() -> None:
    """The same field name with the layer axis in front and -1 in dense layers."""
    routes = random_routes(9)
    wire = encode(routes, "sglang_jax", SHAPE)
    with pytest.raises(UserError, match="layer 0 is dense"):
        decode(wire, "sglang", SHAPE, num_tokens=10)
    assert decode(wire, "sglang_jax", SHAPE, num_tokens=10) == routes


def test_dense_layers_hold_what_the_form_says() -> None:
    routes = random_routes(9)
    wide = np.zeros((9, HIDDEN, 3), np.int32)
    wide[:, [2, 3, 5]] = routes.experts_TLK  # shifted by one layer
    wire = base64.b64encode(wide.tobytes()).decode()
    with pytest.raises(UserError, match=r"layer 3 is dense in this model, but token 0 .*\(9 rows\).*shifted"):
        decode(wire, "sglang", SHAPE)
    stale = encode(routes, "atom", SHAPE)
    stale[:, 0] = 7  # dense rows that nobody clears
    assert decode(stale, "atom", SHAPE) == routes
    with pytest.raises(UserError, match="layer 0 is dense"):
        decode(stale, "vllm_0.14", SHAPE)


def test_shared_expert_columns_are_cut_only_when_declared() -> None:
    routes = random_routes(9)
    shared = np.full((9, 3, 2), 60)
    wire = np.concatenate([routes.experts_TLK, shared], -1).astype(np.int32)
    assert decode(wire, "tensorrt_llm", SHAPE, shared_columns=2) == routes
    with pytest.raises(UserError, match=r"an array \[9, 3, 5\] is not what was declared.*columns of shared experts"):
        decode(wire, "tensorrt_llm", SHAPE)
    first = wire[..., [3, 0, 1, 2, 4]]  # the shared id among the routed ones: out of range, not silently kept
    with pytest.raises(UserError, match=r"expert id 60 is not in 0\.\.59"):
        decode(first, "tensorrt_llm", SHAPE, shared_columns=2)


def test_physical_ids_are_out_of_range() -> None:
    """8 logical experts with 4 replicas: ids up to 11 are no logical ids, whatever type carries them."""
    shape = RouteShape(layer_ids=(0,), top_k=2, num_experts=8)
    for dtype in (np.uint8, np.int16, np.int32, np.int64):
        with pytest.raises(UserError, match="expert id 11"):
            decode(np.array([[[3, 11]]], dtype), "megatron", shape)


def test_zero_rows_of_producers_that_zero() -> None:
    routes = random_routes(9)
    wire = encode(routes, "vllm_0.14", SHAPE)
    wire[4] = 0
    read = decode(wire, "vllm_0.14", SHAPE)
    assert np.argwhere(read.missing_TL).tolist() == [[4, 0], [4, 1], [4, 2]]
    with pytest.raises(UserError, match=r"token 4 layer 1: .* an all-zero row was never recorded"):
        decode(base64.b64encode(wire.tobytes()).decode(), "sglang", SHAPE)


def test_one_zero_is_an_expert() -> None:
    """With top 1 a zero can not mean missing: neither read so nor written so."""
    shape = RouteShape(layer_ids=(0,), top_k=1, num_experts=4, num_hidden_layers=1)
    wire = np.array([[[0]], [[3]]], np.int32)
    assert decode(wire, "vllm_0.14", shape).complete
    with pytest.raises(IncompleteRoutes):
        encode(Routes([[[-1]], [[3]]], (0,), 4), "vllm_0.14", shape)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_trainers_types(dtype: str) -> None:
    routes = holed(random_routes(9))
    wire = encode(routes, "nemo_rl", dtype=dtype)
    assert wire.dtype == dtype and (wire[2, 1] == -1).all()
    assert decode(wire, "nemo_rl", SHAPE, num_tokens=9) == routes
    with pytest.raises(UserError, match="ids up to 299 do not fit int8"):
        encode(random_routes(experts=300), "nemo_rl", dtype="int8")


def test_gaps_of_minus_one_and_legal_padding() -> None:
    """-1 is a gap; padding 0..K-1 is a legal row and can only be told by the token count."""
    routes = random_routes(9)
    wire = encode(routes, "tensorrt_llm", SHAPE)
    wire[3] = -1
    assert decode(wire, "tensorrt_llm", SHAPE).missing_TL.sum() == 3
    padded = np.concatenate([wire, np.tile(np.arange(3, dtype=np.int32), (2, 3, 1))])
    with pytest.raises(UserError, match=r"an array \[11, 3, 3\] is not what was declared"):
        decode(padded, "tensorrt_llm", SHAPE, num_tokens=10)
    half = wire.copy()
    half[5, 0, 2] = -1
    with pytest.raises(UserError, match="missing as a whole"):
        decode(half, "tensorrt_llm", SHAPE)


@pytest.mark.parametrize(
    ("payload", "form", "message"),
    [
        ("AAA", "sglang", "not base64"),
        ("AAAA AAAA", "sglang", "not base64"),
        (b"\x00\x01", "sglang", "not base64|not a whole number"),
        ("AAAA", "sglang", "3 bytes are not a whole number of int32"),
        (None, "sglang", "should be base64 text, got NoneType"),
        ([1, 2], "sglang", "should be base64 text, got list"),
        (base64.b64encode(b"no numpy").decode(), "vllm_0.22", "not a .npy file"),
        ("!!", "vllm_0.22", "not base64"),
        ([[[1, 2], [3]]], "lmdeploy", r"\[tokens\]\[layers\]\[top_k\] of equal lengths"),
        ([[[1.5, 2, 3]]], "lmdeploy", "must be integers, got an array of float64"),
        (np.zeros((2, 2), int), "megatron", r"flat or \[tokens, layers, top_k\], got shape \[2, 2\]"),
        ({"data": b"", "shape": [0, 3, 3]}, "prime_rl", "mapping with data, shape, dtype"),
        ({"data": b"\x00", "shape": [1, 3, 3], "dtype": "uint8"}, "prime_rl", "1 ids do not fill the shape"),
        ({"data": b"\x00", "shape": [1, 3, 3], "dtype": "float8"}, "prime_rl", "unknown type of ids 'float8'"),
        ({"data": b"\x00" * 4, "shape": [1, 1, 1], "dtype": "float32"}, "prime_rl", "they are integers"),
        ("~~ ~", "prime_rl_base85", "not base85"),
    ],
)
def test_broken_payloads(payload: object, form: str, message: str) -> None:
    declared = {"layers": "moe"} if FORMS[form].layers is None else {}
    with pytest.raises(UserError, match=message):
        decode(payload, form, SHAPE, **declared)


def test_declarations_are_demanded() -> None:
    with pytest.raises(UserError, match="unknown form 'vllm', known: sglang,"):
        decode("", "vllm", SHAPE)
    with pytest.raises(UserError, match='say layers="all" or layers="moe"'):
        encode(random_routes(), "vllm_0.22", SHAPE)
    with pytest.raises(UserError, match="does not say its type"):
        decode("", "sglang", SHAPE, dtype=None)
    with pytest.raises(UserError, match="num_hidden_layers must be given"):
        encode(random_routes(), "sglang")
    with pytest.raises(UserError, match="layer 4 is not one of 4 decoder layers"):
        encode_sglang(random_routes(), 4)
    with pytest.raises(UserError, match=r"routes have layers \[1, 2, 4\], the shape says \[0, 2, 4\]"):
        encode(random_routes(), "megatron", RouteShape(layer_ids=(0, 2, 4), top_k=3, num_experts=60))
    with pytest.raises(TypeError, match="colour"):
        decode("", "sglang", SHAPE, colour="red")
    raw = encode(random_routes(3, start=5), "prime_rl")
    assert decode(raw, "prime_rl", SHAPE).start == 5
    with pytest.raises(UserError, match="start 4 was asked for but the payload says that its rows start at 5"):
        decode(raw, "prime_rl", SHAPE, start=4)
