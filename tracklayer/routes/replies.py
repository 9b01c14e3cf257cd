"""Routes out of whole replies: where each engine puts them, what they cover, and what is wrong when they are not there.

S tokens of a sequence (prompt P and completion C). numpy only.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from tracklayer.errors import UserError, malformed
from tracklayer.routes.codec import decode, decode_packed
from tracklayer.routes.forms import RouteShape
from tracklayer.routes.record import Routes, concat

FIELD = "routed_experts"
# Objects of a reply that may hold SGLang's field, nearest first: of the chosen choice, then of the response.
CHOICE_PLACES = ("meta_info", "sgl_ext", "nvext", "")
RESPONSE_PLACES = ("meta_info", "sglext", "sgl_ext", "nvext")


def _choice(reply: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    choices = reply.get("choices")
    if choices is None:
        if index:
            raise UserError(f"choice {index} of a reply without choices")
        return {}
    for position, choice in enumerate(choices):
        if choice.get("index", position) == index:
            return dict(choice)
    raise UserError(f"the reply has {len(choices)} choices, none with index {index}")


def _holder(reply: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """The object that has the field: with its neighbours (type, start) it says what the rows cover."""
    choice = _choice(reply, index)
    places = [(choice, name) for name in CHOICE_PLACES] + [(reply, name) for name in RESPONSE_PLACES if index == 0]
    for owner, name in places:
        held = owner.get(name) if name else owner
        if isinstance(held, Mapping) and FIELD in held:
            return held
    raise UserError(
        f"the reply has no {FIELD}: start the server with --enable-return-routed-experts and send "
        '"return_routed_experts": true; if both are so, something between drops the field. '
        f"Keys: {sorted(reply)}, of the choice: {sorted(choice)}"
    )


def _sequence_length(reply: Mapping[str, Any], choice: Mapping[str, Any]) -> int | None:
    """P + C as the reply counts them; None where it does not (usage adds all choices together)."""
    for owner in (choice.get("meta_info"), reply.get("meta_info")):
        if isinstance(owner, Mapping) and {"prompt_tokens", "completion_tokens"} <= owner.keys():
            return operator.index(owner["prompt_tokens"]) + operator.index(owner["completion_tokens"])
    usage = reply.get("usage")
    if isinstance(usage, Mapping) and len(reply.get("choices") or ()) == 1:
        return operator.index(usage["prompt_tokens"]) + operator.index(usage["completion_tokens"])
    return None


def _aborted(reply: Mapping[str, Any], choice: Mapping[str, Any]) -> bool:
    reasons = [choice.get("finish_reason"), (reply.get("meta_info") or {}).get("finish_reason")]
    return any((r.get("type") if isinstance(r, Mapping) else r) == "abort" for r in reasons)


def _empty(shape: RouteShape, start: int) -> Routes:
    none_TLK = np.empty((0, len(shape.layer_ids), shape.top_k), np.uint8)
    return Routes(none_TLK, shape.layer_ids, shape.num_experts, start, layer_top_k=shape.layer_top_k)


def from_sglang(
    reply: Mapping[str, Any],
    shape: RouteShape,
    *,
    index: int = 0,
    start: int = 0,
    num_tokens: int | None = None,
    layers: Literal["all", "moe"] = "all",
    shared_columns: int = 0,
) -> Routes:
    """Routes of choice `index` of an SGLang reply: `/generate`, or an OpenAI endpoint in any version's placement.

    start       the routed_experts_start_len that was sent; what the reply itself says wins, and must not contradict it
    num_tokens  P + C when the reply does not count them; with it the number of rows is checked
    An aborted request without rows gives empty routes. Packed routes are read too: they say all of it themselves.
    Raises UserError when the field is absent.
    """
    with malformed("the reply"):
        choice, holder = _choice(reply, index), _holder(reply, index)
        payload, said = holder[FIELD], holder.get("routed_experts_start_len")
        said = said if said is None else operator.index(said)
        aborted = _aborted(reply, choice)
        length = num_tokens if num_tokens is not None else _sequence_length(reply, choice)
    if said is not None and start not in (0, said):
        raise UserError(f"start {start} was asked for, the reply says that its rows start at {said}")
    start = start if said is None else said
    if not payload:
        if payload is None and not aborted:
            raise UserError(f"{FIELD} is null although the request was not aborted")
        return _empty(shape, start)
    if isinstance(payload, Mapping):  # this package's server, asked for routed_experts_format "packed"
        packed = decode_packed(payload)
        if not shape.fits(packed):
            raise UserError(f"the reply has {packed!r}, not routes of {shape}")
        if start not in (0, packed.start):
            raise UserError(f"start {start} was asked for, the packed rows start at {packed.start}")
        return packed
    dtype = holder.get("routed_experts_dtype", "int32")
    return decode(
        payload,
        "sglang",
        shape,
        start=start,
        num_tokens=length,
        layers=layers,
        dtype=dtype,
        shared_columns=shared_columns,
    )


def from_vllm(
    reply: Mapping[str, Any],
    shape: RouteShape,
    *,
    layers: Literal["all", "moe"],
    index: int = 0,
    start: int = 0,
    num_tokens: int | None = None,
) -> Routes:
    """Routes of choice `index` of a vLLM reply: base64 .npy in the choice, or the older split of prompt and output.

    layers  what the layer axis is; it changed between versions and can not be told from a payload of a dense-free model
    start   the routed_experts_prompt_start that was sent
    The split form marks cached prompt positions -1; they come out as missing rows.
    Raises UserError when the field is absent or null without an abort.
    """
    with malformed("the reply"):
        choice = _choice(reply, index)
        payload, prompt = choice.get(FIELD), reply.get("prompt_routed_experts")
        aborted = _aborted(reply, choice)
        length = num_tokens if num_tokens is not None else _sequence_length(reply, choice)
    if FIELD not in choice:
        raise UserError(f"the choice has no {FIELD}: start vLLM with --enable-return-routed-experts")
    if payload is None:
        if not aborted:
            raise UserError(f"{FIELD} is null although the request was not aborted (preempted?)")
        return _empty(shape, start)
    if isinstance(payload, str):
        return decode(payload, "vllm_0.22", shape, start=start, num_tokens=length, layers=layers)
    if prompt is None:
        raise UserError("output rows as nested lists come with prompt_routed_experts in the response; it is absent")
    head = decode(prompt, "vllm_0.21_http", shape, layers=layers, start=start)
    tail = decode(payload, "vllm_0.21_http", shape, layers=layers, start=head.stop)
    joined = concat([head, tail]) if start == 0 else head.append(tail)
    if length is not None and joined.stop != length - 1:
        raise UserError(f"prompt and output rows end at position {joined.stop}, expected {length - 1}")
    return joined
