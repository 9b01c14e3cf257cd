"""/v1/completions, /v1/chat/completions and vLLM's /inference/v1/generate, also through the openai client."""

from __future__ import annotations

import base64
import io

import httpx
import numpy as np
import openai
import pytest
from server_fakes import fixed_script, info
from server_http import TOKENIZER, events, listening, serving, sglang_routes, wire_rows

PARIS = fixed_script([*TOKENIZER.encode("Paris. It is"), TOKENIZER.special_tokens["<|im_end|>"]])
CHAT = [{"role": "user", "content": "Capital of France?"}]


async def test_completion_shape_usage_and_routes():
    async with serving(PARIS, enable_cache_report=True) as (client, _, _):
        body = {"model": "any", "prompt": ["a", "b c"], "n": 2, "max_tokens": 4, "return_routed_experts": True,
                "return_token_ids": True, "user": "me", "best_of": 1}  # fmt: skip
        answer = (await client.post("/v1/completions", json=body)).json()
    assert answer["object"] == "text_completion" and answer["model"] == "any"
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    prompt = sum(len(TOKENIZER.encode(p)) for p in ("a", "b c"))
    assert answer["usage"]["prompt_tokens"] == prompt and answer["usage"]["completion_tokens"] == 16
    assert (
        answer["usage"]["total_tokens"] == prompt + 16 and "cached_tokens" in answer["usage"]["prompt_tokens_details"]
    )
    assert answer["metadata"]["weight_version"] == "default"
    first = answer["choices"][0]
    assert first["finish_reason"] == "length" and first["text"] == TOKENIZER.decode(first["token_ids"])
    fed = [*first["prompt_token_ids"], *first["token_ids"][:-1]]
    np.testing.assert_array_equal(sglang_routes(answer["sglext"]["routed_experts"]), wire_rows(fed))


async def test_completion_echo_with_logprobs_serves_likelihood_scoring():
    """What lm-eval sends: ids, echo, logprobs, one token; the prompt's log-probabilities but the first."""
    async with serving(PARIS) as (client, _, _):
        body = {"prompt": [[5, 6, 7]], "echo": True, "logprobs": 2, "max_tokens": 1, "temperature": 0, "seed": 1234}
        choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert len(logprobs["token_logprobs"]) == len(logprobs["tokens"]) == len(logprobs["top_logprobs"]) == 4
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(p < 0 for p in logprobs["token_logprobs"][1:]) and len(logprobs["top_logprobs"][1]) == 2
    assert logprobs["text_offset"] == [-1] * 4
    assert choice["text"] == TOKENIZER.decode([5, 6, 7]) + TOKENIZER.decode(TOKENIZER.encode("Paris")[:1])


async def test_completion_stream_deltas_usage_only_on_request():
    async with serving(PARIS, engine={"step_s": 0.001}) as (client, _, _):
        body = {"prompt": "x", "max_tokens": 40, "stream": True, "logprobs": 1}
        whole = (await client.post("/v1/completions", json={**body, "stream": False})).json()["choices"][0]
        chunks = events((await client.post("/v1/completions", json=body)).text)
        assert all(c["choices"] for c in chunks), "usage only on request"
        assert "".join(c["choices"][0]["text"] for c in chunks) == whole["text"] == "Paris. It is"
        parts = [p for c in chunks for p in c["choices"][0]["logprobs"]["token_logprobs"]]
        assert parts == whole["logprobs"]["token_logprobs"]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert chunks[-1]["choices"][0]["matched_stop"] == TOKENIZER.special_tokens["<|im_end|>"]
        body |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        chunks = events((await client.post("/v1/completions", json={**body, "return_routed_experts": True})).text)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == len(parts)
    assert chunks[-2]["choices"] == [] and "routed_experts" in chunks[-2]["sglext"]
    assert all("usage" in c for c in chunks[:-2])


async def test_stop_strings_never_leak_into_a_stream():
    script = fixed_script(TOKENIZER.encode("Paris.\n\nUser: more"))
    async with serving(script, engine={"step_s": 0.001}) as (client, _, _):
        body = {"prompt": "x", "max_tokens": 60, "stream": True, "stop": ["\n\nUser:"]}
        chunks = events((await client.post("/v1/completions", json=body)).text)
    assert "".join(c["choices"][0]["text"] for c in chunks) == "Paris."


