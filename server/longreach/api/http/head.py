"""HEAD wherever there is GET: the same route answers, and its body is left out (RFC 9110, section 9.3.2)."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadAsGet:
    """An ASGI application around another, which sees a HEAD as a GET."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI)."""
        head = scope["type"] == "http" and scope["method"] == "HEAD"

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 405:
                message = {**message, "headers": [_with_head(name, value) for name, value in message["headers"]]}
            elif head and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app({**scope, "method": "GET"} if head else scope, receive, send_on)


def _with_head(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    methods = [method.strip() for method in value.split(b",")]
    if name != b"allow" or b"GET" not in methods or b"HEAD" in methods:
        return name, value
    return name, b", ".join([*methods, b"HEAD"])
