"""Unmodified clients of SGLang, vLLM and OpenAI against this server, each with what must hold afterwards.

    python -m venv vllm-client && vllm-client/bin/pip install vllm        # the line that `--list` shows for the client
    python benchmarks/run_clients.py vllm-completions vllm-chat --python vllm-client/bin/python

Starts two servers over the tiny checkpoint (tiny_checkpoint.py) on free ports, runs the named clients with the given
interpreter (default: this one), and checks what they report. No GPU and no network is needed by any of them. One line
for each client, the last line is JSON; status 1 when one of them did not end as it must.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from server_process import serving
from tiny_checkpoint import write

HERE = Path(__file__).parent
PROMPTS, TOKENS, ROUTED = 16, 32, 24


@dataclass(frozen=True)
class Place:
    """Where a client finds things: the servers' URLs, the checkpoint, a folder of its own to write into."""

    url: str
    other: str
    model: Path
    out: Path
    python: str


@dataclass(frozen=True)
class Client:
    """`install`: arguments of pip. `command`: of the interpreter. `check`: raises AssertionError, returns figures."""

    install: str
    command: Callable[[Place], list[str]]
    check: Callable[[Place], dict[str, Any]]


def sglang_bench(backend: str, *more: str) -> Client:
    def command(place: Place) -> list[str]:
        sizes = ["--random-input-len", "64", "--random-output-len", str(TOKENS), "--random-range-ratio", "1.0"]
        return [
            "-m", "sglang.bench_serving", "--backend", backend, "--base-url", place.url, "--dataset-name", "random-ids",
            *sizes, "--num-prompts", str(PROMPTS), "--max-concurrency", "8", "--model", str(place.model),
            "--tokenizer", str(place.model), "--seed", "1", "--flush-cache",
            "--output-file", str(place.out / "result.jsonl"), *more,
        ]  # fmt: skip

    def check(place: Place) -> dict[str, Any]:
        got = json.loads((place.out / "result.jsonl").read_text().splitlines()[-1])
        assert got["completed"] == PROMPTS, f"{got['completed']} of {PROMPTS} completed"
        assert got["total_output_tokens"] == PROMPTS * TOKENS, f"{got['total_output_tokens']} output tokens"
        return {"output_tok_s": round(got["output_throughput"])}

    return Client("sglang==0.5.23", command, check)


def vllm_bench(backend: str, endpoint: str) -> Client:
    def command(place: Place) -> list[str]:
        return [
            "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", backend, "--base-url", place.url,
            "--endpoint", endpoint, "--dataset-name", "random", "--random-input-len", "64",
            "--random-output-len", str(TOKENS), "--num-prompts", str(PROMPTS), "--max-concurrency", "8",
            "--model", str(place.model), "--tokenizer", str(place.model), "--temperature", "0", "--seed", "1",
            "--ignore-eos", "--save-result", "--result-dir", str(place.out), "--result-filename", "result.json",
        ]  # fmt: skip

    def check(place: Place) -> dict[str, Any]:
        got = json.loads((place.out / "result.json").read_text())
        assert (got["completed"], got["failed"]) == (PROMPTS, 0), f"{got['completed']} done, {got['failed']} failed"
        assert got["total_output_tokens"] == PROMPTS * TOKENS, f"{got['total_output_tokens']} output tokens"
        return {"output_tok_s": round(got["output_throughput"])}

    return Client("vllm", command, check)


def lm_eval_command(place: Place) -> list[str]:
    tasks = place.out / "tasks"
    tasks.mkdir()
    for source in (HERE / "lm_eval_tasks").iterdir():
        text = source.read_text().replace("test: choice.jsonl", f"test: {HERE / 'lm_eval_tasks' / 'choice.jsonl'}")
        (tasks / source.name).write_text(text)
    arguments = {
        "model": place.model,
        "base_url": f"{place.url}/v1/completions",
        "num_concurrent": 4,
        "tokenizer": place.model,
        "tokenized_requests": True,
    }
    return [
        "-m", "lm_eval", "--model", "local-completions",
        "--model_args", ",".join(f"{name}={value}" for name, value in arguments.items()),
        "--include_path", str(tasks), "--tasks", "tracklayer_choice,tracklayer_generate",
        "--output_path", str(place.out), "--log_samples",
    ]  # fmt: skip