async def test_chat_shape_and_meta_info():
    async with serving(PARIS) as (client, fake, _):
        body = {"messages": CHAT, "logprobs": True, "top_logprobs": 2, "return_routed_experts": True,
                "return_meta_info": True, "return_token_ids": True, "return_prompt_token_ids": True}  # fmt: skip
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        assert fake.seen[0].input_ids == TOKENIZER.chat_ids(CHAT)
    choice = answer["choices"][0]
    assert answer["object"] == "chat.completion" and "sglext" not in answer
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"] == "Paris. It is"
    assert choice["finish_reason"] == "stop"
    items, meta = choice["logprobs"]["content"], choice["meta_info"]
    assert len(items) == meta["completion_tokens"] == len(meta["output_token_logprobs"])
    assert set(items[0]) == {"token", "bytes", "logprob", "top_logprobs"} and len(items[0]["top_logprobs"]) == 2
    assert bytes(items[0]["bytes"]).decode() == items[0]["token"]
    rows = wire_rows([*choice["prompt_token_ids"], *choice["response_token_ids"][:-1]])
    np.testing.assert_array_equal(sglang_routes(meta["routed_experts"]), rows)


async def test_session_servers_send_ids_and_get_meta_info():
    async with serving(PARIS) as (client, fake, _):
        body = {"input_ids": [7, 8, 9], "messages": [], "logprobs": True, "return_meta_info": True,
                "return_routed_experts": True, "routed_experts_start_len": 2, "no_stop_trim": False}  # fmt: skip
        choice = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
    meta = choice["meta_info"]
    assert fake.seen[0].input_ids == [7, 8, 9] and choice["message"]["content"] is not None
    assert meta["routed_experts_start_len"] == 2
    assert len(sglang_routes(meta["routed_experts"])) == 3 + meta["completion_tokens"] - 1 - 2


async def test_chat_stream_order():
    async with serving(PARIS, engine={"step_s": 0.001}) as (client, _, _):
        body = {"messages": CHAT, "stream": True, "n": 2, "stream_options": {"include_usage": True},
                "return_routed_experts": True}  # fmt: skip
        chunks = events((await client.post("/v1/chat/completions", json=body)).text)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["total_tokens"] > 0
    assert "routed_experts" in chunks[-2]["sglext"]
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks[:-2] if c["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"content": "", "reasoning_content": None, "role": "assistant"}
        assert "".join(c["delta"].get("content", "") for c in mine) == "Paris. It is"
        assert mine[-1]["delta"] == {} and mine[-1]["finish_reason"] == "stop"
        assert all(c["finish_reason"] is None for c in mine[:-1])


async def test_chat_defaults_come_from_the_checkpoint_and_length_is_open():
    async with serving(PARIS, defaults={"temperature": 0.6, "top_k": 20}) as (client, fake, _):
        await client.post("/v1/chat/completions", json={"messages": CHAT})
        await client.post("/v1/chat/completions", json={"messages": CHAT, "temperature": 0, "max_tokens": 3})
        await client.post("/v1/completions", json={"prompt": "a"})
    params = [r.sampling for r in fake.seen]
    assert [(p.temperature, p.top_k) for p in params] == [(0.6, 20), (0, 20), (1.0, -1)]
    assert params[0].max_new_tokens == 512 - len(fake.seen[0].input_ids) and params[1].max_new_tokens == 3
    assert params[2].max_new_tokens == 16


ERRORS = [
    ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ("/v1/completions", {"prompt": ""}, "empty"),
    ("/v1/completions", {"prompt": []}, "empty"),
    ("/v1/completions", {"prompt": "a", "logprobs": -1}, "logprobs"),
    ("/v1/completions", {"prompt": "a", "response_format": {"type": "yaml"}}, "yaml"),
    ("/v1/completions", {"prompt": "a", "response_format": {"type": "xml"}}, "xml"),
    ("/v1/completions", {"prompt": "a", "temperature": "hot"}, "temperature"),
    ("/v1/completions", {"prompt": "a", "suffix": "z"}, "suffix"),
    ("/v1/completions", {"prompt": "a", "n": 2, "best_of": 3}, "best_of 3"),
    ("/v1/chat/completions", {"messages": []}, "at least one message"),
    ("/v1/chat/completions", {"messages": CHAT, "top_logprobs": 21}, "top_logprobs"),
    ("/v1/chat/completions", {"messages": CHAT, "stream": True, "return_meta_info": True}, "return_meta_info"),
    ("/v1/chat/completions", {"messages": CHAT, "tool_choice": "required"}, "tool_choice"),
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 10**6}, "maximum context length"),
    ("/v1/chat/completions", {"messages": CHAT, "chat_template_kwargs": {"messages": 1}}, "template"),
    ("/v1/chat/completions", {"messages": CHAT, "chat_template_kwargs": {"chat_template": "x"}}, "not a variable"),
    ("/inference/v1/generate", {"token_ids": []}, "empty"),
    ("/inference/v1/generate", {"token_ids": [1], "stream": True}, "stream"),
    ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"bad_words": ["x"]}}, "bad_words"),
    ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"truncate_prompt_tokens": 1}}, "truncate_prompt"),
    ("/inference/v1/generate", {"token_ids": [1], "features": {"image": 1}}, "features"),
]


