"""Structured output, tools and reasoning through the endpoints: parsers on scripted replies, grammars on a model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re

import httpx
import pytest
from server_fakes import fixed_script
from server_http import TOKENIZER, events, listening, serving
from test_reply_parsers import BERLIN, PARIS, TWO_CALLS
from test_reply_parsers import TOOLS as CLIENT_TOOLS
from tiny import save

from tracklayer.config import EngineConfig
from tracklayer.engine.thread import EngineThread
from tracklayer.server.app import create_app
from tracklayer.server.config import ServerConfig
from tracklayer.server.service import build_service

CHAT = [{"role": "user", "content": "Weather?"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
        "additionalProperties": False}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}},
         {"type": "function", "function": {"name": "now"}}]  # fmt: skip
REPLY = (
    '<think>\nI should look.\n</think>\n\nA moment.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}'
    '\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
PATH = "/v1/chat/completions"
USAGE = {"stream_options": {"include_usage": True}}


def script(text):
    return fixed_script([*TOKENIZER.encode(text), TOKENIZER.special_tokens["<|im_end|>"]])


def joined(chunks):
    """One message made of a stream's deltas."""
    message, end = {"content": "", "reasoning_content": "", "tool_calls": []}, None
    for choice in (c["choices"][0] for c in chunks):
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls") or ():
            place = call.pop("index")
            if "id" in call:
                assert place == len(message["tool_calls"])
                message["tool_calls"].append(call)
            else:
                assert place == len(message["tool_calls"]) - 1 and set(call) == {"function"}
                message["tool_calls"][place]["function"]["arguments"] += call["function"]["arguments"]
        end = end or choice["finish_reason"]
    return message, end


def plain(message):
    calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message["tool_calls"] or ()]
    return message["content"], message["reasoning_content"] or "", calls


WAYS = [
    ({"tools": TOOLS}, ("A moment.", "I should look.", [("weather", {"city": "Rome"}), ("now", {})]), "tool_calls"),
    ({"tools": TOOLS, "tool_choice": "none"}, (REPLY.split("\n\n")[1], "I should look.", []), "stop"),
    ({}, (REPLY.split("\n\n")[1], "I should look.", []), "stop"),
    ({"separate_reasoning": False}, (REPLY, "", []), "stop"),
    ({"tools": TOOLS, "stream_reasoning": False},
     ("A moment.", "I should look.", [("weather", {"city": "Rome"}), ("now", {})]), "tool_calls"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "expected", "reason"), WAYS)
@pytest.mark.parametrize("interval", [1, 7])
async def test_reasoning_and_calls_whole_and_streamed(more, expected, reason, interval):
    flags = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "stream_interval": interval}
    async with serving(script(REPLY), **flags) as (client, _, _):
        body = {"messages": CHAT, "logprobs": True, **more}
        whole = (await client.post(PATH, json={**body, "return_meta_info": True})).json()
        choice = whole["choices"][0]
        chunks = events((await client.post(PATH, json={**body, "stream": True, **USAGE})).text)
    thought, usage = len(TOKENIZER.encode("I should look.")), chunks.pop()["usage"]
    counted = 0 if more.get("separate_reasoning") is False else usage["reasoning_tokens"]
    assert usage["reasoning_tokens"] == whole["usage"]["reasoning_tokens"] == counted
    assert choice["meta_info"]["reasoning_tokens"] == counted
    assert counted == 0 or thought <= counted < len(TOKENIZER.encode(REPLY.partition("A moment")[0])) + 1
    message, end = joined(chunks)
    assert plain(choice["message"]) == plain(message) == expected
    assert choice["finish_reason"] == end == reason
    streamed = [entry for c in chunks for entry in (c["choices"][0]["logprobs"] or {}).get("content", ())]
    assert streamed == choice["logprobs"]["content"]
    if more.get("stream_reasoning") is False:
        assert sum(bool(c["choices"][0]["delta"].get("reasoning_content")) for c in chunks) == 1


async def test_a_reply_that_a_grammar_binds_is_no_reasoning():
    """Also where replies begin inside the reasoning."""
    async with serving(script('{"a": 1}'), reasoning_parser="deepseek-r1") as (client, _, _):
        body = {"messages": CHAT, "response_format": {"type": "json_object"}}
        bound = (await client.post(PATH, json=body)).json()["choices"][0]["message"]
        free = (await client.post(PATH, json={"messages": CHAT})).json()["choices"][0]["message"]
    assert plain(bound) == ('{"a": 1}', "", []) and plain(free) == ("", '{"a": 1}', [])


async def test_markers_that_are_special_tokens_are_kept_for_the_parser():
    async with serving(script("x"), tool_call_parser="kimi_k2") as (client, fake, _):
        for more in ({"tools": TOOLS}, {}, {"tools": TOOLS, "tool_choice": "none"}):
            await client.post(PATH, json={"messages": CHAT, **more})
    assert [r.sampling.skip_special_tokens for r in fake.seen] == [False, True, True]


