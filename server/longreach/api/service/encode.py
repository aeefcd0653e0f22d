"""From a text to token ids, in threads: measured first, and given up when it cannot fit."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from longreach.engine.messages import Started
from longreach.errors import ContextLengthError, InvalidRequestError, OverloadedError
from longreach.sizes import MAX_PROMPT_TOKENS
from longreach.text.beginning import Beginning
from longreach.text.tokenizer import Tokenizer, TooManyTokensError, UnbrokenTextError
from longreach.util.work_pool import WorkPoolFullError

if TYPE_CHECKING:
    from longreach.api.service.service import Service

_RETRY_AFTER_TEXT = 2
# A text this short is measured where it is.
_SHORT_CHARACTERS = 64 * 1024


class TextEncoder:
    """Encodes texts of one caller by `tokenizer`, for the engine that `info` is of."""

    def __init__(self, service: Service, tokenizer: Tokenizer, info: Started, caller: str) -> None:
        self._service = service
        self.tokenizer = tokenizer
        self.info = info
        self.caller = caller

    async def check_length(
        self, text: str, *, param: str, answer_tokens: int, before: int = 0, most: int | None = None
    ) -> None:
        """Refuse a text of which it is known without encoding it that it has too many tokens: more than `most`, or
        than the context has room for.

        Raises:
            ContextLengthError: it does not fit.
        """
        tokenizer, context = self.tokenizer, self.info.max_model_len
        most = context - answer_tokens - before if most is None else most
        if len(text) <= _SHORT_CHARACTERS:
            least = tokenizer.least_tokens(text) if len(text) > most // 4 else 0
        else:
            least = await self._service.reading.call(tokenizer.least_tokens, text, caller=self.caller)
        if least > most:
            raise ContextLengthError(before + least, answer_tokens, context, param=param, at_least=True)

    async def encode(
        self,
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
        """Token ids of a text that leaves room for so many tokens of an answer; see `Tokenizer.encoding`.

        With `keep` the text may be longer, and only so many of its last tokens are kept; -1: as many as leave that
        room. So many tokens of the same prompt stand `before` the text. Where it begins as `beginning` says, only the
        rest of it is encoded.

        Raises:
            ContextLengthError: it does not fit. Mostly that is known before anything is encoded, and else on the way.
            InvalidRequestError: it cannot be cut into pieces.
            OverloadedError: too much text waits to be encoded.
        """
        tokenizer, service, context = self.tokenizer, self._service, self.info.max_model_len
        room = context - answer_tokens - before
        most = room if keep is None else MAX_PROMPT_TOKENS
        await self.check_length(text, param=param, answer_tokens=answer_tokens, before=before, most=most)
        work = tokenizer.encoding(text, special, parse_special, max(most, 0), beginning)
        try:
            ids = await service.encoding.run(work, caller=self.caller, size=sys.getsizeof(text))
            return last_tokens(ids, keep, room)
        except TooManyTokensError as error:
            raise ContextLengthError(
                before + error.tokens,
                answer_tokens,
                context,
                param=param,
                at_least=not error.exact,
                estimate=None if error.estimate is None else before + error.estimate,
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
