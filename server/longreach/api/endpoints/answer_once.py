"""How the endpoints that generate answer: a request with an `Idempotency-Key` is answered once, apart from connections.

The header is that of the IETF's draft "The Idempotency-Key HTTP Header Field", as Stripe and others have it. Clients
that send a request again by themselves send the same headers again, and so the same key.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from longreach.api.endpoints.receive import receive
from longreach.api.http.error_answers import as_api_error
from longreach.api.http.event_record import EventRecord
from longreach.api.http.race import race, until_gone
from longreach.api.http.request_log import RequestRecord
from longreach.api.http.respond import PiecesResponse
from longreach.api.http.sse import ANTHROPIC_STREAM, OPENAI_STREAM, EventStream, StreamForm
from longreach.api.service.call import Body, Call
from longreach.api.service.identified import IdentifiedRun, WholeAnswer, cancelled_error
from longreach.api.service.service import Service
from longreach.errors import HttpError, InvalidRequestError, quoted

M = TypeVar("M", bound=Body)

log = logging.getLogger("longreach.requests")

KEY_HEADER = "idempotency-key"
REPLAYED_HEADER = "idempotent-replayed"
_LAST_ID_HEADER = "last-event-id"
_KEY = re.compile(r"[!-~]{1,255}")  # visible ASCII


@dataclass(frozen=True)
class _StreamedAnswer:
    """An answer that is a stream: its headers, its events, and what it has beside them."""

    headers: list[tuple[bytes, bytes]]
    events: EventRecord
    form: StreamForm


async def answer_once(request: Request, model: type[M], work: Callable[[Call[M]], Awaitable[Response]]) -> Response:
    """Receive a request and answer it by `work`.

    One that is identified is answered apart from its connection. Who sends it again is answered by the same run, a
    stream from its first event on, or behind the one that `Last-Event-ID` names.

    Raises:
        ApiError: it is refused; the key was used for another request; or what follows that event is not held.
    """
    last_id = request.headers.get(_LAST_ID_HEADER)
    if (key := _key_of(request)) is None:
        if last_id is not None:
            raise InvalidRequestError(
                "`Last-Event-ID`: this request names no stream that it could go on with; send it with the "
                "`Idempotency-Key` of the first one.",
                code="invalid_value",
            )
        return await work(await receive(request, model))
    body = _Hashed(request)
    call = await receive(Request(request.scope, body.receive), model)
    runs, owner = call.service.identified, call.record.owner
    run = runs.find(owner, key)
    if run is not None and run.digest != body.digest:
        raise HttpError(
            "`Idempotency-Key`: this key was sent with another request; send the same body to the same URL, or "
            "another key.",
            code="idempotency_key_reused",
            status=422,
        )
    replayed = run is not None
    if run is None or (run.failed and last_id is None):
        if last_id is not None:
            raise _not_held(last_id)
        replayed = False
        detached = call.detached()
        run = runs.start(owner, key, body.digest, lambda run: _make(run, detached, work))
        _count_body(call.service, call.record, run, body.num_bytes)
    return await follow(run, request, replayed=replayed)


async def follow(run: IdentifiedRun, request: Request, *, replayed: bool) -> Response:
    """The answer of a run to one of those who ask for it.

    Raises:
        ApiError: there is none, or what follows the event that `Last-Event-ID` names is not held.
        ClientGoneError: the caller went away.
    """
    service: Service = request.app.state.service
    record: RequestRecord = request.state.record
    record.at_end.enter_context(service.identified.attached(run))
    begun = await race(run.answer(), until_gone(request.receive), service.until_cut())
    last_id = request.headers.get(_LAST_ID_HEADER)
    if isinstance(begun, WholeAnswer):
        if last_id is not None:
            raise _not_held(last_id)
        response: Response = PiecesResponse(begun.pieces)
        response.status_code = begun.status
        record.finished("identified")
    else:
        assert isinstance(begun, _StreamedAnswer)
        first = None if last_id is None else begun.events.after(last_id)
        if last_id is not None and first is None:
            raise _not_held(last_id)
        response = EventStream(
            begun.events.follow(first),
            record,
            service.settings.keep_alive_seconds,
            service.until_cut,
            lambda: "identified",
            begun.form,
        )
    response.raw_headers = [*begun.headers, *([(REPLAYED_HEADER.encode(), b"true")] if replayed else [])]
    return response


async def _make(run: IdentifiedRun, call: Call[M], work: Callable[[Call[M]], Awaitable[Response]]) -> None:
    """Answer an identified request to its end, whatever that is."""
    record, form = call.record, None
    with call.service.open_request(), record.at_end:
        try:
            response = await race(_worked(work, call), call.service.until_cut())
            if not isinstance(response, EventStream):
                run.begin(await _captured(response, call.request))
            elif response.source is not None:  # a background response, which goes on by itself
                run.begin(_StreamedAnswer(response.raw_headers, response.source, response.form))
                await response.source.until_ended()
            else:
                form = response.form
                run.begin(_StreamedAnswer(response.raw_headers, run.events, _shared(form, record)))
                run.failed = not await response.tell(run.events)
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait are told
            api_error = as_api_error(error, record.request_id)
            record.finished(api_error.code)
            run.refuse(api_error)
        finally:
            if record.finish is None:
                record.finished("cancelled")
                run.failed = True
                if form is not None:
                    run.events.tell(form.failure(cancelled_error(), record.request_id))
            record.log(log)


async def _worked(work: Callable[[Call[M]], Awaitable[Response]], call: Call[M]) -> Response:
    return await work(call)


def _shared(form: StreamForm, record: RequestRecord) -> StreamForm:
    """A form for several readers of one stream: what keeps their connections alive is no event with a number."""
    if form is ANTHROPIC_STREAM:
        return form

    async def progress(_: RequestRecord) -> bytes:
        return record.keep_alive()

    return replace(OPENAI_STREAM, keep_alive=progress)


async def _captured(response: Response, request: Request) -> WholeAnswer:
    """An answer as it would be sent."""
    pieces: list[bytes] = []

    async def send(message: Message) -> None:
        if piece := message.get("body"):
            pieces.append(piece)

    await response(request.scope, request.receive, send)
    return WholeAnswer(response.status_code, response.raw_headers, pieces)


class _Hashed:
    """The body of a request, counted and hashed while it arrives, with the URL that it is sent to."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._hash = hashlib.sha256(request.url.path.encode() + b"\n")
        self.num_bytes = 0

    async def receive(self) -> Message:
        """The next message of the connection (ASGI)."""
        message = await self._request.receive()
        part: bytes = message.get("body", b"")
        self._hash.update(part)
        self.num_bytes += len(part)
        return message

    @property
    def digest(self) -> bytes:
        """The hash of what has arrived."""
        return self._hash.digest()


def _count_body(service: Service, record: RequestRecord, run: IdentifiedRun, num_bytes: int) -> None:
    """Count the body that a run goes on with among those of open requests, once its own request has ended."""

    def go_on() -> None:
        if run.task is not None and not run.task.done():
            service.bodies.add(record.caller, num_bytes)
            run.task.add_done_callback(lambda _: service.bodies.remove(record.caller, num_bytes))

    record.at_end.callback(go_on)


def _key_of(request: Request) -> str | None:
    keys = request.headers.getlist(KEY_HEADER)
    if not keys:
        return None
    if len(keys) > 1 or _KEY.fullmatch(keys[0]) is None:
        raise InvalidRequestError(
            "`Idempotency-Key` must be there once, and have 1 to 255 visible ASCII characters.", code="invalid_value"
        )
    return keys[0]


def _not_held(last_id: str) -> HttpError:
    return HttpError(
        f"`Last-Event-ID`: the events after {quoted(last_id)} are not held here; send the request without this header "
        "to have its answer from the beginning.",
        code="events_not_held",
        status=409,
        headers={"x-should-retry": "false"},
    )
