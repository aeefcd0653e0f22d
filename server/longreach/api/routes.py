"""The small endpoints: models, health, version. None of them waits for the engine."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from longreach import __version__
from longreach.api.service import Phase, Service

router = APIRouter()

_ALIVE = {Phase.LOADING, Phase.READY, Phase.DRAINING}


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """The one model that is served, with the context length that really fits."""
    return _json({"object": "list", "data": [_model(request.app.state.service)]})


@router.get("/v1/models/{name:path}")
async def retrieve_model(request: Request, name: str) -> Response:
    """One model by name."""
    service: Service = request.app.state.service
    service.require_model(name)
    return _json(_model(service))


@router.get("/health")
async def health(request: Request) -> Response:
    """Alive: 503 only where the engine is gone or does not respond. Loading, draining and long prefills are health."""
    phase: Phase = request.app.state.service.phase
    return _json({"status": phase.value}, 200 if phase in _ALIVE else 503)


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Accepting: 200 while requests can be taken, else 503."""
    phase: Phase = request.app.state.service.phase
    return _json({"status": phase.value}, 200 if phase is Phase.READY else 503)


@router.get("/version")
async def version() -> Response:
    """The server's version."""
    return _json({"version": __version__})


def _model(service: Service) -> dict[str, Any]:
    engine, _ = service.require_ready()
    return {
        "id": service.settings.name,
        "object": "model",
        "created": service.created,
        "owned_by": "longreach",
        "max_model_len": engine.info.max_model_len,
    }


def _json(value: object, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status_code=status, media_type="application/json")
