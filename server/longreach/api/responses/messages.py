"""From the items of a conversation to the messages of a chat.

Reasoning, words and calls that follow each other are one message of the assistant, as the model wrote them. The output
of a call is a message of a tool.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import orjson
from pydantic import ValidationError

from longreach.api.schema.requests.chat_messages import CalledFunction, Message, ToolCall
from longreach.api.schema.requests.fields import MAX_TOOLS
from longreach.api.schema.requests.response_items import CALL_TYPES, OUTPUT_TYPES, InputItem, text_of
from longreach.api.schema.requests.response_tools import shown_name
from longreach.errors import InvalidRequestError, quoted


@dataclass(frozen=True)
class PlacedItem:
    """An item, and its place in the request's `input`; None if it comes from a kept response."""

    item: InputItem
    place: int | None = None


def messages_of(items: Iterable[PlacedItem]) -> list[Message]:
    """The messages of a chat that say what the items say, in their order.

    Raises:
        InvalidRequestError: an output has no call before it, a call has two outputs, or an item cannot be written in a
            chat; names the item's place.
    """
    writer = _Writer()
    for placed in items:
        try:
            writer.add(placed)
        except ValidationError as error:
            raise _refused(placed, error.errors()[0]["msg"]) from None
    writer.end_turn()
    return writer.messages


@dataclass
class _Turn:
    """A message of the assistant that is being put together."""

    reasoning: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)


class _Writer:
    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._turn = _Turn()
        self._open: dict[str, InputItem] = {}  # calls without an output yet, by their `call_id`
        self._answered: set[str] = set()

    def add(self, placed: PlacedItem) -> None:
        item = placed.item
        if item.type in CALL_TYPES:
            self._add_call(placed)
        elif item.type in OUTPUT_TYPES:
            self._add_output(placed)
        elif item.type == "reasoning":
            if self._turn.words and not self._turn.calls:
                self.end_turn()
            if text := text_of(item.content) or text_of(item.summary):
                self._turn.reasoning.append(text)
        elif item.role == "assistant":
            if self._turn.words and not self._turn.calls:
                self.end_turn()
            self._turn.words.append(text_of(item.content))
        else:
            self.end_turn()
            assert item.role is not None, "a message has a role"
            self.messages.append(Message(role=item.role, content=text_of(item.content)))

    def end_turn(self) -> None:
        """Write the message of the assistant that has been put together, if any."""
        turn, self._turn = self._turn, _Turn()
        if not (turn.reasoning or turn.words or turn.calls):
            return
        self.messages.append(
            Message(
                role="assistant",
                content="\n".join(turn.words) if turn.words or not turn.calls else None,
                reasoning_content="\n".join(turn.reasoning) or None,
                tool_calls=turn.calls or None,
            )
        )

    def _add_call(self, placed: PlacedItem) -> None:
        item = placed.item
        assert item.call_id is not None, "a call has an id"
        assert item.name is not None, "a call has a name"
        if item.call_id in self._open or item.call_id in self._answered:
            raise _refused(placed, f"there is another call with the `call_id` {quoted(item.call_id)}")
        if len(self._turn.calls) == MAX_TOOLS:
            raise _refused(placed, f"there are more than {MAX_TOOLS} calls without an output between them")
        self._open[item.call_id] = item
        arguments = item.arguments
        if item.type == "custom_tool_call":
            arguments = orjson.dumps({"input": item.input}).decode()
        function = CalledFunction(name=shown_name(item.name, item.namespace), arguments=arguments or "")
        self._turn.calls.append(ToolCall(id=item.call_id, type="function", function=function))

    def _add_output(self, placed: PlacedItem) -> None:
        item = placed.item
        assert item.call_id is not None, "an output names its call"
        if item.call_id in self._answered:
            raise _refused(placed, f"there are two outputs of the call {quoted(item.call_id)}")
        call = self._open.pop(item.call_id, None)
        if call is None or call.type != item.type.removesuffix("_output"):
            kind = item.type.removesuffix("_output")
            raise _refused(placed, f"there is no {kind} {quoted(item.call_id)} before this output")
        self._answered.add(item.call_id)
        self.end_turn()
        self.messages.append(Message(role="tool", tool_call_id=item.call_id, content=text_of(item.output)))


def _refused(placed: PlacedItem, why: str) -> InvalidRequestError:
    if placed.place is None:
        param = "previous_response_id"
        return InvalidRequestError(f"`{param}`, an item of a kept response: {why}.", param=param, code="invalid_value")
    param = f"input.{placed.place}"
    return InvalidRequestError(f"`{param}`: {why}.", param=param, code="invalid_value")


def shortened(messages: Sequence[Message], part: float) -> list[Message] | None:
    """The messages without the oldest turns, so that about `part` of their text is left; None if none can be left out.

    System messages at the beginning stay, and so does everything from the last message of a user on. What is left out
    ends before a message of a user, so that no output of a tool loses its call.
    """
    start = next((at for at, message in enumerate(messages) if message.role not in ("system", "developer")), 0)
    turns = {at for at, message in enumerate(messages) if message.role == "user" and at > start}
    if not turns:
        return None
    sizes = [_size(message) for message in messages]
    goal, kept = part * sum(sizes), sum(sizes)
    last = max(turns)
    for at in range(start, last):
        kept -= sizes[at]
        if at + 1 in turns and kept <= goal:
            return [*messages[:start], *messages[at + 1 :]]
    return [*messages[:start], *messages[last:]]


def _size(message: Message) -> int:
    calls = sum(len(call.function.arguments) for call in message.tool_calls or ())
    return 1 + len(message.content or "") + len(message.reasoning_content or "") + calls
