"""/generate: shapes, errors, batches, streams, routes in each wire form, aborts."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json

import msgpack
import numpy as np
import pytest
from server_fakes import fixed_script, info, route_rows
from server_http import GREEDY, TOKENIZER, events, serving, sglang_routes, wire_rows

from tracklayer.errors import UserError
from tracklayer.routes.codec import decode_packed
from tracklayer.types import FinishReason


async def test_reply_has_the_contracts_keys_and_lengths():
    async with serving() as (client, _, _):
        body = {"input_ids": [1, 2, 3], "sampling_params": GREEDY, "return_logprob": True, "some_new_key": 1}
        reply = await client.post("/generate", json=body)
    assert reply.status_code == 200
    answer = reply.json()
    meta = answer["meta_info"]
    assert set(answer) == {"text", "output_ids", "meta_info"}
    assert meta["completion_tokens"] == len(answer["output_ids"]) == len(meta["output_token_logprobs"]) == 6
    assert [t[1] for t in meta["output_token_logprobs"]] == answer["output_ids"]
    assert meta["input_token_logprobs"] == [] and meta["prompt_tokens"] == 3 and len(meta["id"]) == 32
    assert meta["finish_reason"] == {"type": "length", "length": 6} and meta["e2e_latency"] > 0
    assert meta["weight_version"] == "default" and meta["weight_versions"][-1]["end"] == 6
    assert "routed_experts" not in meta and "output_top_logprobs" not in meta


async def test_what_rl_clients_send_is_taken_as_it_is():
    slime = {
        "input_ids": [5, 6], "return_logprob": True, "return_routed_experts": True, "image_data": None,
        "lora_path": None, "sampling_params": {
            "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 4, "stop": None, "stop_token_ids": None,
            "skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False,
        },
    }  # fmt: skip
    bench = {
        "text": "hi", "sampling_params": {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}, "stream": True,
        "lora_path": None, "return_logprob": False, "return_routed_experts": False, "logprob_start_len": -1,
    }  # fmt: skip
    async with serving() as (client, _, _):
        answer = (await client.post("/generate", json=slime)).json()
        tokens = [5, 6, *answer["output_ids"]]
        np.testing.assert_array_equal(sglang_routes(answer["meta_info"]["routed_experts"]), wire_rows(tokens[:-1]))
        chunks = events((await client.put("/generate", json=bench)).text)
        # The first chunk may hold a part of a character, and then no text.
        assert chunks[-1]["text"] and chunks[-1]["meta_info"]["completion_tokens"] == 4
        areal = {**slime, "stream": False, "image_data": [], "max_new_tokens": 100}
        assert (await client.post("/generate", json=areal)).status_code == 200


async def test_streams_are_cumulative_with_every_key_in_each_chunk():
    async with serving(engine={"step_s": 0.001}) as (client, _, _):
        body = {"text": "a", "sampling_params": GREEDY, "stream": True, "return_routed_experts": True,
                "return_logprob": True}  # fmt: skip
        reply = await client.post("/generate", json=body)
        assert reply.headers["content-type"].startswith("text/event-stream")
        chunks = events(reply.text)
    for before, after in itertools.pairwise(chunks):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
    for chunk in chunks:
        meta, last = chunk["meta_info"], chunk is chunks[-1]
        assert {"id", "prompt_tokens", "completion_tokens", "cached_tokens"} <= set(meta)
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] == len(chunk["output_ids"])
        assert (meta["finish_reason"] is not None) == last
        assert ("routed_experts" in meta) == ("e2e_latency" in meta) == ("weight_versions" in meta) == last


async def test_incremental_streams_send_deltas():
    async with serving(engine={"step_s": 0.001}, incremental_streaming_output=True) as (client, _, _):
        body = {"text": "a", "sampling_params": GREEDY}
        whole = (await client.post("/generate", json=body)).json()
        chunks = events((await client.post("/generate", json={**body, "stream": True})).text)
    assert "".join(c["text"] for c in chunks) == whole["text"]
    assert [i for c in chunks for i in c["output_ids"]] == whole["output_ids"] and len(chunks) > 1


async def test_batches_are_lists_and_streamed_ones_carry_an_index():
    async with serving() as (client, _, _):
        one = (await client.post("/generate", json={"text": ["a"], "sampling_params": GREEDY})).json()
        assert isinstance(one, list) and len(one) == 1
        body = {"input_ids": [[1], [2]], "rid": ["a", "b"], "sampling_params": [GREEDY, {"max_new_tokens": 2}]}
        two = (await client.post("/generate", json=body)).json()
        assert [a["meta_info"]["id"] for a in two] == ["a", "b"]
        assert [a["meta_info"]["completion_tokens"] for a in two] == [6, 2]
        body = {"input_ids": [1], "sampling_params": {"n": 3, "max_new_tokens": 4}, "stream": True}
        chunks = events((await client.post("/generate", json=body)).text)
    assert {c["index"] for c in chunks} == {0, 1, 2}
    assert sum(c["meta_info"]["finish_reason"] is not None for c in chunks) == 3


async def test_only_those_who_ask_get_routes_and_all_who_ask_do():
    async with serving() as (client, _, _):

        def ask(i):
            body = {"input_ids": [i, 3], "sampling_params": GREEDY, "return_routed_experts": i % 2 == 0}
            return client.post("/generate", json=body)

        answers = [r.json() for r in await asyncio.gather(*map(ask, range(8)))]
        batch = {"input_ids": [[1], [2], [3]], "sampling_params": GREEDY, "return_routed_experts": True}
        assert all("routed_experts" in a["meta_info"] for a in (await client.post("/generate", json=batch)).json())
    for i, answer in enumerate(answers):
        assert ("routed_experts" in answer["meta_info"]) == (i % 2 == 0)


@pytest.mark.parametrize("start", [0, 2, 4])
async def test_routes_start_len_trims_the_front(start):
    async with serving() as (client, _, _):
        body = {"input_ids": [9, 8, 7, 6], "sampling_params": GREEDY, "return_routed_experts": True,
                "routed_experts_start_len": start}  # fmt: skip
        answer = (await client.post("/generate", json=body)).json()
    fed = [9, 8, 7, 6, *answer["output_ids"][:-1]]
    np.testing.assert_array_equal(sglang_routes(answer["meta_info"]["routed_experts"]), wire_rows(fed, start))
    assert answer["meta_info"].get("routed_experts_start_len", 0) == start


async def test_each_route_format_in_json_and_msgpack_holds_the_same_rows():
    async with serving() as (client, _, _):
        for binary in (False, True):
            headers = {"Accept": "application/x-msgpack"} if binary else {}
            found = {}
            for form in (None, "int32", "packed", "npy"):
                body = {"input_ids": [9, 8], "sampling_params": GREEDY, "return_routed_experts": True,
                        "routed_experts_format": form}  # fmt: skip
                reply = await client.post("/generate", json=body, headers=headers)
                answer = msgpack.unpackb(reply.content) if binary else reply.json()
                found[form] = answer["meta_info"]["routed_experts"]
            fed = [9, 8, *answer["output_ids"][:-1]]
            assert found[None] == found["int32"]
            flat = found["int32"] if binary else base64.b64decode(found["int32"])
            np.testing.assert_array_equal(np.frombuffer(flat, "<i4").reshape(-1, 4, 2), wire_rows(fed))
            blob = found["npy"] if binary else base64.b64decode(found["npy"])
            array = np.load(io.BytesIO(blob))
            assert array.dtype == np.uint8
            np.testing.assert_array_equal(array, wire_rows(fed))
            np.testing.assert_array_equal(decode_packed(found["packed"]).experts_TLK, route_rows(fed))
            assert isinstance(found["packed"]["data"], bytes) == binary


ERRORS = [
    ({"text": 5}, 400, "text"),
    ({"text": "a", "stream": "yes"}, 400, "stream"),
    ({"text": "a", "sampling_params": {"temperatur": 1}}, 400, "unknown field `temperatur`, expected one of"),
    ({"text": "a", "sampling_params": {"temperature": "hot"}}, 400, "wrong type"),
    ({"text": "a", "sampling_params": {"temperature": -1}}, 400, "temperature"),
    ({"text": "a", "sampling_params": {"n": 10**9}}, 400, "max-samples"),
    ({"text": "a", "input_ids": [1]}, 400, "Either text"),
    ({"input_ids": [1, 400]}, 400, "token id 400"),
    ({"input_ids": [1] * 600}, 400, "longer than the model's context length"),
    ({"text": "a", "image_data": "x.png"}, 400, "image_data"),
    ({"text": "a", "return_hidden_states": True}, 400, "return_hidden_states"),
    ({"text": "a", "routed_dp_rank": 1}, 400, "routed_dp_rank"),
    ({"text": "a", "routed_experts_format": "csv"}, 400, "routed_experts_format"),
    (
        {"input_ids": [1], "return_routed_experts": True, "routed_experts_start_len": 2},
        400,
        "is higher than the number",
    ),
    ([1, 2], 400, "object"),
]


@pytest.mark.parametrize(("body", "status", "message"), ERRORS, ids=lambda v: str(v)[:40])
async def test_errors_name_the_value(body, status, message):
    async with serving() as (client, fake, _):
        for stream in (False, True):
            sent = {**body, "stream": body.get("stream", stream)} if isinstance(body, dict) else body
            reply = await client.post("/generate", json=sent)
            assert reply.status_code == status and message in reply.text
        assert not fake.seen


async def test_the_three_shapes_of_a_400():
    async with serving() as (client, _, _):
        schema = (await client.post("/generate", content=b"{")).json()
        assert schema.pop("message").startswith("Invalid JSON")
        assert schema == {"object": "error", "type": "Bad Request", "param": None, "code": 400}
        field = (await client.post("/generate", json={"text": "a", "sampling_params": {"x": 1}})).json()
        assert isinstance(field["error"], str)
        value = (await client.post("/generate", json={"text": ""})).json()
        assert list(value) == ["error"] and list(value["error"]) == ["message"]


async def test_recording_off_is_a_400_that_names_the_flag():
    async with serving(facts=info(400, recording=False)) as (client, _, _):
        reply = await client.post("/generate", json={"text": "a", "return_routed_experts": True})
        assert reply.status_code == 400 and "--enable-return-routed-experts" in reply.text


async def test_overload_is_503_with_retry_after():
    async with serving() as (client, fake, _):
        fake.refuse[""] = FinishReason("abort", message="the queue is full", status=503)
        reply = await client.post("/generate", json={"text": "a"})
        assert reply.status_code == 503 and reply.headers["retry-after"] and reply.json()["code"] == 503
        chunks = events((await client.post("/generate", json={"text": "a", "stream": True})).text)
        assert chunks[-1]["meta_info"]["finish_reason"]["status_code"] == 503


async def test_limits_of_body_and_batch():
    async with serving(max_body_bytes=1000, max_batch_prompts=2) as (client, _, _):
        assert (await client.post("/generate", json={"text": "a" * 2000})).status_code == 413

        async def pieces():
            for _ in range(20):
                yield b" " * 100

        assert (await client.post("/generate", content=pieces())).status_code == 413
        reply = await client.post("/generate", json={"input_ids": [[1], [1], [1]]})
        assert reply.status_code == 400 and "at most 2" in reply.text


async def test_abort_answers_200_with_what_there_is():
    async with serving(engine={"step_s": 0.003}) as (client, _, _):
        long = {"max_new_tokens": 400, "temperature": 0}
        body = {"input_ids": [3, 4], "sampling_params": long, "rid": "job-1", "return_logprob": True,
                "return_routed_experts": True}  # fmt: skip
        task = asyncio.create_task(client.post("/generate", json=body))
        streamed = asyncio.create_task(client.post("/generate", json={**body, "rid": "job-2", "stream": True}))
        await asyncio.sleep(0.1)
        assert (await client.post("/abort_request", json={"rid": "unknown"})).status_code == 200
        reply = await client.post("/abort_request", json={"rid": "job-", "prefix": True})
        assert (reply.status_code, reply.content) == (200, b"")
        answer = (await asyncio.wait_for(task, 5)).json()
        chunks = events((await asyncio.wait_for(streamed, 5)).text)
    count = answer["meta_info"]["completion_tokens"]
    assert answer["meta_info"]["finish_reason"] == {
        "type": "abort", "message": "Aborted", "status_code": None, "err_type": None,
    }  # fmt: skip
    assert 0 < count < 400 and len(sglang_routes(answer["meta_info"]["routed_experts"])) == 2 + count - 1
    assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "abort"


async def test_abort_before_the_first_token_still_has_every_key():
    async with serving() as (client, _, _):
        await client.post("/pause_generation", json={"mode": "in_place"})
        body = {"input_ids": [3], "rid": "w", "return_logprob": True, "return_routed_experts": True,
                "sampling_params": GREEDY}  # fmt: skip
        task = asyncio.create_task(client.post("/generate", json=body))
        await asyncio.sleep(0.05)
        await client.post("/abort_request", json={"abort_all": True})
        answer = (await asyncio.wait_for(task, 5)).json()
    meta = answer["meta_info"]
    assert meta["finish_reason"]["message"] == "Abort in waiting queue" and answer["output_ids"] == []
    assert meta["completion_tokens"] == 0 and meta["output_token_logprobs"] == [] and meta["input_token_logprobs"] == []
    assert meta["routed_experts"] == "" and {"id", "weight_version", "e2e_latency", "cached_tokens"} <= set(meta)


async def test_no_nan_reaches_the_wire(monkeypatch):
    async with serving() as (client, fake, _):
        whole = fake._logprobs

        def spoiled(request, tokens, position):
            records = whole(request, tokens, position)
            records.logprobs[:] = [np.nan, -np.inf, np.inf, *[-1.0] * len(tokens)][: len(tokens)]
            return records

        monkeypatch.setattr(fake, "_logprobs", spoiled)
        body = {"input_ids": [1], "sampling_params": GREEDY, "return_logprob": True}
        reply = await client.post("/generate", json=body)
    answer = json.loads(reply.text, parse_constant=lambda name: pytest.fail(name))
    assert answer["meta_info"]["output_token_logprobs"][0][0] is None


async def test_skip_tokenizer_init_has_ids_and_no_text():
    async with serving(tokenizer=None) as (client, _, _):
        answer = (await client.post("/generate", json={"input_ids": [1], "sampling_params": GREEDY})).json()
        assert "text" not in answer and len(answer["output_ids"]) == 6


async def test_stop_regex_and_matched_stop_in_the_reply():
    async with serving(fixed_script(TOKENIZER.encode("Paris is 42."))) as (client, _, _):
        for params, matched in (({"stop": "is"}, "is"), ({"stop_regex": [r"\d+"]}, r"\d+")):
            body = {"text": "x", "sampling_params": {"max_new_tokens": 30, **params}}
            assert (await client.post("/generate", json=body)).json()["meta_info"]["finish_reason"] == {
                "type": "stop", "matched": matched,
            }  # fmt: skip


async def test_routes_by_default_for_gateways_that_drop_the_field():
    async with serving(return_routed_experts_by_default=True) as (client, _, _):
        for path, body in (("/generate", {"text": "a"}), ("/v1/completions", {"prompt": "a", "max_tokens": 2})):
            for asked in (None, True, False):
                reply = await client.post(path, json={**body, "return_routed_experts": asked})
                assert ("routed_experts" in reply.text) == (asked is not False)
    with pytest.raises(UserError, match="--enable-return-routed-experts"):
        async with serving(facts=info(400, recording=False), return_routed_experts_by_default=True):
            pass


async def test_an_event_is_one_line_for_every_reader():
    """Some clients split streams as Python splits lines, also at U+0085, U+2028 and U+2029."""
    text = "a\u2028b\x85c\u2029 \u00e9 \U0001f642 \x0b\x1c"
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    async with serving(fixed_script(ids)) as (client, _, _):
        body = {"text": "x", "stream": True, "sampling_params": {**GREEDY, "max_new_tokens": len(ids)}}
        async with client.stream("POST", "/generate", json=body) as reply:
            lines = [line async for line in reply.aiter_lines() if line]
    assert json.loads(lines[-2][6:])["text"] == text and lines[-1] == "data: [DONE]"


async def test_text_with_line_ends_of_unicode_stays_on_one_line_for_clients_that_split_there():
    text = "a\x85b\u2028c\u2029d"
    ids = TOKENIZER.encode(text)
    body = {"text": "x", "sampling_params": {"max_new_tokens": len(ids)}, "stream": True}
    async with (
        serving(fixed_script(ids)) as (client, _, _),
        client.stream("POST", "/generate", json=body) as reply,
    ):
        lines = [line async for line in reply.aiter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert json.loads(lines[-2][6:])["text"] == text
