"""vLLM's names for controls that trainers use: pause and resume, sleep and wake_up, reset_prefix_cache."""

from __future__ import annotations

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from tracklayer.errors import UserError
from tracklayer.server.io import answer
from tracklayer.server.service import service_of

router = APIRouter(tags=["control"])
PAUSES = {"abort": "abort", "keep": "in_place"}
RESTING = ("kv_cache", "weights")  # the graphs go with them and come again when both are back


@router.post("/pause")
async def pause(request: Request, mode: str = "abort", clear_cache: bool = True) -> Response:
    """Stop stepping. abort: what runs ends; keep: it is frozen. `clear_cache`: empty the prefix cache where nothing
    runs."""
    if mode not in PAUSES:
        raise UserError(f"mode must be one of {', '.join(PAUSES)}, got {mode!r}")
    control = service_of(request).control
    await control.pause(PAUSES[mode])
    if clear_cache and mode == "abort":
        await control.flush_cache()
    return answer({"status": "paused"})


@router.post("/resume")
async def resume(request: Request) -> Response:
    await service_of(request).control.resume()
    return answer({"status": "resumed"})


@router.get("/is_paused")
async def is_paused(request: Request) -> Response:
    return answer({"is_paused": (await service_of(request).control.loads())["paused"]})


@router.post("/sleep")
async def sleep(request: Request, level: int = 1, tags: list[str] | None = Query(None)) -> Response:  # noqa: B008
    """Give the memory of the cache and the weights (or of these tags) back. Level 1 and 2 are one here: whether weights
    keep a copy in host memory is a flag of the server's."""
    if level not in (1, 2):
        raise UserError(f"level must be 1 or 2, got {level}")
    await service_of(request).control.release_memory(tags or list(RESTING))
    return Response()


@router.post("/wake_up")
async def wake_up(request: Request, tags: list[str] | None = Query(None)) -> Response:  # noqa: B008
    """Take the memory of these tags (none: all) again."""
    await service_of(request).control.resume_memory(tags)
    return Response()


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> Response:
    return answer({"is_sleeping": bool((await service_of(request).control.loads())["released_memory"])})


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Empty the prefix cache; 400 while requests hold it."""
    if not await service_of(request).control.flush_cache():
        raise UserError("the cache was not emptied: requests are running or waiting")
    return Response()


@router.get("/get_world_size")
async def world_size() -> Response:
    return answer({"world_size": 1})


PATHS = frozenset(route.path for route in router.routes)  # type: ignore[attr-defined]