BAD = [
    ({"tool_choice": "required"}, "tools"),
    ({"tool_choice": {"function": {"name": "rain"}}, "tools": TOOLS}, "rain"),
    ({"tool_choice": {"function": 3}, "tools": TOOLS}, "tool_choice"),
    ({"tool_choice": "always", "tools": TOOLS}, "always"),
    ({"tool_choice": "required", "tools": [{"type": "function"}]}, "function.name"),
    ({"tool_choice": "required", "tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "schema"),
]


@pytest.mark.parametrize(("more", "word"), BAD)
async def test_bad_choices_are_a_400(more, word):
    async with serving(script("x")) as (client, _, _):
        reply = await client.post(PATH, json={"messages": CHAT, **more})
    assert reply.status_code == 400 and word in reply.json()["message"], reply.text


@contextlib.asynccontextmanager
async def real(path):
    options = {"max_total_tokens": 4000, "random_seed": 0, "device": "cpu", "skip_route_selftest": True}
    config = EngineConfig(model_path=str(path), enable_return_routed_experts=True, **options)
    engine = EngineThread(config)
    service = build_service(engine, TOKENIZER, ServerConfig(), config)
    service.frontend.bind(asyncio.get_running_loop())
    transport = httpx.ASGITransport(create_app(service.config, service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
        yield client
        assert (await client.post("/flush_cache?timeout=10")).status_code == 200
    await asyncio.to_thread(engine.shutdown)
    service.frontend.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save("qwen3_moe", folder, 0, vocab_size=400, max_position_embeddings=1024)
    TOKENIZER._hf.save_pretrained(folder)
    return folder


async def test_a_random_model_writes_what_was_asked_for(folder):
    spaces = {str(i): -20.0 for i in range(400) if not TOKENIZER.token_text(i).strip()}
    common = {"messages": CHAT, "logit_bias": spaces, "max_tokens": 200, "seed": 3, "temperature": 1.0}

    async with real(folder) as client:

        async def ask(**more):
            reply = await client.post(PATH, json={**common, **more})
            assert reply.status_code == 200, reply.text
            return reply.json()["choices"]

        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY, "strict": True}}
        forced = {"type": "function", "function": {"name": "weather"}}
        tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "<done>"}}
        schema, either, named, done, object_ = await asyncio.gather(
            ask(response_format=form, n=3),
            ask(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, return_routed_experts=True),
            ask(tools=TOOLS, tool_choice=forced),
            ask(response_format=tag),
            ask(response_format={"type": "json_object"}, max_tokens=60),
        )
        assert all(json.loads(c["message"]["content"])["city"] in ("Paris", "Rome") for c in schema)
        assert len(either[0]["message"]["tool_calls"]) == 1 and either[0]["finish_reason"] in ("tool_calls", "length")
        (call,) = named[0]["message"]["tool_calls"]
        assert call["function"]["name"] == "weather" and named[0]["message"]["content"] == ""
        assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")
        assert done[0]["message"]["content"] == "<done>" and object_[0]["message"]["content"].lstrip()[0] == "{"

        body = {"text": "a", "sampling_params": {"regex": "[0-9]{4}-[a-z]{2}", "temperature": 1.0}, "stream": True}
        chunks = events((await client.post("/generate", json=body)).text)
        assert re.fullmatch("[0-9]{4}-[a-z]{2}", chunks[-1]["text"]), chunks[-1]["text"]
        assert all(chunks[-1]["text"].startswith(c["text"]) for c in chunks)
        bad = await client.post("/generate", json={"text": "a", "sampling_params": {"regex": "(a"}})
        assert bad.status_code == 400 and "regex" in bad.json()["error"]["message"]
        bad = await client.post("/v1/completions", json={"prompt": "a", "ebnf": "root ::= foo"})
        assert bad.status_code == 400 and "foo" in bad.json()["message"]


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "deepseekv4"])
async def test_the_openai_client_puts_streamed_calls_together(parser):
    """Its own accumulation of deltas, from a real socket: the calls of the whole reply."""
    openai = pytest.importorskip("openai")
    reply = f"A moment.\n{TWO_CALLS[parser]}"
    async with (
        listening(script(reply), tool_call_parser=parser, engine={"step_s": 0.003}) as (url, _, _, _),
        httpx.AsyncClient() as http,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", http_client=http, max_retries=0) as client,
    ):
        ask = {"model": "m", "messages": CHAT, "tools": CLIENT_TOOLS}
        whole = (await client.chat.completions.create(**ask)).choices[0]
        names, deltas = [], 0
        async with client.chat.completions.stream(**ask) as stream:
            async for happened in stream:
                if happened.type == "tool_calls.function.arguments.delta":
                    names += [happened.name] if happened.name not in names else []
                    deltas += 1
            streamed = (await stream.get_final_completion()).choices[0]
    assert streamed.finish_reason == whole.finish_reason == "tool_calls"
    assert streamed.message.content == whole.message.content == "A moment."
    calls = [
        [(c.function.name, json.loads(c.function.arguments)) for c in m.message.tool_calls] for m in (whole, streamed)
    ]
    assert calls[0] == calls[1] == [PARIS, BERLIN] and names == ["weather"] and deltas > 4