@pytest.mark.parametrize(("path", "body", "message"), ERRORS, ids=lambda v: str(v)[:50])
async def test_errors_are_flat_400s_also_for_streams(path, body, message):
    async with serving() as (client, _, _):
        for stream in (False, True) if path.startswith("/v1") else (False,):
            reply = await client.post(path, json={"stream": stream, **body})
            answer = reply.json()
            assert reply.status_code == answer["code"] == 400 and answer["object"] == "error"
            assert answer["type"] == "BadRequestError" and message in answer["message"]


async def test_bodies_must_be_json_by_name():
    async with serving() as (client, _, _):
        reply = await client.post("/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": "text/plain"})
        assert reply.status_code == 400 and "application/json" in reply.text


async def test_vllm_interface_returns_npy_routes_with_every_choice():
    async with serving(PARIS) as (client, fake, _):
        params = {"max_tokens": 4, "temperature": 0.5, "seed": 3, "logprobs": 1, "n": 2, "top_k": 0, "min_tokens": 1}
        body = {"token_ids": [1, 2, 3], "sampling_params": params, "model": "m", "request_id": "q"}
        answer = (await client.post("/inference/v1/generate", json=body)).json()
        assert fake.seen[0].seed == 3 and fake.seen[0].sampling.top_k == -1
    for choice in answer["choices"]:
        rows = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
        np.testing.assert_array_equal(rows, wire_rows([1, 2, 3, *choice["token_ids"][:-1]]))
        assert choice["finish_reason"] == "length"
        assert choice["logprobs"]["content"][0]["token"] == f"token_id:{choice['token_ids'][0]}"
    async with serving(PARIS, facts=info(400, recording=False)) as (client, _, _):
        answer = (await client.post("/inference/v1/generate", json={"token_ids": [1]})).json()
        assert answer["choices"][0]["routed_experts"] is None


async def test_the_openai_client_works_unchanged():
    async with (
        listening(PARIS, api_key="secret", served_model_name="tiny") as (url, _, _, _),
        httpx.AsyncClient() as http,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret", http_client=http, max_retries=0) as client,
    ):
        assert [m.id async for m in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).id == "tiny"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
        chat = await client.chat.completions.create(model="tiny", messages=CHAT, logprobs=True, top_logprobs=1)
        assert chat.choices[0].message.content == "Paris. It is" and chat.choices[0].finish_reason == "stop"
        stream = await client.chat.completions.create(model="tiny", messages=CHAT, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "Paris. It is"
        done = await client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=2, logprobs=1)
        assert len(done.choices) == 2 and done.usage.completion_tokens == 4
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.completions.create(model="tiny", prompt="a", temperature=-1)
        bad = client.with_options(api_key="wrong")
        with pytest.raises(openai.PermissionDeniedError):
            await bad.models.retrieve("tiny")


async def test_routes_that_nobody_asked_for_do_not_make_chunks_without_choices():
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "n": 2, "stream": True}
    text = {"prompt": ["a", "b"], "max_tokens": 3, "n": 2, "stream": True}
    async with serving(return_routed_experts_by_default=True) as (client, _, _):
        for path, body in (("/v1/chat/completions", chat), ("/v1/completions", text)):
            chunks = events((await client.post(path, json=body)).text)
            assert all(chunk["choices"] for chunk in chunks)
            (end,) = [chunk for chunk in chunks if "sglext" in chunk]
            assert end["choices"][0]["index"] == 0 and end["choices"][0]["finish_reason"] == "length"
            asked = events((await client.post(path, json={**body, "return_routed_experts": True})).text)
            assert [chunk["choices"] for chunk in asked if "sglext" in chunk] == [[]]
            no = events((await client.post(path, json={**body, "return_routed_experts": False})).text)
            assert not any("sglext" in chunk for chunk in no)
