"""`GET /metrics`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from longreach.api.service.service import Service
from longreach.metrics import CONTENT_TYPE

router = APIRouter()


_TEXT = {"responses": {"200": {"description": "Metrics", "content": {"text/plain": {"schema": {"type": "string"}}}}}}


@router.get("/metrics", openapi_extra=_TEXT)
async def metrics(request: Request) -> Response:
    """The server's metrics for Prometheus."""
    service: Service = request.app.state.service
    return Response(service.metrics.scrape(), media_type=CONTENT_TYPE)
