"""Where in a chat's prompt the texts of its messages stand, whatever the template does around them.

The chat is filled in a second time, with marks around each text that are of characters which no text can hold. What is
between two marks is the text's, and everything else is the template's own.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

Field = Literal["content", "reasoning_content", "tool_calls", "tools", "template", "prompt", "document"]

# Lone surrogates, as `marks.GUARD`, and none of them is that one.
_OPEN, _CLOSE, _DIGITS = "\ud801", "\ud802", "\ud810"
_MARK = re.compile(f"{_OPEN}([{_DIGITS}-{chr(ord(_DIGITS) + 9)}]+){_OPEN}|{_CLOSE}")
_TO_DIGITS = {ord("0") + digit: chr(ord(_DIGITS) + digit) for digit in range(10)}
_FROM_DIGITS = {ord(_DIGITS) + digit: str(digit) for digit in range(10)}


class Place(NamedTuple):
    """What a part of a prompt comes from: of a chat the number of the message, its role, and its field."""

    field: Field
    message: int | None = None
    role: str | None = None


class Span(NamedTuple):
    """Characters `start` to `end` of a prompt come from `place`, whose text has so many `blanks` before them."""

    start: int
    end: int
    place: Place
    blanks: int = 0


class PlaceMarks:
    """Marks around the texts of one chat."""

    def __init__(self) -> None:
        self._places: list[tuple[Place, int]] = []  # and the blanks before its marks

    def around_messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages as templates read them, with marks around their words, reasoning, and arguments of calls."""
        return [self._message(number, message) for number, message in enumerate(messages)]

    def around_tools(self, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Functions with marks around their names and descriptions."""
        place = Place("tools")
        marked = []
        for tool in tools:
            function = {**tool["function"]}
            for member in ("name", "description"):
                if isinstance(function.get(member), str):
                    function[member] = self._around(function[member], place)
            marked.append({**tool, "function": function})
        return marked

    def spans(self, marked: str) -> tuple[str, list[Span]]:
        """The prompt without its marks, and the places that they have shown, in order; tools are one from the first to
        the last of them."""
        pieces: list[str] = []
        spans: list[Span] = []
        begun: tuple[int, tuple[Place, int]] | None = None
        length = last = 0
        for mark in _MARK.finditer(marked):
            pieces.append(marked[last : mark.start()])
            length, last = length + len(pieces[-1]), mark.end()
            if mark[1] is not None:
                begun = length, self._places[int(mark[1].translate(_FROM_DIGITS))]
            elif begun is not None:
                start, (place, blanks) = begun
                if spans and place.field == "tools" and spans[-1].place == place:
                    start = spans.pop().start
                spans.append(Span(start, length, place, blanks))
                begun = None
        pieces.append(marked[last:])
        return "".join(pieces), spans

    def _message(self, number: int, message: dict[str, Any]) -> dict[str, Any]:
        marked, role = {**message}, message["role"]
        for member in ("content", "reasoning_content"):
            if isinstance(marked.get(member), str):
                marked[member] = self._around(marked[member], Place(member, number, role))
        if marked.get("tool_calls"):
            place = Place("tool_calls", number, role)
            marked["tool_calls"] = [self._call(call, place) for call in marked["tool_calls"]]
        return marked

    def _call(self, call: dict[str, Any], place: Place) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):  # a template may read the JSON, which marks would break
            return call
        return {**call, "function": {**call["function"], "arguments": self._leaves(arguments, place)}}

    def _leaves(self, value: Any, place: Place) -> Any:
        if isinstance(value, str):
            return self._around(value, place)
        if isinstance(value, dict):
            return {name: self._leaves(member, place) for name, member in value.items()}
        return [self._leaves(member, place) for member in value] if isinstance(value, list) else value

    def _around(self, text: str, place: Place) -> str:
        """A text with marks within the blanks around it: many templates strip those."""
        core = text.strip()
        if not core:
            return text
        start = text.index(core)
        self._places.append((place, start))
        name = str(len(self._places) - 1).translate(_TO_DIGITS)
        return f"{text[:start]}{_OPEN}{name}{_OPEN}{core}{_CLOSE}{text[start + len(core) :]}"


def place_at(spans: Sequence[Span], character: int) -> Place:
    """What the character at this offset comes from. The template's own stands before the message that follows it."""
    after = bisect_right(spans, character, key=lambda span: span.start)
    if after and character < spans[after - 1].end:
        return spans[after - 1].place
    if after < len(spans):
        following = spans[after].place
        return Place("template", following.message, following.role)
    return Place("template")
