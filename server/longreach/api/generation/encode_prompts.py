"""From a request's texts and messages to token ids, in threads: measured first, and given up when they cannot fit."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from longreach.api.schema.requests.chat_messages import Message
from longreach.api.schema.requests.formats import Tool
from longreach.api.service.call import Call
from longreach.errors import ContextLengthError, InvalidRequestError, OverloadedError
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
) -> list[int]:
    """Token ids of a text that leaves room for so many tokens of an answer; see `Tokenizer.encoding`.

    Raises:
        ContextLengthError: it does not fit. Mostly that is known before anything is encoded, and else on the way.
        InvalidRequestError: it cannot be cut into pieces.
        OverloadedError: too much text waits to be encoded.
        ClientGoneError: the caller went away.
    """
    info, tokenizer, service = call.engine.info, call.tokenizer, call.service
    most = info.max_model_len - answer_tokens
    caller = call.record.caller
    if len(text) <= _SHORT_CHARACTERS:
        least = tokenizer.least_tokens(text) if len(text) > most // 4 else 0
    else:
        least = await call.attend(service.reading.call(tokenizer.least_tokens, text, caller=caller))
    if least > most:
        raise ContextLengthError(least, answer_tokens, info.max_model_len, param=param, at_least=True)
    work = tokenizer.encoding(text, special, parse_special, most)
    try:
        return await call.attend(service.encoding.run(work, caller=caller, size=sys.getsizeof(text)))
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


async def encode_chat(
    call: Call[Any],
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    *,
    param: str,
    answer_tokens: int = 0,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> tuple[str, list[int]]:
    """A chat's prompt as text and as token ids; `variables` are given to the template, those that are None are not.

    Raises:
        InvalidRequestError: the template refuses the messages, or has no place for tools or a variable.
        ApiError: as `encode_text`.
    """
    chat, marks = call.service.chat, call.tokenizer.marks
    given = {name: value for name, value in (variables or {}).items() if value is not None}
    work = call.service.reading.call(
        chat.text, messages, tools, marks, add_generation_prompt, given, caller=call.record.caller
    )
    guarded, text = await call.attend(work)
    special = chat.template.is_default
    return text, await encode_text(call, guarded, param=param, answer_tokens=answer_tokens, special=special)
