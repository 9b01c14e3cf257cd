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

# Values are checked beyond what a schema can say (exactly one of text and input_ids, ranges that depend on the model),
# so a body that fits the schema may be refused. Keys are tried in the tests.
LEFT_OUT = ("positive_data_acceptance", "ignored_auth")
UNDO = {"/pause_generation": "/continue_generation", "/release_memory_occupation": "/resume_memory_occupation"}
QUICK = {"max_new_tokens": 4}


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
            self.one(operation, case)

        with contextlib.suppress(hypothesis.errors.Unsatisfiable):  # nothing breaks an operation that takes nothing
            each()

    def one(self, operation: Any, case: Any) -> None:
        if isinstance(case.body, dict) and operation.path in ("/generate", "/v1/completions", "/v1/chat/completions"):
            shorten(case.body)
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


def shorten(body: dict[str, Any]) -> None:
    """Bound what a body that leaves its length open would generate; what it says itself stays."""
    if "messages" in body or "prompt" in body:
        body.setdefault("max_tokens", QUICK["max_new_tokens"])
    elif body.get("sampling_params") is None:
        body["sampling_params"] = dict(QUICK)


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
