"""Spans reach a collector over HTTP, below their caller's; logs as JSON lines carry request ids."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import logging
import threading

import pytest
from server_http import GREEDY, serving

from tracklayer.engine.logs import LogStyle
from tracklayer.errors import UserError
from tracklayer.server.config import ServerConfig
from tracklayer.server.tracing import exporter_to

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@contextlib.contextmanager
def collector():
    """(address, bodies): takes what is posted to it."""
    bodies = []

    class Take(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Take) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", bodies
        server.shutdown()


def spans_in(bodies):
    trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    found = {}
    for path, body in bodies:
        assert path == "/v1/traces"
        message = trace_service.ExportTraceServiceRequest.FromString(body)
        for resource in message.resource_spans:
            assert any(
                a.key == "service.name" and a.value.string_value == "tracklayer" for a in resource.resource.attributes
            )
            for scope in resource.scope_spans:
                for span in scope.spans:
                    values = {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
                    found[values["gen_ai.request.id"]] = (span, values)
    return found


async def test_a_span_for_each_request_below_its_callers():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with collector() as (address, bodies):
        async with serving(otlp_traces_endpoint=address) as (client, fake, _):
            body = {"input_ids": [1, 2, 3], "sampling_params": GREEDY, "rid": "a", "return_routed_experts": True}
            await client.post("/generate", json=body, headers={"traceparent": PARENT})
            stream = {**body, "rid": "b", "stream": True, "sampling_params": {**GREEDY, "n": 2}}
            await client.post("/generate", json=stream, headers={"traceparent": PARENT})
            await client.post("/v1/completions", json={"prompt": "x", "rid": "c", "max_tokens": 2})
            await client.post("/pause_generation", json={"mode": "in_place"})
            waiting = asyncio.create_task(client.post("/generate", json={**body, "rid": "d"}))
            while not fake.live:
                await asyncio.sleep(0.01)
            await client.post("/abort_request", json={"rid": "d"})
            await waiting
        spans = spans_in(bodies)
    assert set(spans) == {"a", "b-0", "b-1", "c", "d"}
    for rid in ("a", "b-0", "b-1"):
        span, values = spans[rid]
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == tuple(PARENT.split("-")[1:3])
        assert span.name == "llm_request" and [event.name for event in span.events] == ["first_token"]
        assert span.start_time_unix_nano <= span.events[0].time_unix_nano <= span.end_time_unix_nano
        assert values["gen_ai.usage.input_tokens"] == 3 and values["gen_ai.usage.output_tokens"] == 6
        assert values["tracklayer.route_rows"] == 8 and values["gen_ai.latency.time_to_first_token"] > 0
    assert spans["c"][0].parent_span_id == b"" and spans["c"][0].trace_id.hex() != PARENT.split("-")[1]
    finish = {
        rid: values["gen_ai.response.finish_reasons"].values[0].string_value for rid, (_, values) in spans.items()
    }
    assert finish["d"] == "abort" and finish["c"] == "length"


async def test_without_tracing_nothing_is_imported_or_sent():
    async with serving() as (client, _, service):
        assert (await client.post("/generate", json={"input_ids": [1], "sampling_params": GREEDY})).status_code == 200
        assert service.config.traces_to is None
    assert ServerConfig(enable_trace=True).traces_to == "localhost:4317"
    assert ServerConfig(otlp_traces_endpoint="x:1").traces_to == "x:1"


def test_a_missing_package_names_its_extra(monkeypatch):
    for name in ("grpc", "http"):
        monkeypatch.setitem(__import__("sys").modules, f"opentelemetry.exporter.otlp.proto.{name}.trace_exporter", None)
    for endpoint in ("localhost:4317", "http://localhost:4318"):
        with pytest.raises(UserError, match=r"tracklayer\[trace\]"):
            exporter_to(endpoint)


async def test_a_collector_that_is_gone_costs_no_request():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    async with serving(otlp_traces_endpoint="http://127.0.0.1:9") as (client, _, _):
        reply = await client.post("/generate", json={"input_ids": [1], "sampling_params": GREEDY})
        assert reply.status_code == 200


def test_json_lines(capsys):
    log, root = logging.getLogger("tracklayer.requests"), logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers[:] = []
    try:
        LogStyle("info", "json").set_up()
        log.info("rid=r\n1", extra={"fields": {"rid": "r\n1", "event": "submitted"}})
        log.debug("not shown")
        try:
            raise ValueError("bad \u00e9")
        except ValueError:
            logging.getLogger("x").exception("went %s", "wrong")
    finally:
        root.handlers[:], root.level = before, level
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first["rid"] == "r\n1" and first["event"] == "submitted" and first["level"] == "info"
    assert first["logger"] == "tracklayer.requests" and first["time"].endswith("+00:00") and "message" not in first
    assert second["message"] == "went wrong" and "ValueError: bad \u00e9" in second["exception"]
