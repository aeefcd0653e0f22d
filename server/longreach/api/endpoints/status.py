"""The small endpoints: models, health, readiness, version, metrics. None of them waits for the engine."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from longreach import __version__
from longreach.api.documentation.openapi import documented
from longreach.api.endpoints.model_page import model_info, model_page
from longreach.api.http.error_forms import speaks_anthropic
from longreach.api.http.respond import json_response
from longreach.api.schema.answers.messages import ModelInfo
from longreach.api.schema.answers.status import (
    Model,
    ModelList,
    RopeTableInfo,
    SamplingDefaults,
    Status,
    Version,
)
from longreach.api.service.service import Phase, Service
from longreach.metrics import CONTENT_TYPE

router = APIRouter()

_METRICS = {"responses": {"200": {"description": "Metrics", "content": {"text/plain": {"schema": {"type": "string"}}}}}}


@router.get("/v1/models", **documented(None, ModelList))
async def list_models(request: Request) -> Response:
    """The one model that is served, once for each of its names, with the context length that really fits.

    `sampling_defaults` has the values that requests get where they do not name `temperature`, `top_p`, `top_k`, `min_p`
    or `repetition_penalty`. `description` says what the embedded model can do, in a line for people; of other models it
    is null. A request with the header `anthropic-version` gets Anthropic's list instead.
    """
    service: Service = request.app.state.service
    if speaks_anthropic(request.scope):
        infos = [_info(service, name) for name in service.settings.names]
        return json_response(model_page(infos, request.query_params))
    return json_response(ModelList("list", [_model(service, name) for name in service.settings.names]))


@router.get("/v1/models/{name:path}", **documented(None, Model, refusals=("401", "404", "500", "503")))
async def retrieve_model(request: Request, name: str) -> Response:
    """The model by one of its names."""
    service: Service = request.app.state.service
    service.require_model(name)
    return json_response(_info(service, name) if speaks_anthropic(request.scope) else _model(service, name))


@router.get("/health", **documented(None, Status, refusals=("500",), also={"503": Status}))
async def health(request: Request) -> Response:
    """Alive: 503 only where the engine is gone or does not respond. Loading, draining and long prefills are health."""
    return _status(request.app.state.service.phase, Phase.LOADING, Phase.READY, Phase.DRAINING)


@router.get("/ready", **documented(None, Status, refusals=("500",), also={"503": Status}))
async def ready(request: Request) -> Response:
    """Accepting: 200 while requests are taken; 503 while loading, draining, or without an engine."""
    return _status(request.app.state.service.phase, Phase.READY)


@router.get("/version", **documented(None, Version, refusals=("401", "500")))
async def version() -> Response:
    """The server's version."""
    return json_response(Version(__version__))


@router.get("/metrics", openapi_extra=_METRICS)
async def metrics(request: Request) -> Response:
    """The server's metrics for Prometheus."""
    service: Service = request.app.state.service
    return Response(service.metrics.scrape(), media_type=CONTENT_TYPE)


def _status(phase: Phase, *good: Phase) -> Response:
    return json_response(Status(phase.value), 200 if phase in good else 503)


def _info(service: Service, name: str) -> ModelInfo:
    engine, _ = service.require_ready()
    return model_info(name, service.created, engine.info.max_model_len)


def _model(service: Service, name: str) -> Model:
    engine, _ = service.require_ready()
    settings, defaults = service.settings, service.sampling_defaults
    return Model(
        id=name,
        object="model",
        created=service.created,
        owned_by="longreach",
        max_model_len=engine.info.max_model_len,
        description=settings.description,
        sampling_defaults=SamplingDefaults(
            temperature=defaults.temperature,
            top_p=defaults.top_p,
            top_k=defaults.top_k,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
        ),
        quantization=engine.info.quantization or None,
        weight_bytes=engine.info.weight_bytes,
        rope_tables=[RopeTableInfo(*msgspec.structs.astuple(table)) for table in engine.info.rope_tables] or None,
    )
