"""What all prompts with a document begin with, if nothing stands before it: the part that is read ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from longreach.api.schema.requests.chat_messages import Message
from longreach.api.service.chat_prompt import Chat
from longreach.api.service.encode import TextEncoder
from longreach.api.service.loaded_document import LoadedDocument
from longreach.documents.text_pipeline import TextPipeline
from longreach.errors import ContextLengthError, InvalidRequestError
from longreach.text.beginning import Beginning
from longreach.text.growing_text import GrowingText
from longreach.text.marks import Marks
from longreach.text.tokenizer import TooManyTokensError, UnbrokenTextError

if TYPE_CHECKING:
    from longreach.api.service.service import Service

# Two questions that have no first character in common: what their prompts have in common is what all prompts have.
_QUESTIONS = ("0", "What")
# Characters that are cut at once in the event loop: a few milliseconds.
_FED_CHARACTERS = 1 << 19


@dataclass(frozen=True)
class Prefix:
    """The first token ids of prompts with a document, and what its text was encoded to, where it can be cut."""

    ids: list[int]
    beginning: Beginning | None = None


async def prefix_of(service: Service, encoder: TextEncoder, loaded: LoadedDocument, param: str) -> Prefix:
    """The prefix of a document.

    Raises:
        ApiError: the document does not fit into the context, the chat template refuses it, or it is of another
            tokenizer.
    """
    if loaded.document.use == "chat":
        return await _of_chat(service, encoder, loaded, param)
    if loaded.document.kind == "tokens":
        return Prefix(await loaded.before_prompt(encoder, param=param))
    around = encoder.tokenizer.around
    first = [] if around is None else around[0]
    text = GrowingText(encoder.tokenizer, special=around is None, most=encoder.info.max_model_len - 1 - len(first))
    await encoder.check_length(loaded.text, param=param, answer_tokens=1, before=len(first))
    ids, beginning, last = await _encoded(service, encoder, text, loaded.text, param, len(first))
    return Prefix([*first, *ids, *last], beginning)


async def _of_chat(service: Service, encoder: TextEncoder, loaded: LoadedDocument, param: str) -> Prefix:
    chat, marks, caller = service.chat, encoder.tokenizer.marks, encoder.caller
    prompts: list[str] = []
    for question in _QUESTIONS:
        messages = loaded.before([Message(role="user", content=question)], param)
        prompts.append(await service.reading.call(_written, chat, messages, marks, caller=caller))
    common = await service.reading.call(_common_text, *prompts, caller=caller)
    special = chat.template.is_default
    await encoder.check_length(common, param=param, answer_tokens=1)
    text = GrowingText(encoder.tokenizer, special, most=encoder.info.max_model_len - 1)
    if not text.waits_for_end:
        ids, beginning, _ = await _encoded(service, encoder, text, common, param, 0)
        return Prefix(ids, beginning)
    whole = [await encoder.encode(prompt, param=param, answer_tokens=1, special=special) for prompt in prompts]
    return Prefix(await service.reading.call(_common, *whole, caller=caller))


async def _encoded(
    service: Service, encoder: TextEncoder, growing: GrowingText, text: str, param: str, before: int
) -> tuple[list[int], Beginning | None, list[int]]:
    """The ids of a text that no other end of it can change, the same with its text, and the ids of its end."""
    try:
        async with TextPipeline(growing, service.encoding, caller=encoder.caller) as pipeline:
            for start in range(0, len(text), _FED_CHARACTERS):
                await pipeline.feed(text[start : start + _FED_CHARACTERS])
            beginning = await pipeline.settle()
            return pipeline.ids.tolist(), beginning, await pipeline.last()
    except TooManyTokensError as error:
        tokens = before + error.tokens
        raise ContextLengthError(tokens, 1, encoder.info.max_model_len, param=param, at_least=not error.exact) from None
    except UnbrokenTextError as error:
        raise InvalidRequestError(f"`{param}`: {error}.", param=param, code="unbroken_text") from None


def _written(chat: Chat, messages: Sequence[Message], marks: Marks) -> str:
    """The prompt of a chat, as it is to be encoded."""
    return chat.text(messages, [], marks, add_generation_prompt=True, variables={})[0]


def _common_text(one: str, other: str) -> str:
    """The first characters that two texts have in common; by halves, since a comparison of parts is quick."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return one[:low]


def _common(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """The first tokens that two prompts have in common."""
    both = min(len(one), len(other))
    differs = np.asarray(one[:both], np.int64) != np.asarray(other[:both], np.int64)
    return [*one[: int(differs.argmax()) if differs.any() else both]]
