"""What every endpoint works with: the front end, the controls, the configurations, the state of the server."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields
from typing import Any

from fastapi import Request

from tracklayer.config import EngineConfig, load_generation_config
from tracklayer.engine.client import EngineClient, EngineInfo
from tracklayer.engine.control_plane import PROFILES, ControlPlane
from tracklayer.engine.frontend import Observer, TextFrontend
from tracklayer.engine.intake import Intake
from tracklayer.engine.tokenizer import TextTokenizer
from tracklayer.errors import UserError
from tracklayer.routes.codec import encode, encode_packed, encode_sglang
from tracklayer.routes.forms import RouteShape
from tracklayer.routes.record import Routes
from tracklayer.server.config import ServerConfig
from tracklayer.server.expert_load import ExpertLoad
from tracklayer.server.metrics import Metrics
from tracklayer.server.request_log import Observers, RequestLog
from tracklayer.server.tool_formats import told_by
from tracklayer.server.tracing import Tracing, exporter_to

ROUTE_FORMATS = ("int32", "packed", "npy")
# generation_config.json's keys that a chat request may leave to it
CHAT_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(slots=True)
class Service:
    """One running server. `chat_defaults`: the checkpoint's own sampling parameters, used by chat only."""

    frontend: TextFrontend
    control: ControlPlane
    config: ServerConfig
    engine_config: EngineConfig
    metrics: Metrics
    expert_load: ExpertLoad
    chat_defaults: dict[str, Any]
    launch_command: str = ""
    tool_call_parser: str | None = None  # by name, no longer auto
    started: float = field(default_factory=time.time)
    startup_s: float = 0.0
    stopping: bool = False

    @property
    def info(self) -> EngineInfo:
        return self.frontend.client.info

    @property
    def served_name(self) -> str:
        return self.config.served_model_name or self.control.model_path

    @property
    def tokenizer_path(self) -> str:
        return self.engine_config.tokenizer_path or self.engine_config.model_path

    def tokenizer(self) -> TextTokenizer:
        """The tokenizer. Raises UserError on a server without one."""
        if self.frontend.tokenizer is None:
            raise UserError("this needs a tokenizer, which --skip-tokenizer-init left out")
        return self.frontend.tokenizer

    def wire_routes(self, routes: Routes, form: str, *, binary: bool = False) -> Any:
        """Routes as a reply carries them: text for JSON; with `binary` bytes (packed: an object with bytes).

        int32: SGLang's, all decoder layers; packed: narrow and self-describing; npy: a .npy file, all decoder layers.
        """
        sent = self._encode(routes, form, binary=binary)
        self.metrics.routes_sent(routes)
        self.expert_load.add(routes)
        return sent

    def _encode(self, routes: Routes, form: str, *, binary: bool) -> Any:
        shape = RouteShape.of(routes, self.info.num_layers)
        if form == "packed":
            return encode_packed(routes, binary=binary)
        if form == "npy":
            return encode(routes, "npy" if binary else "vllm_0.22", shape, layers="all", missing=None)
        if binary:
            return encode(routes, "sglang", shape, container="bytes")
        return encode_sglang(routes, self.info.num_layers)


def route_format(asked: str | None) -> str:
    """The checked `routed_experts_format` of a request."""
    if asked is not None and asked not in ROUTE_FORMATS:
        raise UserError(f"routed_experts_format must be one of {', '.join(ROUTE_FORMATS)}, got {asked!r}")
    return asked or "int32"


def build_service(
    client: EngineClient,
    tokenizer: TextTokenizer | None,
    config: ServerConfig,
    engine_config: EngineConfig,
    launch_command: str = "",
) -> Service:
    """Everything between a running engine and the endpoints."""
    if config.return_routed_experts_by_default and not client.info.recording:
        raise UserError("--return-routed-experts-by-default needs --enable-return-routed-experts")
    intake = Intake(
        client.info,
        tokenizer,
        random_seed=engine_config.random_seed,
        limits=config,
        default_sampling=config.preferred(),
        auto_truncate=config.allow_auto_truncate,
        stream_interval=config.stream_interval,
    )
    metrics = Metrics(config.served_model_name or engine_config.model_path, client.info.route_selftest)
    watchers: list[Observer] = [metrics] if config.enable_metrics else []
    watchers += [RequestLog(config.log_requests_level)] if config.log_requests else []
    watchers += [Tracing(exporter_to(config.traces_to))] if config.traces_to else []
    frontend = TextFrontend(
        client,
        tokenizer,
        intake=intake,
        weight_version=engine_config.weight_version,
        observer=Observers(*watchers),
    )
    control = ControlPlane(
        frontend,
        model_path=engine_config.model_path,
        weight_paths=config.weight_paths,
        profile_dir=config.profile_dir or str(PROFILES),
    )
    load = ExpertLoad(len(client.info.layer_ids), client.info.num_experts)
    defaults = generation_defaults(engine_config.model_path) if config.sampling_defaults == "model" else {}
    form = config.tool_call_parser
    if form == "auto":
        form = told_by(tokenizer.chat_template if tokenizer else None)
    return Service(frontend, control, config, engine_config, metrics, load, defaults, launch_command, form)


def generation_defaults(model_path: str) -> dict[str, Any]:
    """The checkpoint's own sampling parameters (generation_config.json), where it has any."""
    raw = load_generation_config(model_path)
    found = {key: raw[key] for key in CHAT_DEFAULTS if raw.get(key) is not None}
    if raw.get("do_sample") is False:
        found["temperature"] = 0.0
    if found.get("top_k") == 0:  # Hugging Face's word for all
        found["top_k"] = -1
    return found


def public_config(service: Service) -> dict[str, Any]:
    """Every flag's value but the secrets'."""
    out = {}
    for config in (service.engine_config, service.config):
        for f in fields(config):
            if f.name not in service.config.secrets:
                out[f.name] = getattr(config, f.name)
    return out


def service_of(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service
