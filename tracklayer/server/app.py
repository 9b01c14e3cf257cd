"""The application: wires endpoints, gate and error shapes together. No logic here."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

import tracklayer
from tracklayer.errors import TracklayerError
from tracklayer.server import control, inference, info, native, openai_chat, openai_completions, page, vllm_control
from tracklayer.server.config import ServerConfig
from tracklayer.server.docs import Application
from tracklayer.server.errors import on_fault, on_http_error, on_tracklayer_error, on_unfit_query
from tracklayer.server.gate import Gate
from tracklayer.server.service import Service
from tracklayer.server.tracing import TraceContext

ROUTERS = (native, openai_completions, openai_chat, inference, control, vllm_control, info, page)


def create_app(config: ServerConfig, service: Service | None = None) -> FastAPI:
    """The ASGI application. Until `app.state.service` is set it answers 503."""
    app = Application(title="Tracklayer", version=tracklayer.__version__, docs_url="/docs", redoc_url=None)
    app.state.service = service
    for module in ROUTERS:
        app.include_router(module.router)
    app.add_exception_handler(TracklayerError, on_tracklayer_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_unfit_query)
    app.add_exception_handler(Exception, on_fault)
    if config.traces_to is not None:
        app.add_middleware(TraceContext)
    app.add_middleware(Gate, config=config, control_paths=control.CONTROL_PATHS | vllm_control.PATHS)
    return app
