"""Routes out of whole replies of SGLang and vLLM, in every placement, and what is said when they are not there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tracklayer.errors import UserError
from tracklayer.routes.codec import encode, encode_packed, encode_sglang
from tracklayer.routes.forms import RouteShape
from tracklayer.routes.record import Routes
from tracklayer.routes.replies import from_sglang, from_vllm

LAYERS, HIDDEN = (1, 2, 4), 6


def random_routes(tokens: int = 9, start: int = 0, seed: int = 0) -> Routes:
    rng = np.random.default_rng(seed)
    return Routes(np.argsort(rng.random((tokens, 3, 60)), -1)[..., :3], LAYERS, 60, start)


TRUTH = random_routes()  # prompt of 6 tokens, 4 generated
SHAPE = RouteShape.of(TRUTH, HIDDEN)
WIRE = encode_sglang(TRUTH, HIDDEN)
COUNTS = {"prompt_tokens": 6, "completion_tokens": 4}
USAGE = {"usage": {**COUNTS, "total_tokens": 10}}

SGLANG: list[dict[str, Any]] = [
    {"meta_info": {"routed_experts": WIRE, **COUNTS}},
    {"choices": [{"index": 0, "meta_info": {"routed_experts": WIRE, **COUNTS}}]},
    {"choices": [{"index": 0}], "sglext": {"routed_experts": WIRE}, **USAGE},
    {"choices": [{"index": 0, "sgl_ext": {"routed_experts": WIRE}}], **USAGE},
    {"choices": [{"index": 0, "routed_experts": WIRE}], **USAGE},
    {"choices": [{"index": 0}], "nvext": {"routed_experts": WIRE}, **USAGE},
    {"meta_info": {"routed_experts": encode_sglang(TRUTH, HIDDEN, "uint8"), "routed_experts_dtype": "uint8", **COUNTS}},
]


@pytest.mark.parametrize("reply", SGLANG)
def test_sglang_placements(reply: dict[str, Any]) -> None:
    assert from_sglang(reply, SHAPE) == TRUTH
    assert from_sglang(reply, SHAPE, num_tokens=10) == TRUTH
    with pytest.raises(UserError, match="not what was declared"):
        from_sglang(reply, SHAPE, num_tokens=11)


def test_sglang_counts_are_checked() -> None:
    reply = {"meta_info": {"routed_experts": WIRE, "prompt_tokens": 6, "completion_tokens": 5}}
    with pytest.raises(UserError, match="sequence of 11 tokens"):
        from_sglang(reply, SHAPE)
    uncounted = {"choices": [{"index": 0, "routed_experts": WIRE}, {"index": 1, "routed_experts": WIRE}], **USAGE}
    assert from_sglang(uncounted, SHAPE, index=1) == TRUTH  # usage adds all choices: it says nothing of one


def test_sglang_offsets() -> None:
    """The reply's own start wins; a server that ignored the offset is seen by its row count."""
    tail = {"meta_info": {"routed_experts": encode_sglang(TRUTH.tokens(4), HIDDEN), **COUNTS}}
    assert from_sglang(tail, SHAPE, start=4) == TRUTH.tokens(4)
    with pytest.raises(UserError, match="not what was declared"):
        from_sglang(tail, SHAPE)
    tail["meta_info"]["routed_experts_start_len"] = 4
    assert from_sglang(tail, SHAPE) == TRUTH.tokens(4)
    with pytest.raises(UserError, match="start 5 was asked for, the reply says that its rows start at 4"):
        from_sglang(tail, SHAPE, start=5)
    with pytest.raises(UserError, match="was start ignored"):
        from_sglang(SGLANG[0], SHAPE, start=4)


