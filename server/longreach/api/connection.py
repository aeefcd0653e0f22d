"""A connection below ASGI: how many there may be, and how long each may take to say what it wants and to listen.

The application sees a request only when its headers are complete, and knows nothing of a reader that has stopped
reading; both would let a few sockets that do nothing hold the server's resources for ever.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import ClassVar

import h11
import orjson
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from longreach.errors import ApiError, HttpError, RequestTimeoutError, UnavailableError


@dataclass(frozen=True)
class ConnectionLimits:
    """Bounds of all connections together, and of one in seconds.

    Attributes:
        connections: how many may be open.
        header_bytes: of a request line with its headers.
        header_seconds: from the first moment of a connection, or the first byte of a later request, to its last header.
        body_seconds: from the last header to the body's last byte.
        write_seconds: for how long a reader may leave more unread than the buffers hold.
    """

    connections: int
    header_bytes: int
    header_seconds: float
    body_seconds: float
    write_seconds: float


class LimitedProtocol(H11Protocol):
    """HTTP/1.1 with deadlines. What exceeds one is told so, if it can be, and disconnected."""

    limits: ClassVar[ConnectionLimits]

    _reading: tuple[str, asyncio.TimerHandle] | None = None  # the part that has to arrive, and its deadline
    _writing: asyncio.TimerHandle | None = None

    @classmethod
    def within(cls, limits: ConnectionLimits) -> type[LimitedProtocol]:
        """The class with its limits; uvicorn makes one instance for each connection."""
        return type("LimitedProtocol", (cls,), {"limits": limits})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            message = f"The server has {self.limits.connections} open connections and takes no more at this moment."
            self._refuse(UnavailableError(message, code="too_many_connections", retry_after=1))
        else:
            self._await("headers", self.limits.header_seconds)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self.conn.their_state is h11.IDLE:
            # h11 measures headers that are incomplete alone: it sees no more of them at once than there may be.
            room = self.limits.header_bytes + 1 - len(self.conn.trailing_data[0])
            super().data_received(data[:room])
            data = data[room:]
        if data and not self.transport.is_closing():
            super().data_received(data)
        if self.transport.is_closing():
            self._await(None)
        elif self.conn.their_state is h11.IDLE:
            self._await("headers", self.limits.header_seconds)
        elif self.conn.their_state is h11.SEND_BODY:
            self._await("body", self.limits.body_seconds)
        else:
            self._await(None)

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        super().pause_writing()
        if self._writing is None:
            self._writing = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        super().resume_writing()
        self._listened()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._await(None)
        self._listened()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP request."""
        self._refuse(HttpError(msg, code="invalid_http", status=400))

    def _listened(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _await(self, part: str | None, seconds: float = 0.0) -> None:
        """Set the deadline of a part of a request, or none. One that runs already for the same part goes on."""
        if self._reading is not None:
            if self._reading[0] == part:
                return
            self._reading[1].cancel()
            self._reading = None
        if part is not None:
            self._reading = (part, self.loop.call_later(seconds, self._late, part, seconds))

    def _late(self, part: str, seconds: float) -> None:
        self._reading = None
        self._refuse(RequestTimeoutError(part, seconds))

    def _refuse(self, error: ApiError) -> None:
        """Answer with `error`, if nothing has been answered yet, and close the connection."""
        if self.cycle is not None and not self.cycle.response_complete:
            # The application is still at this request: it learns that nobody is left to answer.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = orjson.dumps(error.body())
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
            events = (
                h11.Response(
                    status_code=error.status,
                    headers=[*headers, (b"connection", b"close")],
                    reason=STATUS_PHRASES[error.status],
                ),
                h11.Data(data=body),
                h11.EndOfMessage(),
            )
            for event in events:
                self.transport.write(self.conn.send(event) or b"")
            self.transport.close()
        else:
            self.transport.abort()
