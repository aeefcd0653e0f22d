"""Where a kept document stands in a prompt: at its beginning, whatever the endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from longreach.api.schema.requests.chat_turn import ChatTurn
from longreach.api.service.call import Call
from longreach.errors import InvalidRequestError
from longreach.text.prompt_places import Place, Span


async def placed(call: Call[Any], turn: ChatTurn) -> ChatTurn:
    """A turn of a conversation behind the document that the request refers to, if it does.

    Raises:
        InvalidRequestError: no message can have the document.
        ClientGoneError: the caller went away.
    """
    document = call.document
    if document is None:
        return turn
    work = call.service.reading.call(document.before, turn.messages, caller=call.record.caller)
    return replace(turn, messages=await call.attend(work))


def refuse_cut(call: Call[Any], fields: Sequence[str]) -> None:
    """Refuse fields of a request that mean nothing with a document, if it refers to one.

    Raises:
        InvalidRequestError: there is such a field.
    """
    if call.document is not None and fields:
        raise InvalidRequestError(
            f"`{fields[0]}`: cannot be set with `document`, which every prompt begins with.",
            param=fields[0],
            code="invalid_value",
        )


def of_request(asked: ChatTurn, turn: ChatTurn, spans: list[Span] | None) -> list[Span] | None:
    """The places of a prompt, of which messages count as in the request: those of a document are its own."""
    more = len(turn.messages) - len(asked.messages)
    if spans is None or not more:
        return spans
    own = {id(message): number for number, message in enumerate(asked.messages)}
    numbers = [own.get(id(message)) for message in turn.messages]

    def place(given: Place) -> Place:
        if given.message is None:
            return given
        number = numbers[given.message]
        return Place("document") if number is None else given._replace(message=number)

    return [span._replace(place=place(span.place)) for span in spans]
