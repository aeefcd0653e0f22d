"""How a conversation is rearranged for a chat template that does not take it as it is.

Templates differ in the roles that they know. Some raise an exception at a second system message, at two messages of one
role, at two calls at once; others leave such a message out without a word. `template_fit` finds out which.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Plain = dict[str, Any]  # a message as templates read it

# Where system messages go: where they are; those at the beginning in one; the later ones as the user's; all into the
# user's next message. A later one is never moved to the front: the prefix of a conversation stays the same, so that the
# cache of earlier turns still holds.
Systems = Literal["as_sent", "merged", "as_user", "into_user"]
_BETWEEN = "\n\n"
_SHORT_ID_CHARACTERS = 9  # as Mistral's templates demand


@dataclass(frozen=True)
class Arrangement:
    """What is done to a conversation.

    Attributes:
        systems: what becomes of system messages.
        split_calls: an assistant's words and its calls are two messages.
        single_calls: each call has a message of its own, with its result behind it.
        alternate: consecutive messages of one role are one.
    """

    systems: Systems = "as_sent"
    split_calls: bool = False
    single_calls: bool = False
    alternate: bool = False

    def apply(self, messages: Sequence[Plain]) -> list[Plain]:
        """The conversation rearranged; the messages themselves are not changed."""
        arranged = [*messages]
        if self.systems != "as_sent":
            arranged = _SYSTEMS[self.systems](arranged)
        if self.split_calls:
            arranged = [part for message in arranged for part in _split(message)]
        if self.single_calls:
            arranged = _one_call_each(arranged)
        return _alternating(arranged) if self.alternate else arranged


@dataclass(frozen=True)
class CallStyle:
    """How a template wants the calls of functions.

    Attributes:
        arguments_as_text: arguments are the text of a JSON object, and no object.
        no_words: the content of a message that has calls alone: empty, or none.
        short_ids: ids have nine letters and digits.
    """

    arguments_as_text: bool = False
    no_words: Literal[""] | None = ""
    short_ids: bool = False

    def apply(self, messages: Sequence[Plain]) -> list[Plain]:
        """The conversation with its calls in this style, except for their arguments."""
        return [self._styled(message) for message in messages]

    def _styled(self, message: Plain) -> Plain:
        styled = {**message}
        if message.get("tool_calls"):
            if not message["content"]:
                styled["content"] = self.no_words
            if self.short_ids:
                styled["tool_calls"] = [{**call, "id": short_id(call["id"])} for call in message["tool_calls"]]
        if self.short_ids and "tool_call_id" in message:
            styled["tool_call_id"] = short_id(message["tool_call_id"])
        return styled


def short_id(call_id: str) -> str:
    """Nine letters and digits for an id: the id itself where it is such a one."""
    if len(call_id) == _SHORT_ID_CHARACTERS and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode(errors="surrogatepass")).hexdigest()[:_SHORT_ID_CHARACTERS]


def arrangements(messages: Sequence[Plain]) -> Iterator[Arrangement]:
    """What may be done to a conversation of this kind, the smallest changes first."""
    has_system = any(message["role"] == "system" for message in messages)
    systems: Sequence[Systems] = ("as_sent", "merged", "as_user", "into_user") if has_system else ("as_sent",)
    calling = [message for message in messages if message.get("tool_calls")]
    splits = [False, True] if any(message["content"] for message in calling) else [False]
    singles = [False, True] if any(len(message["tool_calls"]) > 1 for message in calling) else [False]
    for alternate in (False, True):
        for one in systems:
            for single in singles:
                for split in splits:
                    yield Arrangement(one, split, single, alternate)


def _merged(messages: list[Plain]) -> list[Plain]:
    """System messages at the beginning are one."""
    first = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if first < 2:
        return messages
    return [_joined(messages[:first]), *messages[first:]]


def _as_user(messages: list[Plain]) -> list[Plain]:
    """Later system messages are the user's."""
    merged = _merged(messages)
    return [
        {**message, "role": "user"} if index and message["role"] == "system" else message
        for index, message in enumerate(merged)
    ]


def _into_user(messages: list[Plain]) -> list[Plain]:
    """System messages stand at the beginning of the user's next one, or are one of the user's."""
    found: list[Plain] = []
    waiting: list[Plain] = []
    for message in messages:
        if message["role"] == "system":
            waiting.append(message)
        elif message["role"] == "user" or not waiting:
            found.append(_joined([*waiting, message]) if waiting else message)
            waiting = []
        else:
            found += [{**_joined(waiting), "role": "user"}, message]
            waiting = []
    return [*found, {**_joined(waiting), "role": "user"}] if waiting else found


_SYSTEMS: dict[Systems, Callable[[list[Plain]], list[Plain]]] = {
    "merged": _merged,
    "as_user": _as_user,
    "into_user": _into_user,
}


def _joined(messages: Sequence[Plain]) -> Plain:
    """One message with the texts of several; the last one's other members."""
    words = _BETWEEN.join(message["content"] for message in messages if message["content"])
    return {**messages[-1], "content": words}


def _split(message: Plain) -> list[Plain]:
    if not message.get("tool_calls") or not message["content"]:
        return [message]
    words = {name: value for name, value in message.items() if name != "tool_calls"}
    calls = {name: value for name, value in message.items() if name != "reasoning_content"}
    return [words, {**calls, "content": ""}]


def _one_call_each(messages: list[Plain]) -> list[Plain]:
    """Messages with one call each, each followed by its result."""
    found: list[Plain] = []
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        if len(message.get("tool_calls", ())) < 2:
            found.append(message)
            continue
        results: list[Plain] = []
        while index < len(messages) and messages[index]["role"] == "tool":
            results.append(messages[index])
            index += 1
        own: dict[str | None, list[Plain]] = {}
        for result in results:
            own.setdefault(result.get("tool_call_id"), []).append(result)
        for number, call in enumerate(message["tool_calls"]):
            words = {} if number == 0 else {"content": ""}
            found += [{**message, **words, "tool_calls": [call]}, *own.pop(call["id"], ())]
        found += [result for result in results if result.get("tool_call_id") in own]
    return found


def _alternating(messages: list[Plain]) -> list[Plain]:
    """Consecutive messages of the user, or of the assistant in words, are one."""
    found: list[Plain] = []
    for message in messages:
        before = found[-1] if found else None
        mergeable = message["role"] in ("user", "assistant") and not message.get("tool_calls")
        if before is not None and mergeable and before["role"] == message["role"] and not before.get("tool_calls"):
            found[-1] = _joined([before, message])
        else:
            found.append(message)
    return found
