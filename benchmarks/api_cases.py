"""schemathesis against the OpenAPI document of a real server: no 500, no reply that the document does not allow.

    pip install schemathesis
    python benchmarks/api_cases.py --model DIR --cases 10000

DIR: any small checkpoint, such as benchmarks/tiny_checkpoint.py makes. The cases are spread over the operations
of the document, half of them as the document says, half of them breaking it; those must be refused. After each case the
server is continued, memory taken back. Ends with status 1 if a check failed or a request, page or descriptor is left.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections import Counter
from typing import Any

import httpx
import hypothesis
import schemathesis
from schemathesis.checks import load_all_checks
from schemathesis.core.failures import Failure, FailureGroup
from server_process import serving, usage

from tracklayer.server.gate import GENERATING
from tracklayer.server.native import NOT_HERE

# Values are checked beyond what a schema can say (exactly one of text and input_ids, ranges that depend on the model),
# so a body that fits the schema may be refused. Keys are tried in the tests.
LEFT_OUT = ("positive_data_acceptance", "ignored_auth")
UNDO = {"/pause_generation": "/continue_generation", "/release_memory_occupation": "/resume_memory_occupation"}
TEXTS = ("hello", ["hello", "fox"])
REFUSED = (
    "routed_dp_rank", "data_parallel_rank", "rid", "response_format", "tool_choice", "tools", "regex", "ebnf",
    "json_schema", "token_ids_logprob", "logit_bias", "stop_regex", "stop_token_ids", "lora_path",
)  # fmt: skip
# values that a request may succeed with, for fields that free values fail
CHOICES: dict[str, tuple[Any, ...]] = {
    "routed_experts_start_len": (0, 1), "routed_experts_format": ("int32", "packed", "npy"), "temperature": (0, 0.7),
    "logprob_start_len": (-1, 0, 1), "top_logprobs_num": (0, 2), "top_p": (0.5, 1), "top_k": (-1, 3), "n": (1, 2),
    "min_p": (0, 0.1), "frequency_penalty": (0, 1), "presence_penalty": (0, -1), "repetition_penalty": (1, 1.5),
    "top_logprobs": (0, 3), "max_completion_tokens": (1, 3), "min_tokens": (0, 1), "best_of": (1,), "priority": (0, 9),
    "seed": (1, 2), "return_logprob": (True, False), "stop": ("e", ["a", "b"]), "extra_key": ("a", "b"),
    "cache_salt": ("a", "b"), "custom_params": ({},), "chat_template_kwargs": ({},), "reasoning_effort": ("low",),
    "session_id": (None,), "features": (None,), "input_embeds": (None,),
}  # fmt: skip


class Run:
    """Cases of one server. `failures`: (operation, check) -> a few examples."""

    def __init__(self, url: str, seed: int) -> None:
        load_all_checks()
        registered = schemathesis.checks.CHECKS
        self.schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        self.left_out = registered.get_by_names(LEFT_OUT)
        self.client, self.seed = httpx.Client(base_url=url, timeout=60), seed
        self.statuses: Counter[int] = Counter()
        self.failures: dict[str, list[str]] = {}

    def operations(self) -> list[Any]:
        return [result.ok() for result in self.schema.get_all_operations()]

    def run(self, operation: Any, mode: schemathesis.GenerationMode, cases: int) -> None:
        """`cases` cases of one operation, whatever fails."""

        @hypothesis.seed(self.seed)
        @hypothesis.settings(
            max_examples=cases, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck),
            phases=[hypothesis.Phase.generate],
        )  # fmt: skip
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def each(case: Any) -> None:
            self.one(operation, case, mode)

        with contextlib.suppress(hypothesis.errors.Unsatisfiable):  # nothing breaks an operation that takes nothing
            each()

    def one(self, operation: Any, case: Any, mode: schemathesis.GenerationMode) -> None:
        positive = mode is schemathesis.GenerationMode.POSITIVE
        if positive and isinstance(case.body, dict) and operation.path in GENERATING:
            plausible(operation.path, case.body, sum(self.statuses.values()))
        try:
            response = case.call(timeout=60)
        except Exception as error:
            self.fail(operation, "no answer", f"{type(error).__name__}: {error} for {case.body!r:.300}")
            raise
        self.statuses[response.status_code] += 1
        try:
            case.validate_response(response, excluded_checks=self.left_out)
        except FailureGroup as group:
            for failure in group.exceptions:
                assert isinstance(failure, Failure)
                sent, got = case.as_curl_command()[:600], f"{response.status_code} {response.text[:300]}"
                text = f"{failure.message} | {sent} -> {got}"
                self.fail(operation, failure.title, text)
        undo = UNDO.get(operation.path)
        if undo is not None:
            self.client.post(undo).raise_for_status()

    def fail(self, operation: Any, title: str, text: str) -> None:
        self.failures.setdefault(f"{operation.label}: {title}", []).append(text)


def plausible(path: str, body: dict[str, Any], number: int) -> None:
    """Change a generation body in place: what it leaves open is short, and two of three ask for what can succeed.

    Free values nearly never name a token, and refusals alone would leave the replies untried.
    """
    short = {"max_new_tokens": 4} if path == "/generate" else {"max_tokens": 4}
    if path in ("/generate", "/inference/v1/generate"):
        body["sampling_params"] = body.get("sampling_params") or short
    else:
        body.setdefault("max_tokens", 4)
    if number % 3 == 0:
        return
    for name in ("input_ids", *NOT_HERE, *REFUSED):
        body.pop(name, None)
    body |= {
        "/generate": {
            "text": ["hello", "fox"] if number % 2 else "hello",
            "sampling_params": {**short, "n": 1 + number % 2},
        },
        "/v1/completions": {"prompt": "hello", **short},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], **short},
        "/inference/v1/generate": {"token_ids": [5, 6, 7], "sampling_params": {**short, "logprobs": number % 4}},
    }[path]
    for name, values in CHOICES.items():
        if name in body:
            body[name] = values[number % len(values)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint directory (a tiny one)")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="operations whose path holds this text")
    a = parser.parse_args()
    began = time.monotonic()
    flags = ("--max-total-tokens", "20000", "--enable-metrics", "--enable-memory-saver")
    with serving(a.model, *flags) as (url, process):
        run, (_, fds) = Run(url, a.seed), usage(process)
        operations = [o for o in run.operations() if a.only in o.path]
        each = -(-a.cases // (2 * len(operations)))
        while sum(run.statuses.values()) < a.cases:
            before = sum(run.statuses.values())
            for operation in operations:
                for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
                    run.run(operation, mode, each)
            if sum(run.statuses.values()) == before:
                break
            run.seed += 1
        flushed = run.client.post("/flush_cache?timeout=20").status_code
        load = run.client.get("/v1/loads").json()["loads"][0]
        run.client.close()
        time.sleep(1)
        if flushed != 200 or load["num_used_tokens"] or load["num_running_reqs"] or load["num_waiting_reqs"]:
            run.failures["left over"] = [json.dumps(load)]
        if (after := usage(process)[1]) > fds + 3:
            run.failures["left over: descriptors"] = [f"{fds} before, {after} after"]
    for name, examples in sorted(run.failures.items()):
        print(f"{name} ({len(examples)} times)\n    {min(examples, key=len)}")
    failed = {name: len(examples) for name, examples in run.failures.items()}
    statuses = {str(status): count for status, count in sorted(run.statuses.items())}
    result = {"cases": sum(run.statuses.values()), "operations": len(operations), "statuses": statuses}
    print(json.dumps(result | {"failed": failed, "seconds": round(time.monotonic() - began)}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
