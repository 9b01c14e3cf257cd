"""Layers that choose different numbers of experts: every form there and back, and no unused place that is an id."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from test_routes_codec import ALL_FORMS, HIDDEN, LAYERS, holed, random_routes

from tracklayer.errors import UserError
from tracklayer.routes.codec import decode, decode_packed, encode, encode_packed, encode_sglang
from tracklayer.routes.forms import FORMS, RouteShape
from tracklayer.routes.record import Routes


def ragged_routes(experts: int = 60, tokens: int = 9, start: int = 0) -> Routes:
    """Layers that choose 1, 3 and 2 experts, the largest id among them."""
    ids = np.array(random_routes(tokens, experts, start=start).to(np.int32))
    ids[:1, :, 0] = experts - 1
    ids[:, ~(np.arange(3) < np.array([[1], [3], [2]]))] = -1
    return Routes(ids, LAYERS, experts, start, layer_top_k=(1, 3, 2))


@pytest.mark.parametrize("experts", [60, 255, 256, 257, 300])
@pytest.mark.parametrize(("name", "layers"), ALL_FORMS)
def test_layers_with_different_numbers_of_choices(name: str, layers: dict[str, str], experts: int) -> None:
    """Every form there and back; what is not used is -1 or the largest value, never an id that the model has."""
    routes = ragged_routes(experts, start=4)
    shape = RouteShape.of(routes, HIDDEN)
    wire = encode(routes, name, shape, **layers)
    assert decode(wire, name, shape, start=4, **layers) == routes
    if FORMS[name].container in ("array", "list"):
        ids = np.asarray(wire)
        ids = ids.transpose(1, 0, 2) if FORMS[name].axes == "LTK" else ids
        ids = ids[:, -1] if ids.shape[1] == len(LAYERS) else ids[:, LAYERS[-1]]
        unsigned = np.dtype(FORMS[name].dtype or "int32").kind == "u"
        assert (ids[:, 2] == (np.iinfo(FORMS[name].dtype).max if unsigned else -1)).all()
        assert ((ids[:, :2] >= 0) & (ids[:, :2] < experts)).all()
    missing = Routes(holed(random_routes(experts=experts)).experts_TLK, LAYERS, experts)
    ids = np.where(missing.missing_TL[..., None], -1, ragged_routes(experts).to(np.int32))
    part = Routes(ids, LAYERS, experts, layer_top_k=(1, 3, 2))
    assert np.array_equal(part.missing_TL, missing.missing_TL) and part.missing_TL.any()
    if FORMS[name].missing is not None:
        assert decode(encode(part, name, shape, **layers), name, shape, **layers) == part


@pytest.mark.parametrize("binary", [False, True])
def test_packed_says_how_many_each_layer_chooses(binary: bool) -> None:
    for experts in (60, 256):
        packed = encode_packed(ragged_routes(experts), binary=binary)
        assert packed["layer_top_k"] == [1, 3, 2] and packed["dtype"] == ("uint8" if experts == 60 else "int16")
        assert decode_packed(packed) == ragged_routes(experts)
        assert "layer_top_k" not in encode_packed(random_routes(), binary=binary)
        for wrong in ([1, 3], [1, 2, 2], [0, 3, 2], "abc", [1, 3, None], 3):
            with pytest.raises(UserError):
                decode_packed({**packed, "layer_top_k": wrong})
        with pytest.raises(UserError):  # taken for rows that are missing in part
            decode_packed({key: value for key, value in packed.items() if key != "layer_top_k"})


def test_unused_places_where_the_type_has_no_room() -> None:
    with pytest.raises(UserError, match="unused places can not be told from expert 255 in uint8"):
        encode_sglang(ragged_routes(256), dtype="uint8")
    text = encode_sglang(ragged_routes(255), dtype="uint8")
    assert np.frombuffer(base64.b64decode(text), np.uint8).reshape(-1, 3, 3)[0, 0].tolist() == [254, 255, 255]
    with pytest.raises(UserError, match="all layers choose 3 experts: leave layer_top_k out"):
        RouteShape(layer_ids=(0, 1), top_k=3, num_experts=9, layer_top_k=(3, 3))
    with pytest.raises(UserError, match="one number for each of 2 layers"):
        RouteShape(layer_ids=(0, 1), top_k=3, num_experts=9, layer_top_k=(3, 4))


@pytest.mark.parametrize("wrong", [(2.5, 3, 2), ("a", 3, 2), 5, (1, 3), (0, 3, 2)])
def test_numbers_of_choices_are_whole_numbers(wrong: object) -> None:
    ids = ragged_routes(60).experts_TLK
    with pytest.raises(UserError, match="layer_top_k must have one number for each of 3 layers"):
        Routes(ids, LAYERS, 60, layer_top_k=wrong)  # type: ignore[arg-type]