def lm_eval_check(place: Place) -> dict[str, Any]:
    """Every continuation's log-probability must be what /generate says of the same tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(place.model)
    kinds = {}
    for path in place.out.rglob("samples_*.jsonl"):
        kinds[path.name.split("_20")[0]] = [json.loads(line) for line in path.read_text().splitlines()]
    assert set(kinds) == {"samples_tracklayer_choice", "samples_tracklayer_generate"}, f"task files: {set(kinds)}"
    furthest = 0.0
    for sample in kinds["samples_tracklayer_choice"]:
        for arguments, answer in zip(sample["arguments"].values(), sample["filtered_resps"], strict=True):
            prompt = tokenizer.encode(arguments["arg_0"])
            whole = tokenizer.encode(arguments["arg_0"] + arguments["arg_1"])
            body = {"input_ids": whole, "return_logprob": True, "logprob_start_len": len(prompt) - 1}
            reply = httpx.post(f"{place.url}/generate", json=body | {"sampling_params": {"max_new_tokens": 0}})
            triples = reply.json()["meta_info"]["input_token_logprobs"][1:]
            furthest = max(furthest, abs(sum(t[0] for t in triples) - float(answer[0])))
    assert furthest < 1e-3, f"log-probabilities of lm-eval and /generate differ by {furthest}"
    texts = [sample["filtered_resps"][0] for sample in kinds["samples_tracklayer_generate"]]
    assert all(texts) and not any("." in text for text in texts), texts
    return {"choices": 4 * len(kinds["samples_tracklayer_choice"]), "furthest": furthest}


OPENAI = """
import openai, sys
client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
name = client.models.list().data[0].id
hello = [{"role": "user", "content": "hello"}]
whole = client.chat.completions.create(model=name, messages=hello, max_tokens=12, temperature=0, logprobs=True)
pieces = client.chat.completions.create(model=name, messages=hello, max_tokens=12, temperature=0, stream=True,
                                        stream_options={"include_usage": True})
pieces = list(pieces)
text = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
assert text == whole.choices[0].message.content, (text, whole)
assert pieces[-1].usage == whole.usage and len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
prompt = client.completions.create(model=name, prompt=["hello", "quick"], n=2, max_tokens=5, echo=True)
assert [c.index for c in prompt.choices] == [0, 1, 2, 3] and prompt.choices[3].text.startswith("quick")
routed = client.completions.create(model=name, prompt="hello", max_tokens=5, extra_body={"return_routed_experts": True})
assert routed.model_extra["sglext"]["routed_experts"]
try:
    client.chat.completions.create(model=name, messages=hello, temperature=-1)
except openai.BadRequestError as error:
    assert "temperature" in str(error)
else:
    raise AssertionError("temperature -1 was taken")
"""


def router_command(place: Place) -> list[str]:
    return ["-c", ROUTER, place.python, place.url, place.other]


# Ends the router it starts. Routes must come back through it: the servers return them to who does not ask.
ROUTER = f"""
import httpx, socket, subprocess, sys, time
python, *workers = sys.argv[1:]
ports = []
for _ in range(2):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        ports.append(str(s.getsockname()[1]))
command = [python, "-m", "sglang_router.launch_router", "--worker-urls", *workers, "--port", ports[0],
           "--prometheus-port", ports[1], "--policy", "round_robin"]
