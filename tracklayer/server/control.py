"""Control endpoints: cache, abort, pause, memory, weights, profiling. SGLang's names, bodies and replies."""

from __future__ import annotations

import math
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from tracklayer.engine.control_plane import Outcome
from tracklayer.errors import UserError
from tracklayer.server import protocol
from tracklayer.server.docs import body_of
from tracklayer.server.errors import ApiError
from tracklayer.server.io import B, answer, read_body
from tracklayer.server.service import service_of

router = APIRouter(tags=["control"])
BOTH = ["GET", "POST"]

# Known to clients, not built: named here so that they get an answer that says so, and what to do instead.
_TRANSPORT = "write a checkpoint and POST /update_weights_from_disk"
NOT_BUILT = {
    "/update_weights_from_tensor": _TRANSPORT,
    "/init_weights_update_group": _TRANSPORT,
    "/update_weights_from_distributed": _TRANSPORT,
    "/destroy_weights_update_group": _TRANSPORT,
    "/update_weights_from_ipc": _TRANSPORT,
    "/init_weight_transfer_engine": _TRANSPORT,
    "/start_weight_update": _TRANSPORT,
    "/update_weights": _TRANSPORT,
    "/finish_weight_update": _TRANSPORT,
    "/pull_weights": "copy the checkpoint to this host and POST /update_weights_from_disk",
    "/parallelism_config": "there is one rank; POST /weights_checker shows its parallelism_info",
    "/load_lora_adapter": "merge the adapter into the checkpoint",
    "/unload_lora_adapter": "there are no adapters",
    "/open_session": "send the whole prompt: the prefix cache finds what it shares",
    "/close_session": "there are no sessions",
    "/set_internal_state": "give the flags at the start",
    "/configure_logging": "use --log-level, --log-requests and --log-format at the start",
    "/slow_down": "use /pause_generation",
    "/start_expert_distribution_record": "GET /expert_load, or ask requests for their routes",
    "/stop_expert_distribution_record": "GET /expert_load, or ask requests for their routes",
    "/dump_expert_distribution_record": "GET /expert_load, or ask requests for their routes",
}


async def _body(request: Request, kind: type[B]) -> B:
    return await read_body(request, kind, limit_bytes=service_of(request).config.max_body_bytes, optional=True)


def _outcome(outcome: Outcome, **more: Any) -> Response:
    """{success, message, ...}; failure goes out as 400 with the same JSON."""
    success, message = outcome
    response = answer({"success": success, "message": message, **more})
    response.status_code = 200 if success else 400
    return response


_TIMEOUT = {"name": "timeout", "in": "query", "schema": {"type": "number", "minimum": 0, "maximum": 3600}}


@router.api_route("/flush_cache", methods=BOTH, openapi_extra={"parameters": [_TIMEOUT]})
async def flush_cache(request: Request) -> Response:
    """Empty the prefix cache, waiting up to `timeout` seconds for requests to end."""
    timeout = request.query_params.get("timeout", "0")
    try:
        timeout_s = float(timeout)
    except ValueError:
        timeout_s = math.nan
    if not 0 <= timeout_s <= 3600:
        raise UserError(f"timeout must be a number of seconds in 0..3600, got {timeout!r}")
    if await service_of(request).control.flush_cache(timeout_s):
        return PlainTextResponse("Cache flushed.\n")
    return PlainTextResponse("Cache not flushed: requests are running or waiting.\n", 400)


@router.post("/abort_request", openapi_extra=body_of(protocol.AbortBody, required=False))
async def abort_request(request: Request) -> Response:
    """Abort every request whose id begins with `rid`, or all; an unknown id is fine."""
    body = await _body(request, protocol.AbortBody)
    service_of(request).frontend.abort(body.rid or "", everything=bool(body.abort_all))
    return Response()


@router.post("/pause_generation", openapi_extra=body_of(protocol.PauseBody, required=False))
async def pause_generation(request: Request) -> Response:
    """Stop stepping: abort, retract or in_place. New requests are accepted and wait."""
    body = await _body(request, protocol.PauseBody)
    await service_of(request).control.pause(body.mode or "abort")
    return answer({"message": "Generation paused.", "status": "ok"})


@router.post("/continue_generation", openapi_extra=body_of(protocol.EmptyBody, required=False))
async def continue_generation(request: Request) -> Response:
    await _body(request, protocol.EmptyBody)
    await service_of(request).control.resume()
    return answer({"message": "Generation continued.", "status": "ok"})


@router.post("/update_weights_from_disk", openapi_extra=body_of(protocol.DiskUpdateBody))
async def update_weights_from_disk(request: Request) -> Response:
    """Load another checkpoint of the same architecture."""
    body, control = await _body(request, protocol.DiskUpdateBody), service_of(request).control
    outcome = await control.update_weights_from_disk(
        body.model_path,
        load_format=body.load_format,
        flush_cache=body.flush_cache is not False,
        abort_all_requests=bool(body.abort_all_requests),
        weight_version=body.weight_version,
    )
    return _outcome(outcome, num_paused_requests=0)


