"""The gate in front of every endpoint: is the server up, and does the caller hold the key."""

from __future__ import annotations

import hmac

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tracklayer.server.config import ServerConfig
from tracklayer.server.errors import ApiError, error_response

OPEN = ("/health", "/ready", "/ping", "/metrics")
GENERATING = ("/generate", "/v1/completions", "/v1/chat/completions", "/inference/v1/generate")


class Gate:
    """ASGI middleware. Keys are compared in constant time and never echoed.

    503 while there is no service yet (the model loads), and for generation while the server stops.
    """

    def __init__(self, app: ASGIApp, *, config: ServerConfig, control_paths: frozenset[str]) -> None:
        self.app = app
        self._key = config.api_key
        self._admin_key = config.admin_api_key or config.api_key
        self._control = control_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path: str = scope["path"]
        refusal = None if path == "/" or path.startswith(OPEN) else self._refusal(scope, path)
        service = getattr(scope["app"].state, "service", None)
        response: Response
        if refusal is not None:
            response = refusal
        elif service is None and path != "/":
            response = error_response(ApiError(503, "the model is loading"), path)
        elif service is not None and service.stopping and path in GENERATING:
            response = error_response(ApiError(503, "the server is stopping"), path)
        else:
            await self.app(scope, receive, send)
            return
        await response(scope, receive, send)

    def _refusal(self, scope: Scope, path: str) -> JSONResponse | None:
        expected = self._admin_key if path in self._control else self._key
        if expected is None:
            return None
        header = next((value for name, value in scope["headers"] if name == b"authorization"), None)
        if header is None:
            return JSONResponse({"error": "Unauthorized"}, 401, {"WWW-Authenticate": "Bearer"})
        scheme, _, given = header.partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), expected.encode()):
            return None
        return JSONResponse({"error": "Forbidden"}, 403)
