"""From a request's texts and messages to token ids, in threads: measured first, and given up when they cannot fit."""

from __future__ import annotations

import sys
from typing import Any

from longreach.api.generation.message_files import with_kept_files
from longreach.api.schema.requests.chat_turn import ChatTurn
from longreach.api.service.call import Call
from longreach.errors import ContextLengthError, InvalidRequestError, OverloadedError
from longreach.sizes import MAX_PROMPT_TOKENS
from longreach.text.prompt_places import PlaceMarks, Span
from longreach.text.tokenizer import TooManyTokensError, UnbrokenTextError
from longreach.util.work_pool import WorkPoolFullError

_RETRY_AFTER_TEXT = 2
# A text this short is measured where it is.
_SHORT_CHARACTERS = 64 * 1024


async def encode_text(
    call: Call[Any],
    text: str,
    *,
    param: str,
    answer_tokens: int = 0,
    special: bool = True,
    parse_special: bool = True,
    keep: int | None = None,
) -> list[int]:
    """Token ids of a text that leaves room for so many tokens of an answer; see `Tokenizer.encoding`.

    With `keep` the text may be longer, and only so many of its last tokens are kept; -1: as many as leave that room.

    Raises:
        ContextLengthError: it does not fit. Mostly that is known before anything is encoded, and else on the way.
        InvalidRequestError: it cannot be cut into pieces.
        OverloadedError: too much text waits to be encoded.
        ClientGoneError: the caller went away.
    """
    info, tokenizer, service = call.engine.info, call.tokenizer, call.service
    room = info.max_model_len - answer_tokens
    most = room if keep is None else MAX_PROMPT_TOKENS
    caller = call.record.caller
    if len(text) <= _SHORT_CHARACTERS:
        least = tokenizer.least_tokens(text) if len(text) > most // 4 else 0
    else:
        least = await call.attend(service.reading.call(tokenizer.least_tokens, text, caller=caller))
    if least > most:
        raise ContextLengthError(least, answer_tokens, info.max_model_len, param=param, at_least=True)
    work = tokenizer.encoding(text, special, parse_special, most)
    try:
        ids = await call.attend(service.encoding.run(work, caller=caller, size=sys.getsizeof(text)))
        return last_tokens(ids, keep, room)
    except TooManyTokensError as error:
        raise ContextLengthError(
            error.tokens,
            answer_tokens,
            info.max_model_len,
            param=param,
            at_least=not error.exact,
            estimate=error.estimate,
        ) from None
    except UnbrokenTextError as error:
        raise InvalidRequestError(f"`{param}`: {error}.", param=param, code="unbroken_text") from None
    except WorkPoolFullError:
        raise OverloadedError(
            "The server is busy: too much text is waiting to be tokenized.", _RETRY_AFTER_TEXT, code="too_much_text"
        ) from None


def last_tokens(ids: list[int], keep: int | None, room: int) -> list[int]:
    """So many of the last tokens of a prompt: all if `keep` is None, as many as there is `room` for if it is -1."""
    if keep is None:
        return ids
    most = max(room, 0) if keep < 0 else keep
    return ids[max(len(ids) - most, 0) :]


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
    ids = await encode_text(call, guarded, param=turn.param, answer_tokens=answer_tokens, special=special, keep=keep)
    return text, ids


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
