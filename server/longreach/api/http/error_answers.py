"""Every way a request can fail becomes an error object of its protocol; nothing internal leaves the process."""

from __future__ import annotations

import logging

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from longreach.api.http.error_forms import error_object
from longreach.api.schema.requests.parse import as_demand
from longreach.engine.errors import EngineDeadError, EngineError, QueueFullError, RequestFailedError, SlowReaderError
from longreach.errors import (
    ApiError,
    HttpError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
    quoted,
)

log = logging.getLogger(__name__)

_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


class ClientGoneError(Exception):
    """The caller closed the connection; nobody is left to answer."""


def error_response(error: ApiError, scope: Scope, request_id: str) -> Response:
    """An error as the HTTP answer to a request."""
    body = orjson.dumps(error_object(error, scope, request_id))
    return Response(body, status_code=error.status, headers=error.headers, media_type="application/json")


def as_api_error(error: Exception, request_id: str) -> ApiError:
    """What the caller is told of `error`. What only the operator should know is logged under the request id."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError):
        # Clients that send it again unasked might send again what the engine died of.
        return UnavailableError(
            "The engine has stopped; this request cannot be finished.", code="engine_dead", retry=False
        )
    if isinstance(error, QueueFullError):
        return OverloadedError(f"The server is busy: {error}.", error.retry_after)
    if isinstance(error, SlowReaderError):
        message = f"The answer was read too slowly: {error}, which is more than is kept for a reader."
        return HttpError(message, code="slow_reader", status=408, headers={"x-should-retry": "false"})
    if isinstance(error, RequestFailedError):
        if error.kind != "internal":
            return InvalidRequestError(str(error), code="invalid_value")
        log.error("request %s failed in the engine: %s", request_id, error)
        return InternalError(request_id)
    log.error("request %s failed", request_id, exc_info=error)
    return InternalError(request_id)


def install(app: FastAPI) -> None:
    """Register the handlers. An unexpected exception is caught further out, by the request's middleware."""
    app.add_exception_handler(ApiError, _on_error)
    app.add_exception_handler(ClientGoneError, _on_departure)
    app.add_exception_handler(EngineError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)


async def _on_error(request: Request, error: Exception) -> Response:
    return _refusal(request, as_api_error(error, request.state.record.request_id))


async def _on_departure(request: Request, error: Exception) -> Response:
    request.state.record.disconnected()
    return Response(status_code=499)  # for the log; nobody reads it


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method[:16]} {quoted(request.url.path)}"
    headers = dict(error.headers or {})
    if error.status_code == 404:
        message, code = f"Unknown URL: {where}.", "not_found"
    elif error.status_code == 405:
        headers["Allow"] = ", ".join(_allowed(request))
        message, code = f"Method not allowed: {where}. Send {headers['Allow']}.", "method_not_allowed"
    else:
        message, code = str(error.detail), None
    http_error = HttpError(message, code=code, status=error.status_code, headers=headers)
    return _refusal(request, http_error)


def _allowed(request: Request) -> list[str]:
    """All methods of a path, which may be those of several routes (RFC 9110, section 10.2.1)."""

    def is_there(method: str) -> bool:
        scope = {**request.scope, "method": method}
        return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)

    found = [method for method in _METHODS if is_there(method)]
    return sorted([*found, "HEAD"] if "GET" in found else found)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problem = error.errors()[0]
    param, given = str(problem["loc"][-1])[:64], quoted(problem["input"])
    why = as_demand(problem["msg"])
    return _refusal(request, InvalidRequestError(f"`{param}`: {why}, got {given}.", param=param, code="invalid_value"))


def _refusal(request: Request, error: ApiError) -> Response:
    request.state.record.finished(error.code)
    return error_response(error, request.scope, request.state.record.request_id)
