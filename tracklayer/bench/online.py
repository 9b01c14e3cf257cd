"""Measure a running server through /generate, streaming, all requests at once."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import httpx

from tracklayer.bench.offline import percentiles
from tracklayer.bench.workloads import Workload
from tracklayer.errors import UserError


async def ask(client: httpx.AsyncClient, prompt: list[int], workload: Workload, recording: bool) -> dict[str, Any]:
    """One streamed request: arrival times of its chunks and its last chunk."""
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": workload.output_tokens, "ignore_eos": True},
        "stream": True,
        "return_routed_experts": recording,
    }
    began, times, last = time.perf_counter(), [], None
    async with client.stream("POST", "/generate", json=body) as reply:
        if reply.status_code != 200:
            raise UserError(f"the server answered {reply.status_code}: {(await reply.aread()).decode()[:500]}")
        async for text in reply.aiter_lines():
            if text.startswith("data: ") and text != "data: [DONE]":
                times.append(time.perf_counter() - began)
                last = json.loads(text[6:])
    assert last is not None, "the stream ended without a chunk"
    return {"times": times, "last": last}


async def measure(url: str, workload: Workload, seed: int, recording: bool) -> dict[str, Any]:
    """Run a workload once; returns its numbers."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        info = (await client.get("/server_info")).raise_for_status().json()
        (await client.post("/flush_cache")).raise_for_status()
        prompts = workload.prompts(info.get("vocab_size") or 1000, seed)
        began = time.perf_counter()
        answers = await asyncio.gather(*(ask(client, prompt, workload, recording) for prompt in prompts))
        seconds = time.perf_counter() - began
    output = sum(a["last"]["meta_info"]["completion_tokens"] for a in answers)
    gaps = [b - a for answer in answers for a, b in pairwise(answer["times"])]
    return {
        "workload": workload.name,
        "engine": url,
        "recording": recording,
        "seconds": round(seconds, 4),
        "output_tokens_per_s": round(output / seconds, 1),
        "total_tokens_per_s": round((output + workload.num_requests * workload.input_tokens) / seconds, 1),
        "ttft_ms_p50_p90_p99": percentiles([a["times"][0] for a in answers]),
        "itl_ms_p50_p90_p99": percentiles(gaps),
        "requests": workload.num_requests,
        "input_tokens": workload.input_tokens,
        "output_tokens": workload.output_tokens,
    }


def run(
    url: str, workloads: list[Workload], args: argparse.Namespace, command: str, emit: Callable[[str], None]
) -> None:
    """Measure each workload `repeats` times after a warm-up; the best of each is a JSON line."""
    modes = {"on": (True,), "off": (False,), "pairs": (True, False)}[args.recording]
    for workload in workloads:
        for recording in modes:
            try:
                runs = [asyncio.run(measure(url, workload, args.seed + r, recording)) for r in range(args.repeats + 1)]
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise UserError(f"{url} does not answer as a server of routes does: {error}") from error
            best = max(runs[1:], key=lambda m: m[workload.metric])
            emit(json.dumps({**best, "command": command}))
