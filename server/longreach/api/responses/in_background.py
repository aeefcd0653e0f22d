"""Responses in the background: begun, made without their callers, and begun again by the server after this one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from dataclasses import dataclass, replace

from starlette.requests import Request
from starlette.responses import Response

from longreach.api.generation.choices import RunningAnswers, run_answers
from longreach.api.generation.plan_answers import plan_answers
from longreach.api.generation.prepare_chat import PreparedChat
from longreach.api.http.error_answers import as_api_error
from longreach.api.http.event_record import EventRecord
from longreach.api.http.race import race
from longreach.api.http.request_log import RequestRecord
from longreach.api.http.respond import long_json_response
from longreach.api.http.sse import EventStream
from longreach.api.responses.builder import Again, ResponseBuilder
from longreach.api.responses.conversation import prepare_response, read_conversation
from longreach.api.schema.requests.parse import parse
from longreach.api.schema.requests.responses import ResponseRequest
from longreach.api.service.background import BackgroundRun
from longreach.api.service.call import Call, never
from longreach.api.service.kept import Item
from longreach.api.service.lasting_engine import LastingEngine
from longreach.api.service.loaded_document import load_document
from longreach.api.service.service import Phase, Service
from longreach.api.service.unfinished import Begun, Unfinished
from longreach.engine.errors import QueueFullError
from longreach.errors import AuthenticationError, InvalidRequestError, OverloadedError, UnavailableError
from longreach.util import exact_json

log = logging.getLogger("longreach.requests")

_PATH = "/v1/responses"
_CURE = "read the response"
_PAUSE_SECONDS = 0.5
_PASSING = ("engine_restarting", "engine_stalled")
# Events of a response that is begun again have numbers that no event of it had before.
_EVENTS_OF_ONE_TRY = 1 << 28


@dataclass(frozen=True)
class _Planned:
    """A response that can be started: what makes it, from the answers that have their places."""

    call: Call[ResponseRequest]
    builder: ResponseBuilder
    answers: RunningAnswers

    def start(self, first_event: int = 0) -> EventRecord | None:
        """Let it be made; its events, if they are recorded."""
        service, body, owner = self.call.service, self.call.body, self.call.record.owner
        events = EventRecord(service.events, _CURE, begin=first_event) if body.stream else None
        run = BackgroundRun(self.builder.id, owner, self.builder.object, events)
        service.background.start(run, _run(self, run))
        return events


async def answer_in_background(call: Call[ResponseRequest], prepared: PreparedChat, given: list[Item]) -> Response:
    """Begin a response that goes on without its caller, and tell of it."""
    service, owner = call.service, call.record.owner
    request = None
    if service.kept.lasts:
        request = await service.reading.call(_without_input, call.sent, caller=call.record.caller)
    with contextlib.ExitStack() as undo:
        planned = await _plan(call.detached(), prepared, None, undo)
        call.record.answering(planned.builder.id, sum(map(len, prepared.spec.prompts)))
        first = planned.builder.object()
        if not await service.kept.put(owner, first, given, call.body.previous_response_id, request):
            raise InvalidRequestError(
                "`input` is larger than all that this server keeps of responses (--responses-store-bytes).",
                param="input",
                code="invalid_value",
            )
        undo.pop_all()  # from here on the run gives its places back
    events = planned.start()
    if events is not None:
        return stream_of(events, call.record, service)
    call.record.finished("background")
    return await long_json_response(first, service.writing, call.record.caller)


def stream_of(events: EventRecord, record: RequestRecord, service: Service, first: int | None = None) -> Response:
    """The events of a background response from the number `first` on, for the request of `record`."""
    keep_alive = service.settings.keep_alive_seconds
    followed = events.follow(first)
    return EventStream(followed, record, keep_alive, service.until_cut, lambda: "background", source=events)


async def begin_again(service: Service) -> None:
    """Begin again what was being made when the server before this one ended; what cannot be has failed."""
    await service.kept.opened()
    waiting = service.kept.waiting
    while waiting:
        which = waiting[0]
        try:
            await _begin_again(service, which)
        except Exception as error:  # noqa: BLE001 - the response itself has to say it
            api_error = as_api_error(error, which.response_id)
            log.warning("response %s cannot be begun again: %s", which.response_id, api_error.message)
            if service.phase in (Phase.DRAINING, Phase.DEAD):
                return  # the next server will
            await service.kept.fail_unfinished(which, api_error.message)
        if which in waiting:
            waiting.remove(which)


async def _begin_again(service: Service, which: Unfinished) -> None:
    begun = await service.kept.begin_again(which)
    if begun is None:
        return  # it has been deleted
    key = service.keys.with_digest(which.owner)
    if (key is None) != (which.owner == "") or (key is None and service.keys):
        raise AuthenticationError  # nobody could fetch it
    record = RequestRecord(uuid.uuid4().hex, "POST", _PATH)
    record.authenticated(key)
    while True:
        try:
            with contextlib.ExitStack() as undo:
                planned = await _plan_again(service, which, begun, record, undo)
                kept = which in service.kept.waiting
                if not kept or not await service.kept.update(which.owner, planned.builder.object()):
                    return  # it has been cancelled or deleted
                undo.pop_all()
                break
        except (QueueFullError, OverloadedError):
            await asyncio.sleep(_PAUSE_SECONDS)
        except UnavailableError as error:
            if error.code not in _PASSING:
                raise
            await asyncio.sleep(_PAUSE_SECONDS)
    log.info("response %s is begun again, for the %d. time", which.response_id, begun.tries - 1)
    planned.start(_first_event(begun))


async def _plan_again(
    service: Service, which: Unfinished, begun: Begun, record: RequestRecord, undo: contextlib.ExitStack
) -> _Planned:
    engine, tokenizer = service.require_ready()
    body = parse(ResponseRequest, {**begun.request, "input": begun.given})
    if body.model is not None:
        service.require_model(body.model)
    scope = {"type": "http", "method": "POST", "path": _PATH, "query_string": b"", "headers": []}
    document = None if body.document is None else await load_document(service, record, body.document)
    if document is not None:
        document.require_of_tokenizer(tokenizer.digest, "document")
    lasting = LastingEngine(engine, service.successor)
    call = Call(body, Request(scope, never), service, record, lasting, tokenizer, document)
    conversation = await read_conversation(call)
    prepared = await prepare_response(call, conversation.messages)
    again = Again(which.response_id, begun.created, _first_event(begun))
    return await _plan(call, prepared, again, undo)


def _first_event(begun: Begun) -> int:
    return (begun.tries - 1) * _EVENTS_OF_ONE_TRY


async def _plan(
    call: Call[ResponseRequest], prepared: PreparedChat, again: Again | None, undo: contextlib.ExitStack
) -> _Planned:
    """Plan a response that nobody waits for. `undo` gives its places back."""
    service, owner = call.service, call.record.owner
    call = replace(call, body=call.body.model_copy(update={"input": []}), sent=b"")  # which have been read
    builder = ResponseBuilder(call, prepared.reader(), lambda whole: service.kept.update(owner, whole), again)
    call.record.answering(builder.id, sum(map(len, prepared.spec.prompts)))
    undo.enter_context(call.record.at_end)
    return _Planned(call, builder, run_answers(call, await plan_answers(call, builder.engine_id, prepared.spec)))


def _without_input(sent: bytes) -> bytes:
    request = exact_json.loads(sent)
    assert isinstance(request, dict), "it has been checked"
    request.pop("input", None)
    return exact_json.dumps(request)


async def _run(planned: _Planned, run: BackgroundRun) -> None:
    """Make a background response to its end, whatever that is; or leave it to the server after this one."""
    builder, service, record = planned.builder, planned.call.service, planned.call.record

    async def pour() -> None:
        async with contextlib.aclosing(builder.events(planned.answers)) as events:
            async for event in events:
                run.tell(event)

    with service.open_request(), record.at_end:
        try:
            await race(pour(), service.until_cut())
            record.finished(builder.finish)
        except asyncio.CancelledError:
            record.finished("cancelled")
            if not service.leaves_unfinished:
                builder.cancel()
                await service.kept.update(record.owner, builder.object())
            raise
        except Exception as error:  # noqa: BLE001 - the response itself has to say it
            api_error = as_api_error(error, record.request_id)
            record.finished(api_error.code)
            if service.leaves_unfinished:
                return
            if builder.status != "failed":
                run.tell(await builder.fail(api_error))
            await service.kept.update(record.owner, builder.object())
        finally:
            record.log(log)
