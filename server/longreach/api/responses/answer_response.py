"""How a response is answered: whole, as a stream, or in the background; and kept, if it is to be."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace

from starlette.responses import Response

from longreach.api.generation.answer import answer
from longreach.api.generation.choices import RunningAnswers, run_answers
from longreach.api.generation.plan_answers import plan_compared
from longreach.api.generation.prepare_chat import PreparedChat
from longreach.api.http.error_answers import as_api_error
from longreach.api.http.event_record import EventRecord
from longreach.api.http.race import race
from longreach.api.http.request_log import RequestRecord
from longreach.api.http.respond import long_json_response
from longreach.api.http.sse import EventStream
from longreach.api.responses.builder import ResponseBuilder
from longreach.api.responses.conversation import prepare_response, read_conversation
from longreach.api.schema.answers.responses import ResponseObject
from longreach.api.schema.requests.responses import ResponseRequest
from longreach.api.service.background import BackgroundRun
from longreach.api.service.call import Call
from longreach.api.service.kept import Item
from longreach.api.service.service import Service
from longreach.errors import InvalidRequestError, UnavailableError

log = logging.getLogger("longreach.requests")

# Of types of tools, in a header and in the log; the response names all of them.
_MOST_NAMED = 16
_CURE = "read the response"
LEFT_OUT_HEADER = "x-longreach-tools-left-out"


async def answer_response(call: Call[ResponseRequest]) -> Response:
    """Answer a response as its body says.

    Raises:
        ApiError, EngineError: it is refused, or fails before anything of it is sent.
        ClientGoneError: the caller went away.
    """
    body, kept = call.body, call.service.kept
    if body.background and not kept.enabled:
        raise InvalidRequestError(
            "`background`: this server keeps no responses, so that nobody could fetch this one; it has to be started "
            "with another --responses-store than none.",
            param="background",
            code="unsupported_value",
        )
    if body.stream_options is not None and body.stream_options.progress_comments:
        call.record.show_progress()
    conversation = await read_conversation(call)
    prepared = await prepare_response(call, conversation.messages)
    if body.background:
        response = await _in_background(call, prepared, conversation.given)
    else:

        async def keep(whole: ResponseObject) -> bool:
            try:
                return await kept.put(call.record.owner, whole, conversation.given, body.previous_response_id)
            except UnavailableError:
                return False  # the answer is there: it says that it is not kept, and the log says why

        wanted = kept.enabled and body.store is not False
        builder = ResponseBuilder(call, prepared.reader(), keep if wanted else None)
        response = await answer(call, builder, prepared.spec)
    if body.tools.left_out:
        names = ", ".join(body.tools.left_out[:_MOST_NAMED])
        log.info("id=%s tools left out: %s", call.record.request_id, names)
        response.headers[LEFT_OUT_HEADER] = names
    return response


async def _in_background(call: Call[ResponseRequest], prepared: PreparedChat, given: list[Item]) -> Response:
    """Begin a response that goes on without its caller, and tell of it."""
    service, owner = call.service, call.record.owner
    own = call.detached()
    own = replace(own, body=own.body.model_copy(update={"input": []}))  # which has been read
    builder = ResponseBuilder(own, prepared.reader(), lambda whole: service.kept.update(owner, whole))
    prompt_tokens = sum(map(len, prepared.spec.prompts))
    for record in (call.record, own.record):
        record.answering(builder.id, prompt_tokens)
    with contextlib.ExitStack() as undo:
        undo.enter_context(own.record.at_end)
        answers = run_answers(own, await plan_compared(own, builder.id, prepared.spec))
        first = builder.object()
        if not await service.kept.put(owner, first, given, call.body.previous_response_id):
            raise InvalidRequestError(
                "`input` is larger than all that this server keeps of responses (--responses-store-bytes).",
                param="input",
                code="invalid_value",
            )
        undo.pop_all()  # from here on the run gives its places back
    events = EventRecord(service.events, _CURE) if call.body.stream else None
    run = BackgroundRun(builder.id, owner, builder.object, events)
    service.background.start(run, _run(own, builder, answers, run))
    if events is not None:
        return stream_of(events, call.record, service)
    call.record.finished("background")
    return await long_json_response(first, service.writing, call.record.caller)


def stream_of(events: EventRecord, record: RequestRecord, service: Service, first: int | None = None) -> Response:
    """The events of a background response from the number `first` on, for the request of `record`."""
    keep_alive = service.settings.keep_alive_seconds
    followed = events.follow(first)
    return EventStream(followed, record, keep_alive, service.until_cut, lambda: "background", source=events)


async def _run(
    call: Call[ResponseRequest], builder: ResponseBuilder, answers: RunningAnswers, run: BackgroundRun
) -> None:
    """Make a background response to its end, whatever that is."""
    service, record = call.service, call.record

    async def pour() -> None:
        async with contextlib.aclosing(builder.events(answers)) as events:
            async for event in events:
                run.tell(event)

    with service.open_request(), record.at_end:
        try:
            await race(pour(), service.until_cut())
            record.finished(builder.finish)
        except asyncio.CancelledError:
            builder.cancel()
            record.finished("cancelled")
            await service.kept.update(record.owner, builder.object())
            raise
        except Exception as error:  # noqa: BLE001 - the response itself has to say it
            api_error = as_api_error(error, record.request_id)
            if builder.status != "failed":
                run.tell(await builder.fail(api_error))
            record.finished(api_error.code)
            await service.kept.update(record.owner, builder.object())
        finally:
            log.info("%s", record.line())
