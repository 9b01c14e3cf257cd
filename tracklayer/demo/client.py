"""The demonstration as a client sees it: a server process, and prompts sent to it over HTTP all at once."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tracklayer.demo.prompts import Prompt
from tracklayer.errors import TracklayerError
from tracklayer.routes.codec import decode
from tracklayer.routes.forms import RouteShape
from tracklayer.routes.record import Routes

MAX_NEW_TOKENS = 48
START_SECONDS = 180


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer. `input_ids` and `output_ids` are token ids; `chunks` counts a stream's events (0: not streamed)."""

    prompt: Prompt
    index: int
    input_ids: list[int]
    output_ids: list[int]
    text: str
    cached_tokens: int
    finish: str
    routes: Routes
    chunks: int = 0

    @property
    def expected_rows(self) -> int:
        """One row for every token that went through the model: all but the last sampled one."""
        return len(self.input_ids) + len(self.output_ids) - 1

    @property
    def complete(self) -> bool:
        return len(self.routes) == self.expected_rows and self.routes.complete


@contextmanager
def server(model_dir: Path, log_file: Path, flags: list[str]) -> Iterator[str]:
    """Start `tracklayer serve` on a free port of this machine; yields its URL and ends it on the way out."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tracklayer.launch_server", "--model-path", str(model_dir), "--port", str(port)]
    command += ["--enable-return-routed-experts", *flags]
    with log_file.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_healthy(url, process, log_file)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log_file: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            tail = "\n".join(log_file.read_text().splitlines()[-15:])
            raise TracklayerError(f"the server ended with status {process.returncode} while starting:\n{tail}")
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass  # not listening yet
        time.sleep(0.2)
    raise TracklayerError(f"the server was not healthy after {START_SECONDS} s; see {log_file}")


async def ask_all(url: str, prompts: tuple[Prompt, ...], tokenizer: Any, shape: RouteShape) -> list[list[Sample]]:
    """Send every prompt at once; a list of samples for each, in order."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        return await asyncio.gather(*(_ask(client, prompt, tokenizer, shape) for prompt in prompts))


async def _ask(client: httpx.AsyncClient, prompt: Prompt, tokenizer: Any, shape: RouteShape) -> list[Sample]:
    ids = tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=False)
    body = {
        "input_ids": ids,
        "sampling_params": {
            "max_new_tokens": MAX_NEW_TOKENS,
            "temperature": 0.0 if prompt.n == 1 else 0.8,
            "n": prompt.n,
            "sampling_seed": 7,
        },
        "return_routed_experts": True,
        "stream": prompt.stream,
    }
    if prompt.stream:
        replies, chunks = await _streamed(client, body)
    else:
        response = await client.post("/generate", json=body)
        _check(response.status_code, response.text)
        replies, chunks = response.json(), 0
    replies = replies if isinstance(replies, list) else [replies]
    if len(replies) != prompt.n:
        raise TracklayerError(f"{prompt.n} samples were asked for, {len(replies)} came: {prompt.question}")
    return [_sample(prompt, index, ids, reply, chunks, shape) for index, reply in enumerate(replies)]


async def _streamed(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The last chunk of a stream (chunks are cumulative) and how many there were."""
    last, chunks = None, 0
    async with client.stream("POST", "/generate", json=body) as response:
        if response.status_code != 200:
            _check(response.status_code, (await response.aread()).decode())
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                last, chunks = json.loads(line.removeprefix("data: ")), chunks + 1
                if "error" in last:
                    raise TracklayerError(f"the stream broke: {last['error']}")
    if last is None:
        raise TracklayerError("the stream held no chunk")
    return last, chunks


def _check(status: int, text: str) -> None:
    if status != 200:
        raise TracklayerError(f"the server answered {status}: {text[:500]}")


def _sample(
    prompt: Prompt, index: int, ids: list[int], reply: dict[str, Any], chunks: int, shape: RouteShape
) -> Sample:
    meta = reply["meta_info"]
    if "routed_experts" not in meta:
        raise TracklayerError(f"the reply to {prompt.question!r} holds no routes")
    return Sample(
        prompt=prompt,
        index=index,
        input_ids=ids,
        output_ids=reply["output_ids"],
        text=reply["text"].strip(),
        cached_tokens=meta["cached_tokens"],
        finish=meta["finish_reason"]["type"],
        routes=decode(meta["routed_experts"], "sglang", shape),
        chunks=chunks,
    )
