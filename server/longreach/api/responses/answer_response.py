"""How a response is answered: whole, as a stream, or in the background; and kept, if it is to be."""

from __future__ import annotations

import logging

from starlette.responses import Response

from longreach.api.generation.answer import answer
from longreach.api.responses.builder import ResponseBuilder
from longreach.api.responses.conversation import prepare_response, read_conversation
from longreach.api.responses.in_background import answer_in_background
from longreach.api.schema.answers.responses import ResponseObject
from longreach.api.schema.requests.responses import ResponseRequest
from longreach.api.service.call import Call
from longreach.errors import InvalidRequestError, UnavailableError

log = logging.getLogger("longreach.requests")

# Of types of tools, in a header and in the log; the response names all of them.
_MOST_NAMED = 16
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
        response = await answer_in_background(call, prepared, conversation.given)
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
