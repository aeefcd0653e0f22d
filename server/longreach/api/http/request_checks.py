"""What HTTP asks of every request before anybody looks at what it wants: a target, a host that is ours, one key.

This is the outermost layer of the application, and of the ingress of a cluster. What it refuses reaches nothing else:
no route, no CORS headers, no body.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from urllib.parse import unquote

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longreach.allowed_hosts import Hosts, host_of
from longreach.api.http.auth import OPEN_PATHS
from longreach.api.http.error_answers import error_response
from longreach.api.http.error_forms import id_headers
from longreach.api.http.request_log import RequestRecord, request_id_from
from longreach.config import Settings
from longreach.errors import ApiError, HttpError, quoted
from longreach.setting_values import is_loopback

Headers = list[tuple[bytes, bytes]]

_ABSOLUTE = re.compile(rb"https?://([^/?#]*)(.*)", re.IGNORECASE | re.DOTALL)
_ALLOW = "GET, HEAD, POST, OPTIONS"


class Door:
    """An ASGI application around another, with the rules of RFC 9110 and 9112 that need no route.

    A target in absolute form is served as its path, and its authority replaces `Host`. `refused` is told of each
    request that goes no further. `echoes_id` says whether an id that the request brought is put on the answer here.
    """

    def __init__(
        self, app: ASGIApp, settings: Settings, refused: Callable[[RequestRecord], None], *, echoes_id: bool = True
    ) -> None:
        self._app = app
        self._refused = refused
        self._echoes_id = echoes_id
        self._hosts = allowed_hosts(settings)
        # A kubelet or a balancer asks by the address that it sees, which nobody here knows in advance. Nothing but the
        # server's phase is in the answer.
        self._by_any_host = frozenset[bytes]() if is_loopback(settings.host) else OPEN_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI)."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":  # a server other than ours may offer one; closing it unopened is a 403
            await receive()
            await send({"type": "websocket.close"})
        else:
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        closing = _framed_twice(scope["headers"])

        async def send_closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        ends = send_closing if closing else send
        try:
            scope = _in_origin_form(scope)
            self._check(scope)
        except ApiError as error:
            await self._refuse(error, scope, receive, ends)
            return
        if scope["raw_path"] == b"*":
            await self._refuse(None, scope, receive, ends)
            return
        await self._app(scope, receive, ends)

    def _check(self, scope: Scope) -> None:
        headers: Headers = scope["headers"]
        host = _host(headers, scope.get("http_version", "1.1"))
        if self._hosts is not None and host not in self._hosts:
            probe = scope["raw_path"] in self._by_any_host and scope["method"] in ("GET", "HEAD")
            if not probe:
                raise HttpError(
                    f"This server does not answer to the host {quoted(host)}. If that is its name, start it with "
                    "--allowed-hosts and that name.",
                    code="host_not_allowed",
                    status=421,
                )
        for name in ("Authorization", "x-api-key"):
            if len(values(headers, name.lower().encode())) > 1:
                # Whoever stands in front may have looked at another one than we would.
                raise HttpError(f"Send one {name} header, not several.", code="invalid_http", status=400)
        expected = b",".join(values(headers, b"expect")).strip().lower()
        if expected not in (b"", b"100-continue"):
            raise HttpError("Expect may be 100-continue only.", code="expectation_failed", status=417)

    async def _refuse(self, error: ApiError | None, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with an error, or to `OPTIONS *`."""
        headers: Headers = scope["headers"]
        given = values(headers, b"x-request-id")
        path = (scope.get("raw_path") or scope["path"].encode())[:256].decode("ascii", "replace")
        record = RequestRecord(request_id_from(given[-1] if given else None), scope["method"][:16], path)
        if error is None:
            response = Response(status_code=204, headers={"Allow": _ALLOW})
        else:
            response = error_response(error, scope, record.request_id)
            record.finished(error.code)
        record.answered(response.status_code)
        if self._echoes_id or given != [record.request_id.encode()]:
            response.raw_headers += id_headers(scope, record.request_id)
        await response(scope, receive, send)
        self._refused(record)


def allowed_hosts(settings: Settings) -> Hosts | None:
    """The hosts that are answered; None where any may be named.

    On a loopback address without keys these are the names of this machine, and `--allowed-hosts`. Elsewhere a page
    that has no key gets nothing, or the operator has said that everybody may come.
    """
    if settings.allowed_hosts is not None:
        return Hosts.parse(settings.allowed_hosts)
    has_keys = settings.api_key is not None or settings.api_key_file is not None
    return Hosts() if is_loopback(settings.host) and not has_keys else None


def values(headers: Headers, name: bytes) -> list[bytes]:
    """All values of a header, whose name is in lower case, as ASGI has them."""
    return [value for key, value in headers if key == name]


def _host(headers: Headers, http_version: str) -> str:
    """The host that a request names; empty where HTTP/1.0 leaves it out.

    Raises:
        HttpError: there is no one `Host`, or its value is no authority (400: RFC 9112, section 3.2).
    """
    given = values(headers, b"host")
    if not given and http_version == "1.0":
        return ""
    host = host_of(given[0].decode("latin-1")) if len(given) == 1 else None
    if host is None:
        raise HttpError("The request needs one Host header with a host in it.", code="invalid_host", status=400)
    return host


def _in_origin_form(scope: Scope) -> Scope:
    """The request with a target that is a path, or `*` (RFC 9112, section 3.2).

    Raises:
        HttpError: the target is none that a server other than a proxy may be asked for.
    """
    raw_path = scope.get("raw_path") or scope["path"].encode()
    if raw_path.startswith(b"/") or (raw_path == b"*" and scope["method"] == "OPTIONS"):
        return {**scope, "raw_path": raw_path}
    absolute = _ABSOLUTE.fullmatch(raw_path)
    if absolute is None or not absolute[1] or host_of(absolute[1].decode("latin-1")) is None:
        raise HttpError("The request's target is no path of this server.", code="invalid_target", status=400)
    others = [(name, value) for name, value in scope["headers"] if name != b"host"]
    path = absolute[2]
    if not path.startswith(b"/"):
        path = b"*" if scope["method"] == "OPTIONS" and not scope["query_string"] and not path else b"/" + path
    return {
        **scope,
        "raw_path": path,
        "path": unquote(path.decode("ascii")),
        "headers": [(b"host", absolute[1]), *others],
    }


def _framed_twice(headers: Headers) -> bool:
    """Whether two headers say where the body ends. The coding counts, and what follows on the connection may be meant
    for whoever believed the length (RFC 9112, section 6.1)."""
    return bool(values(headers, b"content-length")) and bool(values(headers, b"transfer-encoding"))
