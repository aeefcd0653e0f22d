"""The ASGI application: routes, error handlers, and the middleware that gives each request its id, record and end."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI
from opentelemetry import trace
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longreach import __version__
from longreach.api.documentation import openapi, reference
from longreach.api.endpoints import (
    attention_policies,
    chat,
    completions,
    documents,
    estimate,
    files,
    identified_requests,
    messages,
    playground,
    responses,
    status,
    stored_responses,
    text,
    tokenize,
)
from longreach.api.endpoints.answer_once import REPLAYED_HEADER
from longreach.api.http import error_answers
from longreach.api.http.auth import OPEN_PATHS
from longreach.api.http.body import HeldBody
from longreach.api.http.error_forms import id_headers
from longreach.api.http.head import HeadAsGet
from longreach.api.http.request_checks import Door
from longreach.api.http.request_log import RequestRecord, network_of, request_id_from
from longreach.api.responses.answer_response import LEFT_OUT_HEADER
from longreach.api.service.service import Service
from longreach.errors import AuthenticationError
from longreach.metrics import QUIET, path_class

log = logging.getLogger("longreach.requests")


def create_app(service: Service) -> FastAPI:
    """The application of one service."""
    app = FastAPI(
        title="longreach",
        version=__version__,
        docs_url=None,  # FastAPI's pages load their scripts from a CDN
        redoc_url=None,
        redirect_slashes=False,
        # Traces go where OpenTelemetry's standard variables say; metrics are Prometheus', logs plain lines.
        telemetry={"auto_configure": True, "metrics": False, "logs": False, "exclude": _is_quiet},
    )
    app.state.service = service
    generating = (completions, chat, responses, stored_responses, messages, identified_requests)
    routed = (*generating, documents, files, text, estimate, tokenize, attention_policies, status)
    for module in (*routed, reference):
        app.include_router(module.router)
    page = playground.page_files() if service.settings.playground else {}
    app.include_router(playground.router(page))
    openapi.install(app)
    error_answers.install(app)
    app.add_middleware(HeadAsGet)
    app.add_middleware(RequestMiddleware, service=service, page=frozenset(page))
    if service.settings.allowed_origins is not None:  # around keys: a browser's preflight has none
        app.add_middleware(CORSMiddleware, **cors_options(service.settings.allowed_origins))

    def refused(record: RequestRecord) -> None:
        service.metrics.http(record.path, record.status, record.finish)
        record.log(log, _level(record))

    app.add_middleware(Door, settings=service.settings, refused=refused)
    return app


def cors_options(allowed_origins: str) -> dict[str, Any]:
    """Starlette's `CORSMiddleware` for what `--allowed-origins` says."""
    return {
        "allow_origins": allowed_origins.split(","),
        "allow_methods": ["GET", "HEAD", "POST", "DELETE"],
        # Clients put headers of their own on requests (x-stainless-os, anthropic-version); none of them opens anything.
        "allow_headers": ["*"],
        "expose_headers": [
            "request-id",
            "retry-after",
            "x-request-id",
            "x-should-retry",
            LEFT_OUT_HEADER,
            REPLAYED_HEADER,
        ],
    }


def _is_quiet(scope: Scope) -> bool:
    return path_class(scope.get("path", "")) in ("probes", "metrics")


def _level(record: RequestRecord) -> int:
    """Probes, files of the page and its polls would drown everything else in the log, unless they fail."""
    kind = path_class(record.path)
    fails = (record.status or 0) >= 400 and kind != "probes"  # of which 503 is an answer
    return logging.DEBUG if kind in QUIET and not fails else logging.INFO


class RequestMiddleware:
    """An id and a record for every request, one log line, and an answer to what nobody else caught.

    Nothing but the probes and the playground's files is reached without a key, and bodies count towards
    `--max-total-body-bytes` from their first byte to the end of their request, whose memory depends on theirs. Of an
    upload those count that have come and are not kept yet.
    """

    def __init__(self, app: ASGIApp, service: Service, page: frozenset[str] = frozenset()) -> None:
        self._app = app
        self._service = service
        # The page asks for a key itself; its files are the same for everybody.
        self._open = OPEN_PATHS | {path.encode() for path in page}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI)."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        assert scope["type"] == "http", "the server is configured without websockets"
        headers = dict(scope["headers"])
        # The raw path is ASCII without control characters, so it cannot forge a line of the log.
        path = scope["raw_path"][:256].decode("ascii", "replace")
        request_id, address = request_id_from(headers.get(b"x-request-id")), network_of(scope.get("client"))
        record = RequestRecord(request_id, scope["method"][:16], path, address)
        scope.setdefault("state", {})["record"] = record
        trace.get_current_span().set_attribute("longreach.request_id", record.request_id)

        held = scope["state"]["held_body"] = HeldBody(self._service.bodies, record)

        async def receive_bounded() -> Message:
            message = await receive()
            held.add(len(message.get("body", b"")))
            return message

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.answered(message["status"])
                message["headers"] = [*message["headers"], *id_headers(scope, record.request_id)]
            await send(message)

        try:
            with self._service.open_request(), record.at_end:
                self._authenticate(scope["raw_path"], headers, record)
                await self._app(scope, receive_bounded, send_with_id)
        except ClientDisconnect:
            record.disconnected()
        except Exception as error:  # noqa: BLE001 - the last resort: nothing internal may reach the caller
            api_error = error_answers.as_api_error(error, record.request_id)
            record.finished(api_error.code)
            if record.status is None:
                await error_answers.error_response(api_error, scope, record.request_id)(scope, receive, send_with_id)
        finally:
            held.close()
            self._service.metrics.http(path, record.status, record.finish)
            record.log(log, _level(record))

    def _authenticate(self, raw_path: bytes, headers: dict[bytes, bytes], record: RequestRecord) -> None:
        if not self._service.keys:
            return
        record.authenticated(self._service.keys.find(headers))
        if record.key is None and raw_path not in self._open:
            raise AuthenticationError
