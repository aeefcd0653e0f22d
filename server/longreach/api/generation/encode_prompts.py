"""From a request's texts and messages to token ids, while its caller waits."""

from __future__ import annotations

from typing import Any

from longreach.api.generation.message_files import with_kept_files
from longreach.api.schema.requests.chat_turn import ChatTurn
from longreach.api.service.call import Call
from longreach.api.service.encode import TextEncoder
from longreach.errors import InvalidRequestError
from longreach.text.beginning import Beginning
from longreach.text.prompt_places import PlaceMarks, Span


async def encode_text(
    call: Call[Any],
    text: str,
    *,
    param: str,
    answer_tokens: int = 0,
    special: bool = True,
    parse_special: bool = True,
    keep: int | None = None,
    before: int = 0,
    beginning: Beginning | None = None,
) -> list[int]:
    """As `TextEncoder.encode`, for a call.

    Raises:
        ApiError: as `TextEncoder.encode`.
        ClientGoneError: the caller went away.
    """
    encoder = TextEncoder(call.service, call.tokenizer, call.engine.info, call.record.caller)
    return await call.attend(
        encoder.encode(
            text,
            param=param,
            answer_tokens=answer_tokens,
            special=special,
            parse_special=parse_special,
            keep=keep,
            before=before,
            beginning=beginning,
        )
    )


async def encode_chat(
    call: Call[Any],
    turn: ChatTurn,
    *,
    answer_tokens: int = 0,
    special: bool | None = None,
    keep: int | None = None,
) -> tuple[str, list[int]]:
    """The prompt of a turn as text and as token ids; `special` and `keep` as in `encode_text`.

    By default special tokens are put around the text only where the model has no template.

    Raises:
        InvalidRequestError: the template refuses the messages, or has no place for tools or a variable.
        ApiError: as `encode_text`.
    """
    chat = call.service.chat
    turn = await with_kept_files(call, turn)
    guarded, text = await _written(call, turn)
    special = chat.template.is_default if special is None else special
    ids = await encode_text(
        call,
        guarded,
        param=turn.param,
        answer_tokens=answer_tokens,
        special=special,
        keep=keep,
        beginning=_beginning(call, turn),
    )
    return text, ids


def _beginning(call: Call[Any], turn: ChatTurn) -> Beginning | None:
    """What the prompt of a turn may begin with, of which the token ids are known."""
    if call.document is not None:
        return call.document.beginning
    return None if turn.first_file is None else call.service.beginnings.get(turn.first_file)


async def chat_spans(call: Call[Any], turn: ChatTurn, text: str) -> list[Span] | None:
    """Where the messages of a turn stand in its prompt `text`; None where the template changes what they say.

    Raises:
        ClientGoneError: the caller went away.
    """
    places = PlaceMarks()
    try:
        _, marked = await _written(call, turn, places)
    except InvalidRequestError:  # the template refuses the marks alone: without them it has taken the messages
        return None
    shown, spans = places.spans(marked)
    return spans if shown == text else None


async def _written(call: Call[Any], turn: ChatTurn, places: PlaceMarks | None = None) -> tuple[str, str]:
    """The prompt of a turn, as `Chat.text` gives it."""
    chat, marks = call.service.chat, call.tokenizer.marks
    given = {name: value for name, value in turn.variables.items() if value is not None}

    def write() -> tuple[str, str]:
        return chat.text(
            turn.messages,
            turn.offered,
            marks,
            turn.opens_answer,
            given,
            fields=turn.variable_fields,
            continues=turn.continues,
            param=turn.param,
            places=places,
        )

    return await call.attend(call.service.reading.call(write, caller=call.record.caller))
