"""The ASGI application: routes, error handlers, and the middleware that gives each request its id, record and end."""

from __future__ import annotations

import logging

from fastapi import FastAPI
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longreach import __version__
from longreach.api import chat, completions, errors, openapi, reference, responses, routes, tokens
from longreach.api.record import RequestRecord, request_id_from
from longreach.api.service import Service

log = logging.getLogger("longreach.requests")

_QUIET = {"/health", "/ready"}  # probes would drown everything else


def create_app(service: Service) -> FastAPI:
    """The application of one service."""
    app = FastAPI(
        title="longreach",
        version=__version__,
        docs_url=None,  # FastAPI's pages load their scripts from a CDN
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    for module in (completions, chat, responses, tokens, routes, reference):
        app.include_router(module.router)
    openapi.install(app)
    errors.install(app)
    app.add_middleware(RequestMiddleware, service=service)
    return app


class RequestMiddleware:
    """Outermost: an id and a record for every request, one log line, and an answer to what nobody else caught."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI)."""
        assert scope["type"] == "http", "the server is configured without websockets and lifespan"
        headers = dict(scope["headers"])
        # The raw path is ASCII without control characters, so it cannot forge a line of the log.
        path = scope["raw_path"][:256].decode("ascii", "replace")
        record = RequestRecord(request_id_from(headers.get(b"x-request-id")), scope["method"][:16], path)
        scope.setdefault("state", {})["record"] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", record.request_id.encode())]
            await send(message)

        try:
            with self._service.open_request():
                await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            record.finish = "disconnected"
        except Exception as error:  # noqa: BLE001 - the last resort: nothing internal may reach the caller
            api_error = errors.as_api_error(error, record.request_id)
            record.finish = api_error.code
            if record.status is None:
                await errors.error_response(api_error)(scope, receive, send_with_id)
        finally:
            log.log(logging.DEBUG if path in _QUIET else logging.INFO, "%s", record.line())