def test_each_choice_has_its_own_rows() -> None:
    """A batch in which all ask gets all; the first is not special."""
    each = [random_routes(seed=i) for i in range(3)]
    choices = [{"index": i, "meta_info": {"routed_experts": encode_sglang(r, HIDDEN)}} for i, r in enumerate(each)]
    for i in (0, 1, 2):
        assert from_sglang({"choices": choices[::-1]}, SHAPE, index=i) == each[i]
    with pytest.raises(UserError, match="3 choices, none with index 3"):
        from_sglang({"choices": choices}, SHAPE, index=3)
    response_level = {"choices": [{"index": 0}, {"index": 1}], "sglext": {"routed_experts": WIRE}}
    with pytest.raises(UserError, match="the reply has no routed_experts"):
        from_sglang(response_level, SHAPE, index=1)  # that field holds the first choice's rows only


def test_packed_routes_speak_for_themselves() -> None:
    reply = {"meta_info": {"routed_experts": encode_packed(TRUTH.tokens(4)), **COUNTS}}
    assert from_sglang(reply, SHAPE) == TRUTH.tokens(4)
    with pytest.raises(UserError, match="not routes of RouteShape"):
        from_sglang(reply, RouteShape(layer_ids=LAYERS, top_k=3, num_experts=64))


def test_asked_for_but_absent_is_an_error() -> None:
    for reply in ({"meta_info": dict(COUNTS)}, {"choices": [{"index": 0}]}, {}):
        with pytest.raises(UserError, match=r"no routed_experts: start the server with --enable-return-routed-experts"):
            from_sglang(reply, SHAPE)
    with pytest.raises(UserError, match="null although the request was not aborted"):
        from_sglang({"meta_info": {"routed_experts": None, "finish_reason": {"type": "stop"}}}, SHAPE)


@pytest.mark.parametrize("payload", [None, ""])
def test_abort_before_the_first_token_gives_empty_routes(payload: str | None) -> None:
    meta = {"routed_experts": payload, "finish_reason": {"type": "abort", "message": "Aborted"}}
    read = from_sglang({"meta_info": meta}, SHAPE, start=2)
    assert (read.shape, read.start) == ((0, 3, 3), 2)
    choice = {"index": 0, "routed_experts": None, "finish_reason": "abort"}
    assert len(from_vllm({"choices": [choice]}, SHAPE, layers="moe")) == 0


@pytest.mark.parametrize("layers", ["all", "moe"])
def test_vllm_base64_npy(layers: str) -> None:
    wire = encode(TRUTH, "vllm_0.22", SHAPE, layers=layers)
    reply = {"choices": [{"index": 0, "routed_experts": wire}], **USAGE}
    assert from_vllm(reply, SHAPE, layers=layers) == TRUTH
    other = "moe" if layers == "all" else "all"
    with pytest.raises(UserError, match=rf'it would fit as 9 rows x \d layers \(layers="{layers}"\)'):
        from_vllm(reply, SHAPE, layers=other)


def test_vllm_split_prompt_and_output() -> None:
    prompt, output = TRUTH.to(np.int16)[:6], TRUTH.to(np.int16)[6:]
    reply = {
        "prompt_routed_experts": prompt.tolist(),
        "choices": [{"index": 0, "routed_experts": output.tolist()}],
        **USAGE,
    }
    assert from_vllm(reply, SHAPE, layers="moe") == TRUTH
    prompt[:2] = -1  # a cached prefix
    reply["prompt_routed_experts"] = prompt.tolist()
    read = from_vllm(reply, SHAPE, layers="moe")
    assert read.missing_TL.all(1).tolist() == [True, True] + [False] * 7
    reply["choices"][0]["routed_experts"] = output[:2].tolist()
    with pytest.raises(UserError, match="end at position 8, expected 9"):
        from_vllm(reply, SHAPE, layers="moe")
    del reply["prompt_routed_experts"]
    with pytest.raises(UserError, match="come with prompt_routed_experts"):
        from_vllm(reply, SHAPE, layers="moe")


def test_vllm_absent() -> None:
    with pytest.raises(UserError, match="the choice has no routed_experts: start vLLM with"):
        from_vllm({"choices": [{"index": 0}]}, SHAPE, layers="moe")
    with pytest.raises(UserError, match="null although the request was not aborted"):
        from_vllm({"choices": [{"index": 0, "routed_experts": None}]}, SHAPE, layers="moe")