router, url = subprocess.Popen(command), "http://127.0.0.1:" + ports[0]
done = lambda: [httpx.get(w + "/server_info").json()["internal_states"][0]["num_finished"] for w in workers]
try:
    deadline = time.monotonic() + 60
    while True:
        try:
            if httpx.get(url + "/health").status_code == 200 and httpx.get(url + "/v1/models").status_code == 200:
                break
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline and router.poll() is None, "the router did not become ready"
        time.sleep(0.2)
    for i in range({ROUTED}):
        path = ["/generate", "/v1/completions", "/v1/chat/completions"][i % 3]
        short = {{"max_tokens": 4, "model": "default"}}
        body = [{{"text": "hello", "sampling_params": {{"max_new_tokens": 4}}}}, short | {{"prompt": "hello"}},
                short | {{"messages": [{{"role": "user", "content": "hello"}}]}}][i % 3]
        reply = httpx.post(url + path, json=body, timeout=60)
        assert reply.status_code == 200, (path, reply.status_code, reply.text)
        answer = reply.json()
        assert answer["meta_info"]["routed_experts"] if i % 3 == 0 else answer["sglext"]["routed_experts"], path
    lines = httpx.get(f"http://127.0.0.1:{{ports[1]}}/metrics").text
    for worker in workers:
        assert worker in lines, f"the router sent nothing to {{worker}}"
finally:
    router.terminate()
    router.wait(30)
"""


def nothing_more(place: Place) -> dict[str, Any]:
    return {}


CLIENTS: dict[str, Client] = {
    "sglang": sglang_bench("sglang", "--tokenize-prompt", "--return-routed-experts"),
    "sglang-text": sglang_bench("sglang"),
    "sglang-oai": sglang_bench("sglang-oai"),
    "sglang-oai-chat": sglang_bench("sglang-oai-chat"),
    "vllm-completions": vllm_bench("openai", "/v1/completions"),
    "vllm-chat": vllm_bench("openai-chat", "/v1/chat/completions"),
    "openai": Client("openai", lambda place: ["-c", OPENAI, place.url], nothing_more),
    "lm-eval": Client("lm-eval[api]", lm_eval_command, lm_eval_check),
    "router": Client("sglang-router httpx", router_command, nothing_more),
}


def run(name: str, place: Place, limit_s: float) -> dict[str, Any]:
    """Run one client; {"ok": bool, "seconds": float, ...}. Its output is shown where it failed."""
    client = CLIENTS[name]
    place.out.mkdir()
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    command, began = [place.python, *client.command(place)], time.monotonic()
    done = subprocess.run(
        command, cwd=place.out, env={**os.environ, **offline}, capture_output=True, text=True, timeout=limit_s
    )
    result: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1)}
    try:
        assert done.returncode == 0, f"status {done.returncode}"
        result |= {"ok": True, **client.check(place)}
    except (AssertionError, OSError, KeyError, ValueError) as error:
        print(done.stdout[-2000:], done.stderr[-4000:], file=sys.stderr)
        result |= {"ok": False, "why": repr(error)}
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=", ".join(CLIENTS))
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the clients installed")
    parser.add_argument("--limit-s", type=float, default=600, help="seconds for each client")
    parser.add_argument("--list", action="store_true", help="what to install for each client, and its command line")
    a = parser.parse_args()
    unknown = [name for name in a.clients if name not in CLIENTS]
    if unknown:
        parser.error(f"unknown client {unknown[0]!r}; known are {', '.join(CLIENTS)}")
    results = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model, root = write(Path(folder) / "tiny"), Path(folder)
        if a.list:
            for name, client in CLIENTS.items():
                (root / name).mkdir()
                line = client.command(Place("URL", "URL2", Path("DIR"), root / name, "python"))
                shown = " ".join(part if "\n" not in part else "'...'" for part in line)
                print(f"{name}\n  pip install {client.install}\n  python {shown.replace(str(root / name), 'OUT')}")
            return 0
        flags = ("--max-total-tokens", "20000", "--enable-metrics", "--return-routed-experts-by-default")
        url, other = (stack.enter_context(serving(model, *flags))[0] for _ in range(2))
        for name in a.clients or CLIENTS:
            results[name] = run(name, Place(url, other, model, root / name, a.python), a.limit_s)
            print(name, results[name], flush=True)
    print(json.dumps(results))
    return 0 if all(result["ok"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
