"""Errors on the wire: every failure has a status and the shape that the surface's clients expect."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from tracklayer.engine.sampling import SamplingFieldError
from tracklayer.errors import TracklayerError

RETRY_AFTER_S = 1
CLIENT_GONE = 499


class SchemaError(TracklayerError):
    """The body is not JSON, or a field has the wrong type."""

    status = 400


class ApiError(TracklayerError):
    """Any other failure with a status of its own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def native_shape(error: TracklayerError) -> dict[str, Any]:
    """SGLang's native bodies: they differ by kind of error."""
    message, status = str(error), error.status
    if isinstance(error, SamplingFieldError):
        return {"error": message}
    if isinstance(error, SchemaError) or status in (404, 405, 413, 501):
        kind = HTTPStatus(status).phrase
        return {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    if status >= 500:
        return {"object": "error", "message": message, "type": str(status), "param": None, "code": status}
    return {"error": {"message": message}}


def openai_shape(error: TracklayerError) -> dict[str, Any]:
    """The flat body of the OpenAI endpoints."""
    kinds = {400: "BadRequestError", 404: "NotFoundError", 503: "ServiceUnavailableError"}
    kind = kinds.get(error.status, "InternalServerError" if error.status >= 500 else "BadRequestError")
    return {"object": "error", "message": str(error), "type": kind, "param": None, "code": error.status}


def is_openai(path: str) -> bool:
    return path.startswith(("/v1/chat", "/v1/completions", "/inference"))


def error_response(error: TracklayerError, path: str) -> Response:
    shape = openai_shape if is_openai(path) else native_shape
    headers = {"Retry-After": str(RETRY_AFTER_S)} if error.status == 503 else None
    return JSONResponse(shape(error), error.status, headers)


def stream_error(error: TracklayerError, path: str) -> dict[str, Any]:
    """The body of an error event inside a stream that has begun."""
    if is_openai(path):
        return {"error": openai_shape(error)}
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    retryable = error.status == 503
    return {"error": {"message": str(error), "type": kind, "code": error.status, "retryable": retryable}}


async def on_tracklayer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TracklayerError)
    return error_response(error, request.url.path)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, in our shapes."""
    assert isinstance(error, HTTPException)
    response = error_response(ApiError(error.status_code, str(error.detail)), request.url.path)
    response.headers.update(error.headers or {})
    return response


async def on_unfit_query(request: Request, error: Exception) -> Response:
    """A query parameter of the wrong type: 400, as for a field of a body."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:])
    return error_response(SchemaError(f"{where}: {first['msg']}"), request.url.path)


async def on_fault(request: Request, error: Exception) -> Response:
    """A fault of ours: the text stays in the log."""
    return error_response(ApiError(500, f"internal error ({type(error).__name__})"), request.url.path)
