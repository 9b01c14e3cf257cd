"""SGLang's own HTTP server, tokenizer manager and detokenizer without a GPU: its scheduler is a made-up one.

    SGLANG_PYTHON benchmarks/sglang_server.py DIR PORT     (SGLang 0.5.23; see http_cost.py, which starts it)

Every 30 ms each running request gets one token, as a decoding engine would give it.
"""

from __future__ import annotations

import array
import sys
import time
from typing import Any

STEP_S, SUFFIX = 0.03, 5


def column(requests: list[dict[str, Any]], name: str) -> Any:
    """The value of a field of BatchTokenIDOutput for these requests."""
    if name.startswith("spec_"):
        return [0] * len(requests)
    make = {
        "rids": lambda r: r["rid"],
        "http_worker_ipcs": lambda r: None,
        "finished_reasons": lambda r: {"type": "length", "length": r["most"]} if r["made"] >= r["most"] else None,
        "decoded_texts": lambda r: "",
        "decode_ids": lambda r: array.array("q", (r["ids"][-SUFFIX:] if r["made"] == 1 else []) + [r["last"]]),
        "read_offsets": lambda r: min(SUFFIX, len(r["ids"])),
        "output_ids": lambda r: array.array("q", [r["last"]]),
        "skip_special_tokens": lambda r: True,
        "spaces_between_special_tokens": lambda r: True,
        "no_stop_trim": lambda r: False,
        "prompt_tokens": lambda r: len(r["ids"]),
        "completion_tokens": lambda r: r["made"],
        **dict.fromkeys(("reasoning_tokens", "cached_tokens", "retraction_counts"), lambda r: 0),
    }.get(name)
    return None if make is None else [make(r) for r in requests]


def schedule(server_args: Any, port_args: Any, *rest: Any) -> None:
    """SGLang's run_scheduler_process: (.., gpu_id, tp_rank, pp_rank, dp_rank, pipe_writer, ..)."""
    import msgspec
    import zmq
    from sglang.srt.managers import io_struct
    from sglang.srt.utils.network import get_zmq_socket

    context = zmq.Context()
    inbox = get_zmq_socket(context, zmq.PULL, port_args.scheduler_input_ipc_name, False)
    outbox = get_zmq_socket(context, zmq.PUSH, port_args.detokenizer_ipc_name, False)
    rest[4].send(
        {"status": "ready", "max_total_num_tokens": 1 << 20, "max_req_input_len": 8000, "startup_time": {}}
    )  # the pipe of the launcher
    names = [field.name for field in msgspec.structs.fields(io_struct.BatchTokenIDOutput)]
    running: dict[str, dict[str, Any]] = {}
    while True:
        while not running or inbox.poll(0):
            message = io_struct.sock_recv(inbox)
            for request in getattr(message, "batch", [message]):
                if hasattr(request, "sampling_params"):
                    most = request.sampling_params.max_new_tokens
                    running[request.rid] = {"rid": request.rid, "ids": list(request.input_ids), "most": most, "made": 0}
        time.sleep(STEP_S)
        for request in running.values():
            request["made"] += 1
            request["last"] = 3 + request["made"] * 7 % 300
        batch = list(running.values())
        io_struct.sock_send(outbox, io_struct.BatchTokenIDOutput(**{name: column(batch, name) for name in names}))
        running = {r["rid"]: r for r in batch if r["made"] < r["most"]}


if __name__ == "__main__":
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args

    flags = ["--model-path", sys.argv[1], "--port", sys.argv[2], "--device", "cpu", "--load-format", "dummy"]
    launch_server(
        prepare_server_args([*flags, "--skip-server-warmup", "--log-level-http", "warning"]),
        run_scheduler_process_func=schedule,
        execute_warmup_func=lambda *arguments, **named: True,
    )