@router.post("/begin_weight_update", openapi_extra=body_of(protocol.EmptyBody, required=False))
@router.post("/end_weight_update", openapi_extra=body_of(protocol.EmptyBody, required=False))
@router.post("/post_process_weights", openapi_extra=body_of(protocol.EmptyBody, required=False))
async def bracket(request: Request) -> Response:
    """Brackets around updates that some clients send; updates here need none."""
    await _body(request, protocol.EmptyBody)
    return _outcome((True, "Nothing to do: weight updates need no bracket."))


@router.post("/update_weight_version", openapi_extra=body_of(protocol.WeightVersionBody))
async def update_weight_version(request: Request) -> Response:
    body, control = await _body(request, protocol.WeightVersionBody), service_of(request).control
    abort = body.abort_all_requests is not False
    outcome = await control.update_weight_version(body.new_version, abort_all_requests=abort)
    return _outcome(outcome, new_version=body.new_version)


_NAME = {"name": "name", "in": "query", "schema": {"type": "string"}}
_SIZE = {"name": "truncate_size", "in": "query", "schema": {"type": "integer", "minimum": 0}}


@router.api_route(
    "/get_weights_by_name",
    methods=BOTH,
    openapi_extra=body_of(protocol.WeightNameBody, required=False) | {"parameters": [_NAME, _SIZE]},
)
async def get_weights_by_name(request: Request) -> Response:
    """The first `truncate_size` rows of a weight, by its checkpoint name (in the body or the query)."""
    query = request.query_params
    if "name" in query:
        size = query.get("truncate_size", "100")
        if not size.isdecimal() or len(size) > 18:
            raise UserError(f"truncate_size must be a whole number, got {size!r}")
        body = protocol.WeightNameBody(name=query["name"], truncate_size=int(size))
    else:
        body = await _body(request, protocol.WeightNameBody)
    size_of = 100 if body.truncate_size is None else body.truncate_size
    return answer(await service_of(request).control.get_weights_by_name(body.name, size_of))


@router.api_route(
    "/release_memory_occupation", methods=BOTH, openapi_extra=body_of(protocol.MemoryBody, required=False)
)
async def release_memory(request: Request) -> Response:
    """Give the memory of the tags kv_cache, weights, cuda_graph (none named: all) back; new requests wait."""
    body = await _body(request, protocol.MemoryBody)
    await service_of(request).control.release_memory(body.tags)
    return answer(None)


@router.api_route("/resume_memory_occupation", methods=BOTH, openapi_extra=body_of(protocol.MemoryBody, required=False))
async def resume_memory(request: Request) -> Response:
    """Take released memory again; what waited goes on when all of it is back."""
    body = await _body(request, protocol.MemoryBody)
    await service_of(request).control.resume_memory(body.tags)
    return answer(None)


@router.api_route("/weights_checker", methods=BOTH, openapi_extra=body_of(protocol.WeightsCheckerBody, required=False))
async def weights_checker(request: Request) -> Response:
    """Checksums of the weights; or snapshot, reset_tensors and compare around an update."""
    body, control = await _body(request, protocol.WeightsCheckerBody), service_of(request).control
    success, message, more = await control.check_weights(body.action or "checksum", body.skip_tensor_list)
    return _outcome((success, message), **more)


@router.api_route("/start_profile", methods=BOTH, openapi_extra=body_of(protocol.ProfileBody, required=False))
async def start_profile(request: Request) -> Response:
    """Profile the engine's steps with torch's profiler; a body of another kind (a generation's) asks for nothing."""
    body = await _body(request, protocol.ProfileBody)
    await service_of(request).control.start_profile(
        body.output_dir,
        start_step=body.start_step,
        num_steps=body.num_steps,
        activities=body.activities,
        with_stack=bool(body.with_stack),
        record_shapes=bool(body.record_shapes),
    )
    return PlainTextResponse("Profiling started.\n")


@router.api_route("/stop_profile", methods=BOTH)
async def stop_profile(request: Request) -> Response:
    """End the profile and write its trace."""
    path = await service_of(request).control.stop_profile()
    return PlainTextResponse(f"Profile written to {path}.\n" if path else "The profile had not begun.\n")


@router.api_route("/freeze_gc", methods=BOTH)
async def freeze_gc(request: Request) -> Response:
    """Keep what lives now, in this process and the engine's, out of later garbage collections."""
    await service_of(request).control.freeze_gc()
    return PlainTextResponse("Garbage collection frozen.\n")


async def not_built(request: Request) -> Response:
    path = request.url.path
    raise ApiError(501, f"{path} is not available in this version of Tracklayer; {NOT_BUILT[path]}")


for _path in NOT_BUILT:
    router.add_api_route(_path, not_built, methods=BOTH, include_in_schema=False)

CONTROL_PATHS = frozenset(route.path for route in router.routes)  # type: ignore[attr-defined]
