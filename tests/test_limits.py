"""Limits of one request: at the limit it is served; beyond it the engine never hears of it, and the flag is named."""

from __future__ import annotations

from dataclasses import fields

import pytest
from server_http import GREEDY, serving

from tracklayer.engine.limits import NO_LIMITS, Limits
from tracklayer.errors import UserError
from tracklayer.server.args import parse
from tracklayer.server.config import ServerConfig

ASK = {"input_ids": [1, 2], "sampling_params": GREEDY}


def with_sampling(**more):
    return {**ASK, "sampling_params": {**GREEDY, **more}}


TWO = {"input_ids": [[1]] * 2}
WAYS = {
    "max_batch_prompts": (2, {"input_ids": [[1]] * 2}, {"input_ids": [[1]] * 3}),
    "max_samples": (3, with_sampling(n=3), with_sampling(n=4)),
    "max_batch_sequences": (4, {**with_sampling(n=2), **TWO}, {**with_sampling(n=3), **TWO}),
    "max_stop_characters": (5, with_sampling(stop=["xyz", "ab"]), with_sampling(stop=["xyz", "abc"])),
    "max_top_logprobs": (4, {**ASK, "return_logprob": True, "top_logprobs_num": 4}, {**ASK, "top_logprobs_num": 5}),
}  # fmt: skip
MORE = [
    {**ASK, "return_logprob": True, "token_ids_logprob": [1, 2, 3, 4, 5]},
    {"input_ids": [[1], [2]], "token_ids_logprob": [[1], [1, 2, 3, 4, 5]]},
    {"input_ids": [[1], [2]], "top_logprobs_num": [1, 5]},
]


@pytest.mark.parametrize("name", WAYS)
async def test_at_the_limit_and_beyond_it(name):
    most, good, bad = WAYS[name]
    async with serving(**{name: most}) as (client, fake, service):
        assert (await client.post("/generate", json=good)).status_code == 200
        seen = len(fake.seen)
        for body in [bad, *(MORE if name == "max_top_logprobs" else [])]:
            reply = await client.post("/generate", json=body)
            assert reply.status_code == 400
            message = reply.json()["error"]["message"]
            assert f"at most {most}" in message and f"--{name.replace('_', '-')}" in message
        assert len(fake.seen) == seen and service.frontend.num_running == 0


async def test_the_other_endpoints_keep_the_same_limits():
    chat = {"messages": [{"role": "user", "content": "a"}]}
    async with serving(max_samples=2, max_top_logprobs=3) as (client, fake, _):
        for path, body in (
            ("/v1/completions", {"prompt": "a", "n": 3}),
            ("/v1/completions", {"prompt": "a", "logprobs": 4}),
            ("/v1/chat/completions", {**chat, "n": 3}),
            ("/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": 4}),
            ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"n": 3}}),
        ):  # fmt: skip
            reply = await client.post(path, json=body)
            assert reply.status_code == 400 and "at most" in reply.text, path
        assert not fake.seen


def test_every_limit_is_a_flag_and_none_is_no_limit():
    flags = {f.name: f for f in fields(ServerConfig)}
    for one in fields(Limits):
        assert flags[one.name].default >= 256 and flags[one.name].metadata["low"] == 1
        NO_LIMITS.check(one.name, 1 << 40)
        with pytest.raises(UserError, match=one.name.replace("_", "-")):
            Limits(**{one.name: 7}).check(one.name, 8)
        Limits(**{one.name: 7}).check(one.name, 7)
    assert parse(["m", "--max-logprobs", "20"]).server.max_top_logprobs == 20
