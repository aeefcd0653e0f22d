"""A connection below ASGI: how many there may be, and how long each may take to say what it wants and to listen.

The application sees a request only when its headers are complete, and knows nothing of a reader that has stopped
reading; both would let a few sockets that do nothing hold the server's resources for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass
from typing import ClassVar, cast

import h11
import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from longreach.api.http.auth import OPEN_PATHS
from longreach.api.http.error_answers import error_response
from longreach.api.http.error_forms import error_object
from longreach.api.http.request_log import request_id_from
from longreach.errors import ApiError, HttpError, RequestTimeoutError, UnavailableError

# Beyond the limit, so that probes are answered whatever strangers hold. Such a connection is told that the server is
# full unless it asks for a probe's path, and it is gone after twice these seconds.
SPARE_CONNECTIONS = 32
SPARE_SECONDS = 1.0

# Without a request, after which a connection is closed. Whoever closes an idle connection may do so while the other end
# sends its next request, which is lost then. Clients and balancers should be first: they keep them for 5 to 60 seconds.
IDLE_SECONDS = 75

# For a peer to take leave after it was refused: over TLS it is asked for a word of its own.
_LINGER_SECONDS = 2.0
# What may come behind a request before its answer has been sent; reading goes on meanwhile, since only a reader
# notices a departure. More than that waits for so long, and then is not read for its sense any more.
_AHEAD_BYTES = 64 * 1024
_AHEAD_SECONDS = 1.0
# Bodies of any length that are read as they come. Their time begins anew with so many further bytes.
_UPLOADS = frozenset({"/v1/documents", "/v1/files", "/v1/text"})
_UPLOAD_BYTES = 1024


@dataclass(frozen=True)
class ConnectionLimits:
    """Bounds of all connections together, and of one in seconds.

    Attributes:
        connections: how many may be open, beside `SPARE_CONNECTIONS` for probes.
        header_bytes: of a request line with its headers.
        header_seconds: from the first moment of a connection, or the first byte of a later request, to its last header.
            A TLS handshake is a part of it.
        body_seconds: from the last header to the body's last byte; of an upload, to each further KiB.
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
    spare: ClassVar[list[LimitedProtocol]]  # connections beyond the limit, the oldest first

    _socket: socket.socket | None = None  # until there is a transport
    _given_up = False
    _reading: tuple[str, asyncio.TimerHandle] | None = None  # the part that has to arrive, and its deadline
    _writing: asyncio.TimerHandle | None = None
    _ending: asyncio.TimerHandle | None = None  # the connection's own end
    _crowding: asyncio.TimerHandle | None = None  # more than `_AHEAD_BYTES` are there
    _came = 0  # bytes since the body's time began
    _deaf = False  # what comes is thrown away: the connection ends with its answer

    @classmethod
    def within(cls, limits: ConnectionLimits) -> type[LimitedProtocol]:
        """The class with its limits; the server makes one instance for each connection."""
        return type("LimitedProtocol", (cls,), {"limits": limits, "spare": []})

    def accepted(self, sock: socket.socket) -> None:
        """Count a connection and start its clock; before its TLS handshake, if there is one."""
        self._socket = sock
        self._ahead = bytearray()
        self.connections.add(self)
        if self._is_too_many():
            others = (other for other in self.connections if isinstance(other, LimitedProtocol))
            if (idle := next((other for other in others if other._is_idle()), None)) is not None:
                idle._end_idleness()
        if not self._is_too_many():
            self._await("headers", self.limits.header_seconds)
            return
        if len(self.spare) >= SPARE_CONNECTIONS:
            silent = (other for other in self.spare if other.cycle is None and not other._given_up)
            next(silent, self)._make_room()
        self.spare.append(self)
        self.app = self._probes_only
        self._await("headers", min(SPARE_SECONDS, self.limits.header_seconds))
        self._ending = self.loop.call_later(2 * SPARE_SECONDS, self._abort)

    def _is_too_many(self) -> bool:
        return len(self.connections) - len(self.spare) > self.limits.connections

    def _is_idle(self) -> bool:
        """Whether it has answered all requests, and waits for another."""
        return self.timeout_keep_alive_task is not None and not self._ahead and self not in self.spare

    def _end_idleness(self) -> None:
        """Give up an idle connection, for one that has something to say."""
        self.released()
        self.transport.close()

    def released(self) -> None:
        """Forget a connection that is gone."""
        self._await(None)
        self._listened()
        for timer in (self._ending, self._crowding):
            if timer is not None:
                timer.cancel()
        self.connections.discard(self)
        if self in self.spare:
            self.spare.remove(self)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._deaf or self.transport.is_closing() or self.conn.their_state in (h11.MUST_CLOSE, h11.CLOSED):
            return
        self._ahead += data
        self._came += len(data)
        self._read_on()

    def on_response_complete(self) -> None:
        """uvicorn's; a later request may have come meanwhile."""
        if self._crowding is not None:
            self._crowding.cancel()
            self._crowding = None
        if self.conn.our_state is h11.DONE and self.conn.their_state is h11.DONE and self.conn.trailing_data[0]:
            # Take back what h11 holds of the next request: only we bound its headers, and skip an empty line before it.
            self._ahead[:0] = self.conn.trailing_data[0]
            self.conn = h11.Connection(h11.SERVER, self.limits.header_bytes)
        super().on_response_complete()
        if self._ahead and not self.transport.is_closing():
            self._read_on()

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
        self.released()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """uvicorn's, at the server's end."""
        if self.transport is None:
            self._abort()
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP request."""
        self._refuse(HttpError(msg, code="invalid_http", status=400))

    def _should_upgrade(self) -> bool:
        return False  # none is offered, so a request that would like one is answered without (RFC 9110, section 7.8)

    def _read_on(self) -> None:
        """Give h11 what is of the request that is being read. What is behind it waits until that has been answered."""
        while self._ahead and not self._is_answering() and not self.transport.is_closing():
            room = self.limits.header_bytes + 1
            if self.conn.their_state is h11.IDLE:
                # h11 measures headers that are incomplete alone: it sees no more of them at once than there may be.
                seen = len(self.conn.trailing_data[0])
                room -= seen
                if not seen:  # an empty line before a request is nothing (RFC 9112, section 2.2)
                    self._ahead = self._ahead.lstrip(b"\r\n")
                    if not self._ahead:
                        break
            piece = bytes(self._ahead[:room])
            del self._ahead[:room]
            super().data_received(piece)
        if self.transport.is_closing():
            self._await(None)
        elif self._is_answering():
            self._await(None)
            self._look_out()
        elif self.conn.their_state is h11.IDLE:
            self._await("headers", self.limits.header_seconds)
        else:
            if self._came >= _UPLOAD_BYTES and self._is_upload():
                self._await(None)
            self._await("body", self.limits.body_seconds)

    def _is_upload(self) -> bool:
        return self.scope is not None and self.scope["path"] in _UPLOADS

    def _is_answering(self) -> bool:
        """Whether a whole request is there, whose answer has not been sent."""
        return self.conn.their_state not in (h11.IDLE, h11.SEND_BODY)

    def _look_out(self) -> None:
        """Go on reading while a request is answered, within bounds."""
        if len(self._ahead) <= _AHEAD_BYTES:
            self.flow.resume_reading()  # h11 has uvicorn pause it
            return
        self.flow.pause_reading()
        if self._crowding is None:
            self._crowding = self.loop.call_later(_AHEAD_SECONDS, self._stop_listening)

    def _stop_listening(self) -> None:
        """Read on for the departure alone: whoever sends so much ahead may send it again on another connection."""
        self._deaf = True
        self._ahead.clear()
        self.cycle.keep_alive = False
        self.flow.resume_reading()

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
            self._came = 0
            self._reading = (part, self.loop.call_later(seconds, self._late, part, seconds))

    def _late(self, part: str, seconds: float) -> None:
        self._reading = None
        if part == "body" and self._is_upload() and self.flow.read_paused:
            self._await(part, seconds)  # it is we who are late
            return
        if self.transport is None:
            self._abort()  # in the handshake: there is nobody to tell
        else:
            self._refuse(self._full() if self in self.spare else RequestTimeoutError(part, seconds))

    def _full(self) -> UnavailableError:
        message = f"The server has {self.limits.connections} open connections and takes no more at this moment."
        return UnavailableError(message, code="too_many_connections", retry_after=1)

    async def _probes_only(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application on a spare connection."""

        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        is_probe = scope["raw_path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD")
        refused = error_response(self._full(), scope, request_id_from(None))
        app = cast("ASGIApp", self.config.loaded_app) if is_probe else refused
        await app(scope, receive, send_last)

    def _make_room(self) -> None:
        """End a spare connection, whose descriptor is needed at once."""
        self._given_up = True
        if self.transport is None or self.scheme == "https":
            self._abort()  # TLS would take its time to part
        else:
            self._refuse(self._full())

    def _abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()
        elif self._socket is not None:
            with contextlib.suppress(OSError):  # the peer has gone already
                self._socket.shutdown(socket.SHUT_RDWR)  # its handshake fails

    def _refuse(self, error: ApiError) -> None:
        """Answer with `error`, if nothing has been answered yet, and close the connection."""
        if self.cycle is not None and not self.cycle.response_complete:
            # The application is still at this request: it learns that nobody is left to answer.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = orjson.dumps(error_object(error, cast("Scope | None", self.scope), request_id_from(None)))
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
            if self._ending is None:
                patience = _LINGER_SECONDS if self._writing is None else self.limits.write_seconds
                self._ending = self.loop.call_later(patience, self._abort)
        else:
            self.transport.abort()
