"""Whatever is sent is answered: no 500, no hang, nothing left running."""

from __future__ import annotations

import asyncio
import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_http import serving

from tracklayer.server import protocol

PATHS = {
    "/generate": protocol.GenerateBody,
    "/v1/completions": protocol.CompletionBody,
    "/v1/chat/completions": protocol.ChatBody,
    "/inference/v1/generate": protocol.InferenceBody,
    "/tokenize": protocol.TokenizeBody,
    "/detokenize": protocol.DetokenizeBody,
    "/abort_request": protocol.AbortBody,
    "/update_weight_version": protocol.WeightVersionBody,
    "/get_weights_by_name": protocol.WeightNameBody,
    "/update_weights_from_disk": protocol.DiskUpdateBody,
}
SAMPLING = [
    "max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "n",
    "stop_regex", "logit_bias", "sampling_seed", "ignore_eos", "no_stop_trim", "stream_interval", "custom_params",
    "json_schema", "max_tokens", "logprobs", "seed", "beam_width", "strange",
]  # fmt: skip

words = st.sampled_from(["", "a", "Paris", "\n", "中🙂", "\x00", "[a-z]+", "(", "<|im_end|>", "{}", "int32", "user"])
numbers = st.sampled_from(
    [-1, 0, 1, 2, 3, 5, 40, 399, 400, 513, 1 << 31, 1 << 70, -(1 << 63), 0.0, 0.5, 1.0, -0.1, 1e300]
)
scalars = st.one_of(st.none(), st.booleans(), numbers, words, st.floats())
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=2),
    max_leaves=5,
)
ids = st.lists(st.integers(0, 399), min_size=1, max_size=5)
plausible = {
    "text": words, "prompt": words | ids | st.lists(words, max_size=3), "input_ids": ids | st.lists(ids, max_size=3),
    "token_ids": ids, "tokens": ids, "stream": st.booleans(), "return_logprob": st.booleans(),
    "return_routed_experts": st.booleans(), "n": st.integers(1, 3),
    "messages": st.lists(st.fixed_dictionaries({"role": words, "content": values}), max_size=2),
    "sampling_params": st.fixed_dictionaries({"max_new_tokens": st.integers(0, 4)}, optional={
        name: values for name in SAMPLING[1:]}),
}  # fmt: skip


@st.composite
def requests(draw):
    path = draw(st.sampled_from(list(PATHS)))
    names = sorted(PATHS[path].model_fields)
    body = {}
    for name in draw(st.lists(st.sampled_from([*names, "unknown"]), max_size=6, unique=True)):
        body[name] = draw(plausible[name] if name in plausible and draw(st.integers(0, 3)) else values)
    for name in ("text", "input_ids", "prompt", "messages", "token_ids", "tokens"):
        if name in names and draw(st.booleans()):
            body.setdefault(name, draw(plausible[name]))
            break
    if "sampling_params" in names and draw(st.booleans()):
        body.setdefault("sampling_params", draw(plausible["sampling_params"]))
    return path, body


@given(st.lists(requests(), min_size=1, max_size=6))
@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_body_is_answered(sent):
    async def run():
        async with serving(max_samples=8) as (client, fake, service):

            async def post(path, body):
                content = json.dumps(body).encode()
                return await client.post(path, content=content, headers={"content-type": "application/json"})

            replies = await asyncio.wait_for(asyncio.gather(*(post(p, b) for p, b in sent)), 30)
            for (path, body), reply in zip(sent, replies, strict=True):
                assert reply.status_code in (200, 400, 413, 501), (path, body, reply.status_code, reply.text[:500])
                if reply.status_code == 200 and body.get("stream") is True and path != "/inference/v1/generate":
                    assert reply.text.endswith("data: [DONE]\n\n") or not reply.headers["content-type"].startswith(
                        "text"
                    )
            for _ in range(200):
                if not fake.live and not service.frontend.num_running:
                    break
                await asyncio.sleep(0.005)
            assert not fake.live and service.frontend.num_running == 0

    asyncio.run(run())


@given(st.binary(max_size=60), st.sampled_from(list(PATHS)))
@settings(max_examples=150, deadline=None)
def test_every_byte_string_is_answered(content, path):
    async def run():
        async with serving() as (client, _, _):
            reply = await client.post(path, content=content, headers={"content-type": "application/json"})
            assert reply.status_code in (200, 400)

    asyncio.run(run())
