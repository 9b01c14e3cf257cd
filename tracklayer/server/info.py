"""What the server says of itself: health, model, configuration, load, metrics, models, tokenizer."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

import tracklayer
from tracklayer.errors import UserError
from tracklayer.server.docs import body_of
from tracklayer.server.errors import ApiError
from tracklayer.server.io import answer, read_body
from tracklayer.server.protocol import DetokenizeBody, TokenizeBody
from tracklayer.server.service import Service, public_config, service_of

router = APIRouter(tags=["information"])
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@router.get("/health")
@router.get("/health_generate")
@router.get("/ready")
@router.get("/ping")
async def health(request: Request) -> Response:
    """200 while the engine lives, paused or not; 503 while the server loads or stops, or after the engine died."""
    service = service_of(request)
    well = service.frontend.client.alive() and not service.stopping
    return Response(status_code=200 if well else 503)


@router.get("/model_info")
@router.get("/get_model_info")
async def model_info(request: Request) -> Response:
    service = service_of(request)
    own = {
        "load_format": service.engine_config.load_format,
        "reasoning_parser": service.config.reasoning_parser,
        "tool_call_parser": service.tool_call_parser,
    }
    return answer(service.control.model_info(service.served_name, service.tokenizer_path) | own)


@router.get("/server_info")
@router.get("/get_server_info")
async def server_info(request: Request) -> Response:
    """Every flag's value, the engine's facts and its load, flat, under SGLang's names."""
    service = service_of(request)
    single = dict.fromkeys(("dp_size", "pp_size", "moe_dp_size", "nnodes"), 1)
    return answer(
        {
            **single,
            "node_rank": 0,
            "num_gpus": service.engine_config.tp_size,
            "disaggregation_mode": "null",
            "disaggregation_bootstrap_port": None,
            "encoder_only": False,
            **public_config(service),
            "base_gpu_id": service.engine_config.base_gpu_id or 0,
            **await service.control.server_info(),
            "enable_return_routed_experts": service.info.recording,
            "model_path": service.control.model_path,
            "served_model_name": service.served_name,
            "tokenizer_path": service.tokenizer_path,
            "launch_command": service.launch_command,
            "startup_time": service.startup_s,
            "version": tracklayer.__version__,
        }
    )


async def _loads(service: Service) -> dict[str, Any]:
    return {"dp_rank": 0, **await service.control.loads()}


@router.get("/v1/loads")
async def loads(request: Request) -> Response:
    """Running and waiting requests, cache use, throughput."""
    service = service_of(request)
    return answer({"timestamp": time.time(), "version": tracklayer.__version__, "loads": [await _loads(service)]})


@router.get("/get_load")
async def get_load(request: Request) -> Response:
    """The older form of /v1/loads, which gateways still call."""
    now = await _loads(service_of(request))
    waiting = now["num_waiting_reqs"]
    total = now["num_running_reqs"] + waiting
    return answer(
        [{"dp_rank": 0, "num_reqs": total, "num_waiting_reqs": waiting, "num_tokens": now["num_used_tokens"]}]
    )


@router.get("/get_weight_version")
@router.get("/weight_version")
async def weight_version(request: Request) -> Response:
    return answer({"weight_version": service_of(request).frontend.weight_version})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text, with --enable-metrics."""
    service = service_of(request)
    if not service.config.enable_metrics:
        raise ApiError(404, "metrics are off: start the server with --enable-metrics")
    return Response(service.metrics.text(await service.control.loads()), media_type=METRICS_TYPE)


def _card(service: Service) -> dict[str, Any]:
    return {
        "id": service.served_name,
        "object": "model",
        "created": int(service.started),
        "owned_by": "tracklayer",
        "root": service.control.model_path,  # some benchmark clients load their tokenizer from it
        "parent": None,
        "max_model_len": service.info.context_length,
    }


@router.get("/v1/models")
async def models(request: Request) -> Response:
    return answer({"object": "list", "data": [_card(service_of(request))]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    service = service_of(request)
    if name == service.served_name:
        return answer(_card(service))
    error = {
        "message": f"The model '{name}' does not exist; this server serves '{service.served_name}'",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    return JSONResponse({"error": error}, 404)


@router.post("/tokenize", openapi_extra=body_of(TokenizeBody))
async def tokenize(request: Request) -> Response:
    """Token ids of text (one or several) or of a chat."""
    service = service_of(request)
    body = await read_body(request, TokenizeBody, limit_bytes=service.config.max_body_bytes)
    tokenizer, special = service.tokenizer(), body.add_special_tokens is not False
    if (body.prompt is None) == (body.messages is None):
        raise UserError("give prompt or messages")
    ids: Any
    if body.messages is not None:
        ids = tokenizer.chat_ids(body.messages)
    elif isinstance(body.prompt, list):
        ids = [tokenizer.encode(text, add_special_tokens=special) for text in body.prompt]
    else:
        ids = tokenizer.encode(str(body.prompt), add_special_tokens=special)
    count = [len(one) for one in ids] if isinstance(body.prompt, list) else len(ids)
    return answer({"tokens": ids, "count": count, "max_model_len": service.info.context_length})


@router.post("/detokenize", openapi_extra=body_of(DetokenizeBody))
async def detokenize(request: Request) -> Response:
    """Text of token ids, under SGLang's name (text) and vLLM's (prompt)."""
    service = service_of(request)
    body = await read_body(request, DetokenizeBody, limit_bytes=service.config.max_body_bytes)
    tokenizer, skip = service.tokenizer(), body.skip_special_tokens is not False
    many = bool(body.tokens) and isinstance(body.tokens[0], list)
    lists: Any = body.tokens if many else [body.tokens]
    for ids in lists:
        for token in ids:
            if not 0 <= token < service.info.vocab_size:
                raise UserError(f"tokens: {token} is outside the vocabulary (0..{service.info.vocab_size - 1})")
    texts = [tokenizer.decode(ids, skip_special_tokens=skip) for ids in lists]
    text = texts if many else texts[0]
    return answer({"text": text, "prompt": text})
