"""The OpenAPI document tells the truth: every endpoint is in it, and real replies have the bodies that it declares."""

from __future__ import annotations

import json
import re

import pytest
from pydantic import TypeAdapter, ValidationError
from server_http import TOKENIZER, events, serving

from tracklayer.errors import UserError
from tracklayer.server import control, docs
from tracklayer.server.app import ROUTERS, create_app
from tracklayer.server.config import ServerConfig
from tracklayer.server.errors import ApiError, SchemaError, stream_error

DOCUMENT = create_app(ServerConfig()).openapi()
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}


def test_each_endpoint_is_described_with_what_it_answers():
    """Those that are not built are left out, and the page, which is no interface."""
    served = {route.path_format for module in ROUTERS for route in module.router.routes}
    served -= {*control.NOT_BUILT, "/"}
    assert set(DOCUMENT["paths"]) == served
    for path in served - set(docs.HEALTH) - set(docs.EMPTY):
        for method, operation in DOCUMENT["paths"][path].items():
            assert operation["responses"]["200"]["content"], (method, path)
            assert {"401", "403", "500", "503"} <= set(operation["responses"])
    names = [operation["operationId"] for path in DOCUMENT["paths"].values() for operation in path.values()]
    assert len(names) == len(set(names))


def test_tables_name_endpoints_that_there_are_and_references_lead_somewhere():
    for table in (docs.ANSWERS, docs.IN_TEXT, docs.STREAMED, docs.UNFOUND, docs.HEALTH, docs.EMPTY):
        assert set(table) <= set(DOCUMENT["paths"])
    parts = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(DOCUMENT)))
    assert parts and parts <= set(DOCUMENT["components"]["schemas"])
    assert '"#/$defs' not in json.dumps(DOCUMENT)


FULL = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [3]}
ASKED = [
    ("/generate", {"text": "abc"}),
    ("/generate", {"text": ["a", "bc"], **FULL, "return_prompt_token_ids": True}),
    ("/generate", {"text": "abc", "return_routed_experts": True, "routed_experts_format": "packed"}),
    ("/generate", {"text": "abc", "sampling_params": {"n": 2, "max_new_tokens": 0}, "return_routed_experts": True}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 3, "logprobs": 2, "echo": True, "return_token_ids": True}),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 1, "return_routed_experts": True}),
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "n": 2, "return_routed_experts": True}),
    ("/v1/chat/completions", {**CHAT, "return_meta_info": True, "return_routed_experts": True,
                              "return_token_ids": True, "return_prompt_token_ids": True}),
    ("/v1/chat/completions", {**CHAT, "return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True}),
    ("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2, "logprobs": 1}}),
    ("/tokenize", {"prompt": ["a", "b"]}), ("/tokenize", {"messages": CHAT["messages"]}),
    ("/detokenize", {"tokens": [[5], []]}), ("/detokenize", {"tokens": TOKENIZER.encode("abc")}),
    ("/pause_generation", {}), ("/continue_generation", {}), ("/update_weight_version", {"new_version": "2"}),
    ("/begin_weight_update", {}), ("/weights_checker", {}), ("/weights_checker", {"action": "compare"}),
    ("/update_weights_from_disk", {"model_path": "/models/other", "weight_version": "3"}),
    ("/get_weights_by_name", {"name": "model.norm.weight"}), ("/release_memory_occupation", {}),
    ("/resume_memory_occupation", {}),
    *((path, None) for path in docs.ANSWERS if set(DOCUMENT["paths"][path]) == {"get"}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), ASKED, ids=lambda value: value if isinstance(value, str) else "")
async def test_replies_are_as_declared(path, body):
    url = path.replace("{name}", "/models/fake")
    async with serving(enable_cache_report=True) as (client, _, _):
        reply = await (client.get(url) if body is None else client.post(url, json=body))
    declared = docs.ANSWERS[path] if reply.status_code == 200 else docs.ERRORS[str(reply.status_code)][1]
    TypeAdapter(declared).validate_json(reply.content, strict=True)
    assert reply.status_code == (400 if body == {"action": "compare"} else 200), reply.text


@pytest.mark.parametrize(("path", "body"), [a for a in ASKED if a[0] in docs.STREAMED], ids=lambda v: str(v)[:30])
async def test_events_are_as_declared(path, body):
    body = {name: value for name, value in body.items() if path == "/generate" or not name.startswith("return_meta")}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    for name in ("return_token_ids", "return_prompt_token_ids") if "chat" in path else ():
        body.pop(name, None)
    async with serving(engine={"step_s": 0.001}) as (client, _, _):
        chunks = events((await client.post(path, json=body)).text)
    assert len(chunks) > 1
    for chunk in chunks:
        assert "error" not in chunk
        TypeAdapter(docs.STREAMED[path]).validate_json(json.dumps(chunk), strict=True)


@pytest.mark.parametrize("path", docs.STREAMED)
@pytest.mark.parametrize("error", [UserError("a"), ApiError(503, "b"), SchemaError("c")], ids=lambda e: str(e.status))
def test_an_error_event_is_as_declared(path, error):
    TypeAdapter(docs.STREAMED[path]).validate_json(json.dumps(stream_error(error, path)), strict=True)


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("POST", "/generate", b"{", 400),
        ("POST", "/generate", b'{"text":"a","sampling_params":{"strange":1}}', 400),
        ("POST", "/generate", b'{"input_ids":[-1]}', 400),
        ("POST", "/v1/completions", b'{"prompt":"a","max_tokens":-1}', 400),
        ("POST", "/generate", b" " * 300, 413),
        ("POST", "/update_weights_from_disk", b'{"model_path":"/missing"}', 400),
        ("POST", "/start_profile", b'{"output_dir":"a\\u0000b"}', 400),
        ("GET", "/flush_cache?timeout=-1", b"", 400),
        ("GET", "/metrics", b"", 404),
        ("GET", "/v1/models/another", b"", 404),
    ],
)
async def test_refusals_are_as_declared(method, path, content, status):
    async with serving(max_body_bytes=200) as (client, _, _):
        headers = {"content-type": "application/json"}
        reply = await client.request(method, path, content=content, headers=headers)
        assert reply.status_code == status, reply.text
        TypeAdapter(docs.ERRORS[str(status)][1]).validate_json(reply.content, strict=True)


@pytest.mark.parametrize(("key", "given", "status"), [("secret", None, 401), ("secret", "Bearer other", 403)])
async def test_refused_keys_are_as_declared(key, given, status):
    async with serving(api_key=key) as (client, _, _):
        reply = await client.get("/v1/models", headers={"authorization": given} if given else {})
        assert reply.status_code == status
        TypeAdapter(docs.ERRORS[str(status)][1]).validate_json(reply.content, strict=True)


def test_a_declared_body_refuses_what_it_does_not_name():
    """The check above can fail: strict types, no other keys."""
    card = {"id": "a", "object": "model", "created": 1, "owned_by": "b", "root": "c", "parent": None}
    kind = TypeAdapter(docs.ANSWERS["/v1/models/{name}"])
    kind.validate_python(card | {"max_model_len": 5})
    for wrong in ({}, {"max_model_len": "5"}, {"max_model_len": 5, "more": 1}):
        with pytest.raises(ValidationError):
            kind.validate_python(card | wrong)
