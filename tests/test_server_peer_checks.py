"""The peer's end-to-end checks of routed experts that compare servers: one with reuse and overlap, one without."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from test_server_engine import TEXTS, checkpoints, real, rows_of

__all__ = ["checkpoints"]
WITHOUT = {"disable_radix_cache": True, "disable_overlap_schedule": True, "chunked_prefill_size": 7}
PROMPTS = [f"{text} {i}" for i in range(3) for text in TEXTS]


async def routes_of(path, options):
    """{(endpoint, prompt): Routes}, all prompts at once through each endpoint, half of /generate not asking."""
    found, quiet = {}, []
    async with real(path, **options) as (client, service):

        async def ask(endpoint, prompt):
            # max_new_tokens at the top level is what the peer's own test sends: ignored, 128 are made
            base = {"temperature": 0, "ignore_eos": True, "max_tokens": 100, "return_routed_experts": True}
            body = {
                "/generate": {"text": prompt, "max_new_tokens": 100, "return_routed_experts": True,
                              "sampling_params": {"temperature": 0, "ignore_eos": True}},
                "/v1/completions": base | {"prompt": prompt},
                "/v1/chat/completions": base | {"messages": [{"role": "user", "content": prompt}]},
            }[endpoint]  # fmt: skip
            answer = (await client.post(endpoint, json=body)).json()
            payload = answer["meta_info" if endpoint == "/generate" else "sglext"]["routed_experts"]
            usage = answer["meta_info"] if endpoint == "/generate" else answer["usage"]
            routes = rows_of(payload, service)
            made = 128 if endpoint == "/generate" else 100
            assert len(routes) == usage["prompt_tokens"] + made - 1 and usage["completion_tokens"] == made
            found[endpoint, prompt] = routes

        async def ask_nothing(prompt):
            body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 5}}
            quiet.append("routed_experts" in (await client.post("/generate", json=body)).text)

        endpoints = ("/generate", "/v1/completions", "/v1/chat/completions")
        await asyncio.gather(*(ask(e, p) for e in endpoints for p in PROMPTS), *(ask_nothing(p) for p in PROMPTS))
        assert not any(quiet)
        experts = service.info.num_experts
    for routes in found.values():
        ids = routes.experts_TLK.astype(np.int64)
        assert ids.min() >= 0 and ids.max() < experts
        assert all(len(set(row)) == ids.shape[-1] for row in ids.reshape(-1, ids.shape[-1]).tolist())
    return found


@pytest.mark.slow
async def test_a_server_with_reuse_and_overlap_agrees_with_one_without(checkpoints):
    """The peer allows a tenth of the experts to differ. Here only a near tie may flip, as rounding falls."""
    reference = await routes_of(checkpoints / "0", {})
    baseline = await routes_of(checkpoints / "0", WITHOUT)
    assert set(reference) == set(baseline)
    differing = total = 0
    for key, routes in reference.items():
        a, b = routes.experts_TLK, baseline[key].experts_TLK
        assert a.shape == b.shape
        differing += int((~(b[..., None] == a[..., None, :]).any(-1)).sum())
        total += b.size
    assert differing / total < 0.005
