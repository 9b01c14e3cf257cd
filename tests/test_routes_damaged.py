"""Damaged files, payloads and replies: a UserError each, never another exception, never other routes in silence."""

from __future__ import annotations

import base64
import contextlib
import json
import random
from typing import Any

import numpy as np
import pytest

from tracklayer.errors import UserError
from tracklayer.routes.codec import decode, decode_packed, encode, encode_packed
from tracklayer.routes.forms import FORMS, RouteShape
from tracklayer.routes.record import Routes
from tracklayer.routes.replies import from_sglang, from_vllm
from tracklayer.routes.store import RouteFile, save_routes

NONSENSE = (None, -1, 0, "x", "", [], {}, True, 1.5, float("nan"), 1 << 70, [1], ["a"], [-1, 2, 3], "9", "YWJj", b"z")


def make_routes(rows: int = 9, start: int = 0) -> Routes:
    generator = np.random.default_rng(rows)
    ids_TLK = np.stack([[generator.permutation(12)[:4] for _ in range(3)] for _ in range(rows)]).astype(np.uint8)
    return Routes(ids_TLK, (0, 1, 2), 12, start)


ROUTES = make_routes()
SHAPE = RouteShape.of(ROUTES, 3)


def spoil(value: Any, chance: random.Random) -> Any:
    """A value of which one part is nonsense."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, (dict, list, tuple)) and value and chance.random() < 0.8:
        value = dict(value) if isinstance(value, dict) else list(value)
        key = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
        value[key] = spoil(value[key], chance)
        return value
    if isinstance(value, (str, bytes)) and value and chance.random() < 0.7:
        at = chance.randrange(min(len(value), chance.choice((20, 130, len(value)))))
        middle = chance.choice("A!=é\0z ") if isinstance(value, str) else bytes([chance.randrange(256)])
        return value[:at] if chance.random() < 0.3 else value[:at] + middle + value[at + 1 :]
    return chance.choice(NONSENSE)


def attempt(read: Any) -> None:
    """Reading succeeds or is a UserError; any other exception fails the test."""
    with contextlib.suppress(UserError):
        read()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("ignore")
def test_payloads_of_every_form(form):
    declared = {} if FORMS[form].layers else {"layers": "moe"}
    payload, chance = encode(ROUTES, form, SHAPE, **declared), random.Random(form)
    for _ in range(150):
        spoilt = spoil(payload, chance)
        for place in ({}, {"num_tokens": len(ROUTES) + 1}, {"start": chance.choice((1, -1, 1 << 40))}):
            attempt(lambda s=spoilt, p=place: decode(s, form, SHAPE, **declared, **p))


def test_packed_objects():
    chance = random.Random(1)
    for binary in (False, True):
        payload = encode_packed(ROUTES, binary=binary)
        assert decode_packed(payload) == ROUTES
        for _ in range(1000):
            spoilt = spoil(payload, chance)
            attempt(lambda s=spoilt: decode_packed(s))


def test_replies():
    chance = random.Random(2)
    text = base64.b64encode(ROUTES.experts_TLK.astype("<i4").tobytes()).decode()
    counts = {"prompt_tokens": 4, "completion_tokens": 6, "finish_reason": {"type": "stop"}}
    replies = [
        {"meta_info": {"routed_experts": text, "routed_experts_start_len": 0, **counts}},
        {"choices": [{"index": 0, "sgl_ext": {"routed_experts": text}, "finish_reason": "stop"}], "usage": counts},
        {"meta_info": {"routed_experts": encode_packed(ROUTES), **counts}},
    ]
    for reply in replies:
        assert from_sglang(reply, SHAPE) == ROUTES
        for _ in range(1000):
            spoilt = spoil(reply, chance)
            attempt(lambda s=spoilt: from_sglang(s, SHAPE))
            attempt(lambda s=spoilt: from_vllm(s, SHAPE, layers="moe"))


def test_packed_rows_of_another_start_than_was_asked_for():
    reply = {"meta_info": {"routed_experts": encode_packed(make_routes(start=3))}}
    assert from_sglang(reply, SHAPE, start=3).start == 3
    with pytest.raises(UserError, match="start 5 was asked for"):
        from_sglang(reply, SHAPE, start=5)


def test_files(tmp_path):
    path, chance = tmp_path / "routes", random.Random(3)
    samples = [ROUTES, make_routes(4)]
    save_routes(path, samples, token_ids=[np.arange(10), np.arange(5)])
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])

    def read() -> None:
        file = RouteFile(path)
        for i in range(len(file)):
            file[i].require_complete()
            if file.has_tokens:
                file.token_ids(i)

    read()
    for _ in range(800):
        spoilt = bytearray(raw)
        kind = chance.random()
        if kind < 0.3:
            spoilt = spoilt[: chance.randrange(len(raw))]
        elif kind < 0.6:
            spoilt[chance.randrange(chance.choice((8, 8 + length, len(raw))))] = chance.randrange(256)
        else:
            text = json.dumps(spoil(header, chance), default=str).encode()
            spoilt = bytearray(len(text).to_bytes(8, "little") + text + raw[8 + length :])
        path.write_bytes(spoilt)
        attempt(read)


@pytest.mark.parametrize(("name", "shift"), [("experts", -16), ("row_offsets", -8)])
def test_a_tensor_before_the_data_is_not_read_out_of_the_header(tmp_path, name, shift):
    path = tmp_path / "routes"
    save_routes(path, [ROUTES])
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    begin, end = header[name]["data_offsets"]
    header[name]["data_offsets"] = [shift, shift + end - begin]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    with pytest.raises(UserError, match="not a whole route file"):
        RouteFile(path)
