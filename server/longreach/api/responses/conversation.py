"""The conversation that a response goes on with: kept responses before it, and the items of its own input."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import ValidationError

from longreach.api.generation.message_files import with_kept_files
from longreach.api.generation.prepare_chat import PreparedChat, prepare_chat
from longreach.api.responses.messages import PlacedItem, messages_of, shortened
from longreach.api.schema.requests.chat_messages import Message
from longreach.api.schema.requests.chat_turn import ChatTurn
from longreach.api.schema.requests.response_items import InputItem
from longreach.api.schema.requests.responses import InputTokensRequest, ResponseRequest
from longreach.api.service.call import Call
from longreach.api.service.kept import Item
from longreach.api.service.response_store import BrokenChainError, ChainTooLongError
from longreach.errors import ContextLengthError, InvalidRequestError, UnavailableError, quoted

log = logging.getLogger(__name__)

T = TypeVar("T")

_CURE = "this server keeps none (--responses-store none); send the whole conversation in `input`"
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
# Of a conversation that does not fit, so much of what seems to fit is tried, and after a few times less.
_CAREFUL = 0.98
_PATIENT_TRIES = 8


@dataclass(frozen=True)
class Conversation:
    """What a request says.

    Attributes:
        given: the items of its own input as they are kept, each with an id.
        messages: the whole conversation, without the instructions.
    """

    given: list[Item]
    messages: list[Message]


async def read_conversation(call: Call[ResponseRequest] | Call[InputTokensRequest]) -> Conversation:
    """The conversation of a request, from its body and from the responses that are kept.

    Raises:
        InvalidRequestError: a response or an item that is named is not kept, or the items do not fit together.
        UnavailableError: the store cannot be read.
    """
    body = call.body
    if not body.input and body.previous_response_id is None:
        raise _refused(
            "input", "it is required, unless there is a `previous_response_id`", "missing_required_parameter"
        )
    before = await _items_before(call)
    named = await _named_items(call, {str(item["id"]) for item in before})

    def join() -> Conversation:
        placed = [PlacedItem(_from_store(item)) for item in before]
        given: list[Item] = []
        for place, item in enumerate(body.input):
            own = _from_store(named[item.id or ""]) if item.type == "item_reference" else item
            placed.append(PlacedItem(own, place))
            given.append(own.stored())
        return Conversation(_with_ids(given), messages_of(placed))

    return await call.attend(call.service.reading.call(join, caller=call.record.caller))


async def prepare_response(call: Call[ResponseRequest], messages: Sequence[Message]) -> PreparedChat:
    """As `prepare_chat`; with `truncation: auto` without the oldest turns, where not all of them fit."""
    body = call.body

    async def prepare(turn: ChatTurn) -> PreparedChat:
        return await prepare_chat(call, turn, limit=body.max_output_tokens, logprobs=body.logprobs)

    return await fitted(call, await with_kept_files(call, body.turn(messages)), prepare)


async def fitted(call: Call[ResponseRequest], turn: ChatTurn, make: Callable[[ChatTurn], Awaitable[T]]) -> T:
    """What is made of a turn; with `truncation: auto` without its oldest messages, where not all of them fit.

    Raises:
        ContextLengthError: it does not fit.
    """
    tries = 0
    while True:
        try:
            return await make(turn)
        except ContextLengthError as error:
            tries += 1
            part = error.fitting_part * (_CAREFUL if tries <= _PATIENT_TRIES else 0.5)
            if call.body.truncation != "auto":
                raise
            work = call.service.reading.call(shortened, turn.messages, part, caller=call.record.caller)
            shorter = await call.attend(work)
            if shorter is None:
                raise
            turn = replace(turn, messages=shorter)


async def _items_before(call: Call[ResponseRequest] | Call[InputTokensRequest]) -> list[Item]:
    name, field = call.body.previous_response_id, "previous_response_id"
    if name is None:
        return []
    kept = call.service.kept
    if not kept.enabled:
        raise _refused(field, f"there is no earlier response, since {_CURE}", "unsupported_value")
    limit = call.service.settings.body_limit(call.engine.info.max_model_len)
    try:
        items = await kept.conversation(call.record.owner, name, limit, call.body.truncation == "auto")
    except BrokenChainError as error:
        why = f"the conversation began with a response that is no longer kept ({error}); send all of it in `input`"
        raise _refused(field, why, "previous_response_not_found") from None
    except ChainTooLongError as error:
        why = f"the conversation has more than {error}; send what matters of it in `input`"
        raise _refused(field, why, "context_length_exceeded") from None
    if items is None:
        raise _refused(field, f"there is no response {quoted(name)}", "previous_response_not_found")
    return items


async def _named_items(call: Call[ResponseRequest] | Call[InputTokensRequest], present: set[str]) -> dict[str, Item]:
    """The items that the input refers to, by their ids."""
    places: dict[str, int] = {}
    for place, item in enumerate(call.body.input):
        if item.type != "item_reference":
            continue
        name = item.id or ""
        if name in places or name in present:
            raise _refused(f"input.{place}", f"the item {quoted(name)} is in the conversation already", "invalid_value")
        places[name] = place
    if not places:
        return {}
    kept = call.service.kept
    if not kept.enabled:
        raise _refused(
            f"input.{next(iter(places.values()))}", f"there is no earlier item, since {_CURE}", "unsupported_value"
        )
    limit = call.service.settings.body_limit(call.engine.info.max_model_len)
    try:
        found = await kept.items_named(call.record.owner, [*places], limit)
    except ChainTooLongError as error:
        why = f"the items that are referred to have more than {error}"
        raise _refused("input", why, "invalid_value") from None
    for name, place in places.items():
        if name not in found:
            raise _refused(f"input.{place}", f"there is no item {quoted(name)}; send the item itself", "item_not_found")
    return found


def _from_store(item: Item) -> InputItem:
    try:
        return InputItem.model_validate(item)
    except ValidationError as error:
        log.error("the store of responses has an item that cannot be read: %s", error.errors()[0]["msg"])
        raise UnavailableError("A kept response cannot be read.", code="store_failed", retry=False) from None


def _with_ids(items: list[Item]) -> list[Item]:
    """The items, each with an id of its own: its own id where no item before has it."""
    seen: set[Any] = set()
    for item in items:
        if item.get("id") is None or item["id"] in seen:
            item["id"] = f"{_PREFIXES[item['type']]}_{uuid.uuid4().hex}"
        seen.add(item["id"])
    return items


def _refused(param: str, why: str, code: str) -> InvalidRequestError:
    return InvalidRequestError(f"`{param}`: {why}.", param=param, code=code)
