"""The page at `/` (one static file, no build step), and the expert load that it draws."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

from tracklayer.server.io import answer
from tracklayer.server.service import service_of

router = APIRouter(tags=["page"])
PAGE = Path(__file__).with_name("page.html")
# The page needs its own inline script and style, and talks to nobody else.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"


@router.get("/", include_in_schema=False)
async def page() -> Response:
    headers = {"Content-Security-Policy": POLICY, "X-Frame-Options": "DENY", "Cache-Control": "no-cache"}
    return HTMLResponse(PAGE.read_text(), headers=headers)


@router.get("/expert_load")
async def expert_load(request: Request) -> Response:
    """How often each expert was chosen, by MoE layer, in the routes returned since start."""
    service = service_of(request)
    load = service.expert_load
    return answer(
        {
            "layer_ids": list(service.info.layer_ids),
            "num_experts": service.info.num_experts,
            "rows": load.rows,
            "counts": load.counts_LE.tolist(),
        }
    )
