"""Events written from kept pieces are those of the general encoder, and only streams that fit take that way."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_http import GREEDY, events, serving

from tracklayer.engine.intake import GenerateCall
from tracklayer.engine.reply import reply
from tracklayer.server.io import event, quoted, to_json
from tracklayer.server.native_events import PlainEvents
from tracklayer.types import EngineRequest, SamplingParams

awkward = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from('\x85\u2028\u2029"\\\n\x00\x7f\U0001f642'))


def sample_of(rid: str = "r", **asked):
    request = EngineRequest(rid=rid, input_ids=[1, 2, 3], sampling=SamplingParams(), **asked)
    return SimpleNamespace(
        rid=rid, index=2, request=request, text="", output_ids=[], finish=None, weight_spans=[], prompt_tokens=3,
        cached_tokens=0, num_retractions=0, ended_at=None, arrived=0.0,
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    awkward, st.booleans(), awkward,
    st.lists(st.tuples(awkward | st.none(), st.lists(st.integers(0, 1 << 20), max_size=4), st.integers(0, 9))),
)  # fmt: skip
def test_every_event_is_the_general_one(rid, indexed, version, steps):
    sample, plain = sample_of(rid), None
    for text, ids, number in steps:
        sample.text = text
        sample.output_ids += ids
        sample.cached_tokens, sample.num_retractions = number, 9 - number
        sample.weight_spans = [("old", 0, 1), (version, 1, 2)] if number % 2 else []
        plain = plain or PlainEvents(sample, indexed=indexed)
        general = reply(sample, version) | ({"index": 2} if indexed else {})
        assert plain.event(sample, version) == event(general)


@given(awkward)
def test_a_quoted_string_is_its_json(text):
    assert quoted(text).encode() == to_json(text)
    assert json.loads(quoted(text)) == text and len(quoted(text).splitlines()) == 1


@pytest.mark.parametrize(
    "asked",
    [{"return_logprob": True}, {"top_logprobs_num": 2}, {"token_ids_logprob": (1,)}],
    ids=lambda a: next(iter(a)),
)
def test_what_has_more_does_not_fit(asked):
    assert PlainEvents.fits(GenerateCall(), sample_of())
    assert not PlainEvents.fits(GenerateCall(), sample_of(**asked))
    assert not PlainEvents.fits(GenerateCall(return_prompt_token_ids=True), sample_of())


async def test_each_sample_of_a_call_grows_by_itself():
    body = {"input_ids": [[1, 2, 3], [4, 5]], "sampling_params": {**GREEDY, "n": 2}, "stream": True}
    async with serving() as (client, _, _):
        chunks = events((await client.post("/generate", json=body)).text)
    seen: dict[int, list[int]] = {}
    for chunk in chunks:
        before, now = seen.get(chunk["index"], []), chunk["output_ids"]
        assert now[: len(before)] == before and chunk["meta_info"]["completion_tokens"] == len(now)
        seen[chunk["index"]] = now
    assert sorted(seen) == [0, 1, 2, 3] and all(len(ids) == 6 for ids in seen.values())
