"""Soak: mixed traffic against a real server process; everything must be answered, nothing may leak.

    python benchmarks/soak.py --model DIR --seconds 120

DIR: a small checkpoint with a tokenizer and a chat template, such as benchmarks/tiny_checkpoint.py makes (its weights
are dummies). Starts the server on a free port, runs workers (plain, streamed and chat requests, n > 1, shared prefixes,
stop strings, aborts, disconnects, bad bodies, pauses, flushes), and watches memory and descriptors of its processes.
Fails (status 1) when a request is not answered as it must be, a page or descriptor is left, or memory still grows
after the first third. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter

import httpx
import psutil
from server_process import serving, usage

WORKERS = 12
BAD_BODIES = (
    b"{",
    b"[]",
    b"\xff\xfe",
    b'{"input_ids":[]}',
    b'{"input_ids":[-1]}',
    b'{"text":3}',
    b'{"input_ids":[5],"rid":5}',
    b'{"input_ids":[5],"sampling_params":{"x":1}}',
    b'{"input_ids":[5],"sampling_params":{"temperature":-1}}',
)
GROWTH = 1.05  # memory at the end over memory after the first third


class Soak:
    """One run. `seen` counts what happened; `wrong` lists what should not have."""

    def __init__(self, url: str, seed: int) -> None:
        self.client = httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=100))
        self.random = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.shared = [self.random.randrange(2, 90) for _ in range(40)]
        self.stop_at = 0.0

    def body(self) -> dict:
        """A body that must succeed."""
        r = self.random
        prompt = self.shared[: r.randrange(1, 40)] + [r.randrange(2, 90) for _ in range(r.randrange(1, 8))]
        params = {"max_new_tokens": r.choice([0, 1, 5, 30, 80]), "temperature": r.choice([0, 0.7, 1.3])}
        if r.random() < 0.2:
            params["n"] = r.randrange(2, 5)
        if r.random() < 0.2:
            params["stop"] = r.choice(["e", ["th", "\n"]])
        if r.random() < 0.2:
            params["stop_token_ids"] = [r.randrange(2, 90) for _ in range(3)]
        return {
            "input_ids": prompt,
            "sampling_params": params,
            "return_routed_experts": r.random() < 0.6,
            "return_logprob": r.random() < 0.3,
            "priority": r.choice([None, 0, 5]),
        }

    def check(self, answer: dict | list, body: dict) -> None:
        """Lengths of an answer, whatever ended it."""
        for one in answer if isinstance(answer, list) else [answer]:
            meta, count = one["meta_info"], len(one["output_ids"])
            aborted = meta["finish_reason"]["type"] == "abort"
            if meta["completion_tokens"] != count:
                self.wrong.append(f"{count} ids but completion_tokens {meta['completion_tokens']}")
            if body["return_logprob"] and len(meta["output_token_logprobs"]) != count:
                self.wrong.append(f"{count} ids but {len(meta['output_token_logprobs'])} log-probabilities")
            if body["return_routed_experts"] and not aborted:
                packed = meta["routed_experts"]
                if packed["shape"][0] != meta["prompt_tokens"] + count - 1:
                    self.wrong.append(f"{packed['shape'][0]} route rows for {meta['prompt_tokens']} + {count} tokens")
            self.seen["aborted" if aborted else "answered"] += 1

    async def plain(self) -> None:
        body = {**self.body(), "routed_experts_format": "packed"}
        reply = await self.client.post("/generate", json=body)
        self.expect(reply, 200) and self.check(reply.json(), body)

    async def streamed(self, leave: bool) -> None:
        body = {**self.body(), "routed_experts_format": "packed", "stream": True}
        async with self.client.stream("POST", "/generate", json=body) as reply:
            if not self.expect(reply, 200):
                return
            last, done = {}, False
            async for line in reply.aiter_lines():
                if leave and self.random.random() < 0.3:
                    self.seen["left"] += 1
                    return
                if line == "data: [DONE]":
                    done = True
                elif line:
                    chunk = json.loads(line[6:])
                    last[chunk.get("index", 0)] = chunk
        if not done:
            self.wrong.append("a stream ended without [DONE]")
        self.check(list(last.values()), body)

    async def chatted(self) -> None:
        says = " ".join(self.random.choice(["fox", "dog", "quick"]) for _ in range(self.random.randrange(1, 9)))
        stream = self.random.random() < 0.5
        body = {"messages": [{"role": "user", "content": says}], "max_tokens": 20, "stream": stream}
        reply = await self.client.post("/v1/chat/completions", json=body)
        if not self.expect(reply, 200):
            return
        events = [json.loads(e[6:]) for e in reply.text.split("\n\n")[:-2]] if stream else [reply.json()]
        ends = [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]]
        if len(ends) != 1 or ends[0] not in ("stop", "length", "abort"):
            self.wrong.append(f"a chat ended with {ends}")
        self.seen["chatted"] += 1

    async def aborted(self) -> None:
        rid = f"soak-{self.random.getrandbits(40)}"
        body = {**self.body(), "rid": rid, "routed_experts_format": "packed"}
        task = asyncio.create_task(self.client.post("/generate", json=body))
        await asyncio.sleep(self.random.random() * 0.1)
        self.expect(await self.client.post("/abort_request", json={"rid": rid}), 200)
        reply = await task
        self.expect(reply, 200) and self.check(reply.json(), body)

    async def bad(self) -> None:
        self.expect(await self.client.post("/generate", content=self.random.choice(BAD_BODIES)), 400)
        self.seen["refused"] += 1

    async def control(self) -> None:
        action = self.random.choice(["flush", "pause", "info"])
        if action == "flush":
            self.expect(await self.client.post("/flush_cache"), 200, 400)
        elif action == "info":
            for path in ("/health", "/server_info", "/v1/loads", "/model_info"):
                self.expect(await self.client.get(path), 200)
        else:
            mode = self.random.choice(["in_place", "retract", "abort"])
            self.expect(await self.client.post("/pause_generation", json={"mode": mode}), 200)
            await asyncio.sleep(0.05)
            self.expect(await self.client.post("/continue_generation", json={}), 200)
        self.seen[action] += 1

    def expect(self, reply: httpx.Response, *statuses: int) -> bool:
        if reply.status_code not in statuses:
            self.wrong.append(f"{reply.request.url.path}: status {reply.status_code}")
        return reply.status_code == 200

    async def worker(self) -> None:
        kinds = [self.plain] * 5 + [lambda: self.streamed(False)] * 4 + [lambda: self.streamed(True)] * 2
        kinds += [self.aborted] * 2 + [self.bad] * 2 + [self.chatted] * 2
        while time.monotonic() < self.stop_at:
            await self.random.choice(kinds)()

    async def controller(self) -> None:
        while time.monotonic() < self.stop_at:
            await asyncio.sleep(1.5)
            await self.control()


async def run(url: str, process: psutil.Process, seconds: float, seed: int) -> dict:
    soak = Soak(url, seed)
    while (await soak.client.get("/v1/models")).status_code != 200:
        await asyncio.sleep(0.2)
    await soak.plain()
    _, fds_before = usage(process)
    soak.stop_at = time.monotonic() + seconds
    work = asyncio.gather(soak.controller(), *(soak.worker() for _ in range(WORKERS)))
    samples = []
    while not work.done():
        await asyncio.wait({work}, timeout=max(1.0, seconds / 60))
        samples.append(usage(process)[0])
    await work
    await soak.client.post("/continue_generation", json={})
    flushed = (await soak.client.post("/flush_cache?timeout=20")).status_code
    load = (await soak.client.get("/v1/loads")).json()["loads"][0]
    await soak.client.aclose()
    await asyncio.sleep(1)
    third = max(samples[: max(1, len(samples) // 3)])
    _, fds_after = usage(process)
    if flushed != 200 or load["num_used_tokens"] or load["num_running_reqs"] or load["num_waiting_reqs"]:
        soak.wrong.append(f"left in the cache: {load['num_used_tokens']} slots, flush status {flushed}")
    if fds_after > fds_before + 3:
        soak.wrong.append(f"{fds_after} file descriptors at the end, {fds_before} at the beginning")
    if max(samples[-3:]) > GROWTH * third:
        soak.wrong.append(f"memory grew from {third >> 20} to {max(samples[-3:]) >> 20} MiB after the first third")
    return {
        "seconds": seconds,
        **dict(soak.seen),
        "incomplete_rows": load.get("incomplete_rows"),
        "memory_mib": [third >> 20, max(samples[-3:]) >> 20],
        "fds": [fds_before, fds_after],
        "wrong": soak.wrong[:20],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint directory (a tiny one)")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("server_flags", nargs="*", help="more flags of the server, after --")
    arguments = parser.parse_args()
    flags = ("--max-total-tokens", "900", *arguments.server_flags)
    with serving(arguments.model, *flags) as (url, process):
        result = asyncio.run(run(url, process, arguments.seconds, arguments.seed))
    print(json.dumps(result))
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
