"""What shapes the HTTP server: one frozen dataclass, validated at birth, whose fields are flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracklayer.config import check_flags, flag, json_object
from tracklayer.engine.limits import Limits
from tracklayer.engine.logs import FORMATS
from tracklayer.errors import UserError
from tracklayer.server.reasoning_parsers import REASONING_FORMATS
from tracklayer.server.tool_formats import TOOL_FORMATS

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(Limits):
    """Names are SGLang's where it has one. The limits of one request are flags too."""

    host: str = flag("127.0.0.1", "address to listen on; the default serves this machine alone")
    port: int = flag(30000, "TCP port; 0 takes a free one")
    served_model_name: str | None = flag(None, "name in /v1/models and replies; default: the model path")
    api_key: str | None = flag(None, "bearer key that every request must carry (except /health, /ready, /metrics)")
    admin_api_key: str | None = flag(None, "bearer key for control endpoints; default: the API key")
    chat_template: str | None = flag(None, "chat template file (or text) in place of the tokenizer's")
    trust_remote_code: bool = flag(False, "let the checkpoint's own Python code build its tokenizer")
    sampling_defaults: str = flag(
        "model", "chat: the checkpoint's generation_config.json, or OpenAI's", choices=("model", "openai")
    )
    preferred_sampling_params: str = flag("{}", "JSON object laid under every /generate request's sampling_params")
    allow_auto_truncate: bool = flag(False, "cut prompts and lengths that do not fit instead of refusing them")
    tool_call_parser: str | None = flag(
        None,
        "how this model writes calls of tools; auto: by its chat template; default: they stay text",
        choices=(None, "auto", *TOOL_FORMATS),
    )
    reasoning_parser: str | None = flag(
        None, "how this model marks its reasoning; default: it stays text", choices=(None, *REASONING_FORMATS)
    )
    stream_interval: int = flag(1, "tokens per streamed chunk", low=1)
    incremental_streaming_output: bool = flag(False, "/generate streams send what is new instead of everything so far")
    stream_response_default_include_usage: bool = flag(False, "OpenAI streams end with usage unless told otherwise")
    return_routed_experts_by_default: bool = flag(
        False, "return routes to requests that do not say (for gateways that drop the field return_routed_experts)"
    )
    enable_cache_report: bool = flag(False, "OpenAI usage says how many prompt tokens came from the cache")
    enable_metrics: bool = flag(False, "serve Prometheus metrics at /metrics")
    log_level: str = flag("info", "level of the log", choices=LOG_LEVELS)
    log_level_http: str | None = flag(None, "level of the access log; default: warning", choices=(None, *LOG_LEVELS))
    log_requests: bool = flag(False, "log each request when it comes and when it ends")
    log_requests_level: int = flag(2, "0: sizes and times; 1: sampling parameters too; 2: output text too")
    log_format: str = flag("text", "lines of text, or one JSON object a line", choices=FORMATS)
    enable_trace: bool = flag(False, "OpenTelemetry: send a span for each request (needs the extra trace)")
    otlp_traces_endpoint: str | None = flag(
        None, "collector of the spans, HOST:PORT (gRPC) or a URL (HTTP); turns tracing on; default: localhost:4317"
    )
    weight_paths: str = flag("any", "checkpoints that may be loaded over HTTP: any, none, or inside this directory")
    profile_dir: str | None = flag(
        None, "profiles are written here or in folders inside; default: tracklayer-profiles in the temporary folder"
    )
    max_body_bytes: int = flag(256 * MIB, "largest request body in bytes; beyond it 413", low=1)
    drain_timeout_s: float = flag(30.0, "seconds that running requests get to end after a stop signal")
    engine_process: bool = flag(True, "run the engine in a process of its own; --no-engine-process: in the server's")

    def __post_init__(self) -> None:
        check_flags(self)
        if not 0 <= self.port <= 65535:
            raise UserError(f"port must be in 0..65535, got {self.port}")
        if self.drain_timeout_s < 0:
            raise UserError(f"drain_timeout_s must be 0 or more seconds, got {self.drain_timeout_s}")
        if self.weight_paths not in ("any", "none") and not Path(self.weight_paths).is_dir():
            raise UserError(f"weight_paths must be any, none or a directory, got {self.weight_paths!r}")
        self.preferred()

    def preferred(self) -> dict[str, Any]:
        """preferred_sampling_params as a dict."""
        return json_object(self.preferred_sampling_params, "preferred_sampling_params")

    @property
    def traces_to(self) -> str | None:
        """Where spans go; None: nowhere."""
        return self.otlp_traces_endpoint or ("localhost:4317" if self.enable_trace else None)

    @property
    def secrets(self) -> tuple[str, ...]:
        """Names of fields that must never be shown."""
        return ("api_key", "admin_api_key")
