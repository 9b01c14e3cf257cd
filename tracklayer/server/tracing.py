"""OpenTelemetry, where it is asked for: one span a request, below the span that its caller sent along."""

from __future__ import annotations

import time
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

import tracklayer
from tracklayer.engine.frontend import Observer
from tracklayer.engine.sample import Sample
from tracklayer.errors import UserError

EXPORT_S = 3  # seconds that a collector gets to take spans
TRACES_PATH = "/v1/traces"


class Tracing(Observer):
    """Spans to an exporter, in batches, on a thread of OpenTelemetry's. Times are the wall clock's."""

    def __init__(self, exporter: Any) -> None:
        """`exporter`: an OpenTelemetry SpanExporter. Raises UserError when OpenTelemetry is not installed."""
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise not_installed() from error
        resource = Resource.create({"service.name": "tracklayer", "service.version": tracklayer.__version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tracklayer")
        self._spans: dict[str, Any] = {}

    def submitted(self, sample: Sample) -> None:
        request, params = sample.request, sample.request.sampling
        asked = {
            "gen_ai.operation.name": "generate",
            "gen_ai.request.id": sample.rid,
            "gen_ai.request.max_tokens": params.max_new_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.input_tokens": sample.prompt_tokens,
            "tracklayer.return_routed_experts": request.return_routed_experts,
        }
        known = {name: value for name, value in asked.items() if value is not None}
        self._spans[sample.rid] = self._tracer.start_span("llm_request", attributes=known)

    def progressed(self, sample: Sample, new_tokens: int) -> None:
        if new_tokens and len(sample.output_ids) == new_tokens:
            self._spans[sample.rid].add_event("first_token")

    def finished(self, sample: Sample) -> None:
        from opentelemetry.trace import Status, StatusCode

        span = self._spans.pop(sample.rid)
        span.set_attribute("gen_ai.usage.output_tokens", len(sample.output_ids))
        span.set_attribute("gen_ai.latency.time_in_queue", sample.queue_s)
        span.set_attribute("tracklayer.cached_tokens", sample.cached_tokens)
        span.set_attribute("tracklayer.retractions", sample.num_retractions)
        if sample.finish is not None:
            span.set_attribute("gen_ai.response.finish_reasons", [sample.finish.type])
        if sample.first_token_at is not None:
            span.set_attribute("gen_ai.latency.time_to_first_token", sample.first_token_at - sample.arrived)
        if sample.routes is not None:
            span.set_attribute("tracklayer.route_rows", len(sample.routes))
        if sample.error is not None:
            span.set_status(Status(StatusCode.ERROR, str(sample.error)))
        span.end(time.time_ns())

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def exporter_to(endpoint: str) -> Any:
    """An OTLP exporter: http(s)://HOST:PORT[/PATH] speaks HTTP, HOST:PORT gRPC. Raises UserError: not installed."""
    try:
        if endpoint.startswith(("http://", "https://")):
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

            whole = endpoint if endpoint.count("/") > 2 else endpoint + TRACES_PATH
            return Http(endpoint=whole, timeout=EXPORT_S)
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc
    except ImportError as error:
        raise not_installed() from error
    return Grpc(endpoint=endpoint, insecure=True, timeout=EXPORT_S)


def not_installed() -> UserError:
    return UserError("tracing needs OpenTelemetry: pip install 'tracklayer[trace]', or start without tracing")


class TraceContext:
    """ASGI middleware: what runs for a request runs in the trace that its headers name."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        from opentelemetry import context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        token = context.attach(TraceContextTextMapPropagator().extract(headers))
        try:
            await self.app(scope, receive, send)
        finally:
            context.detach(token)
