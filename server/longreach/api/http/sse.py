"""Server-Sent Events: their framing, and the answer that sends them until the caller or the server leaves.

Our own response class, because the ready-made ones fall short here: sse-starlette replaces uvicorn's signal handler
when it is imported, ends streams at SIGTERM by itself without a last event, and logs every chunk of text at debug
level; Starlette's `StreamingResponse` has no keep-alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from longreach.api.http.error_answers import ClientGoneError, as_api_error
from longreach.api.http.error_forms import anthropic_error
from longreach.api.http.event_record import EventRecord
from longreach.api.http.race import race, until_gone
from longreach.api.http.request_log import RequestRecord
from longreach.errors import ApiError
from longreach.util.json_pieces import LONG_BYTES, encoding, is_long
from longreach.util.work_pool import WorkPool

Watcher = Callable[[], Coroutine[Any, Any, NoReturn]]

DONE = b"data: [DONE]\n\n"
_AFTER = b"\n\n"


def sse_data(value: object, event: str | None = None) -> bytes:
    """One event that carries JSON, with a name if it has one."""
    return _before(event) + msgspec.json.encode(value) + _AFTER


async def long_sse_data(value: object, pool: WorkPool, caller: str, event: str | None = None) -> bytes:
    """As `sse_data`, of any length; a long one is encoded in a thread of `pool`."""
    if not is_long(value):
        return sse_data(value, event)

    def work() -> Generator[None, None, bytes]:
        pieces = yield from encoding(value)
        return b"".join([_before(event), *pieces, _AFTER])

    return await pool.run(work(), caller=caller)


def _before(event: str | None) -> bytes:
    return b"data: " if event is None else b"event: " + event.encode() + b"\ndata: "


@dataclass(frozen=True)
class StreamForm:
    """What a stream has beside the events of its answer, as its protocol has it.

    Attributes:
        keep_alive: what is sent when nothing else was for a while.
        failure: the event that tells of an error; takes the request's id, too.
        end: what follows the last event.
    """

    keep_alive: Callable[[RequestRecord], Awaitable[bytes]]
    failure: Callable[[ApiError, str], bytes]
    end: bytes


async def _comment(record: RequestRecord) -> bytes:
    return record.keep_alive()


async def _ping(_: RequestRecord) -> bytes:
    return sse_data({"type": "ping"}, event="ping")


OPENAI_STREAM = StreamForm(
    keep_alive=_comment,
    failure=lambda error, _: sse_data(error.body()),
    end=DONE,
)
ANTHROPIC_STREAM = StreamForm(
    keep_alive=_ping,
    failure=lambda error, request_id: sse_data(anthropic_error(error, request_id), event="error"),
    end=b"",
)


class EventStream(Response):
    """A `text/event-stream` answer whose headers go out before its first event is known.

    Whatever happens after them, the caller reads an end: the events' own or that of a failure, then what `form` ends
    with. When nothing was sent for `keep_alive_seconds`, `form` says what is, so that no proxy gives the connection up.
    A caller that goes away closes `events`. When they have come to their end, `finish` says how the answer ended.

    Attributes:
        form: what it has beside its events.
        source: the record that its events are read from, if they are.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        record: RequestRecord,
        keep_alive_seconds: float,
        until_cut: Watcher,
        finish: Callable[[], str | None],
        form: StreamForm = OPENAI_STREAM,
        source: EventRecord | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        # X-Accel-Buffering: nginx would otherwise gather events before it passes them on.
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})
        self._events = events
        self._record = record
        self._keep_alive_seconds = keep_alive_seconds
        self._until_cut = until_cut
        self._finish = finish
        self.form = form
        self.source = source
        self._last_sent = 0.0
        self._unsent: deque[bytes] = deque()
        self._sending = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer (ASGI)."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await race(self._pour(send), self._keep_alive(send), until_gone(receive), self._until_cut())
            self._record.finished(self._finish())
        except ClientGoneError:
            self._record.disconnected()
            return
        except Exception as error:  # noqa: BLE001 - the status is sent already: the stream itself has to say it
            api_error = as_api_error(error, self._record.request_id)
            self._record.finished(api_error.code)
            await self._send(send, self.form.failure(api_error, self._record.request_id))
        if self.form.end:
            await self._send(send, self.form.end)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def tell(self, events: EventRecord) -> bool:
        """Tell a record of the events, in place of a caller; whether they came to their end and not to an error."""
        try:
            await race(self._pour_into(events), self._until_cut())
        except Exception as error:  # noqa: BLE001 - whatever it is, the stream tells of it
            api_error = as_api_error(error, self._record.request_id)
            self._record.finished(api_error.code)
            events.tell(self.form.failure(api_error, self._record.request_id))
            return False
        self._record.finished(self._finish())
        return True

    async def _pour_into(self, record: EventRecord) -> None:
        async with contextlib.aclosing(self._events) as events:
            async for event in events:
                record.tell(event)

    async def _pour(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            async for event in events:
                await self._send(send, event)

    async def _send(self, send: Send, event: bytes) -> None:
        """Send an event behind all others; a long one in pieces, of which a slow reader holds up no more than one.

        Where this is cancelled within an event, the next call sends the rest of it first.
        """
        if len(event) <= LONG_BYTES:
            self._unsent.append(event)
        else:
            self._unsent += (event[at : at + LONG_BYTES] for at in range(0, len(event), LONG_BYTES))
        async with self._sending:
            while self._unsent:
                await send({"type": "http.response.body", "body": self._unsent[0], "more_body": True})
                self._unsent.popleft()
                self._last_sent = time.monotonic()
                if self._unsent:
                    await asyncio.sleep(0)  # a quick reader would keep the event loop here

    async def _keep_alive(self, send: Send) -> NoReturn:
        self._last_sent = time.monotonic()
        while True:
            silent = time.monotonic() - self._last_sent
            await asyncio.sleep(max(self._keep_alive_seconds - silent, 0.001))
            if time.monotonic() - self._last_sent >= self._keep_alive_seconds:
                await self._send(send, await self.form.keep_alive(self._record))
