"""Calls in tags: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`.

Qwen3-Coder and its relatives put each value on lines of its own, and at times leave out the outer tag that opens.
Seed-OSS has other outer tags, and no newlines.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from longreach.text.calls.cursor import Cursor, Steps, UnreadableError
from longreach.text.calls.hermes import CLOSE
from longreach.text.calls.offered import Offered
from longreach.text.calls.values import is_text, json_of, quoted
from longreach.text.parts import Part

FUNCTION = "<function="
_LAST, _NEXT, _VALUE_END = "</function>", "<parameter=", "</parameter>"
SEED_OPEN, SEED_CLOSE = "<seed:tool_call>", "</seed:tool_call>"


def read(cursor: Cursor, offered: Offered, mark: str) -> Steps[None]:
    """Read one call from behind its mark."""
    lines = mark != SEED_OPEN
    if mark != FUNCTION:
        yield from cursor.blank()
        yield from cursor.expect(FUNCTION)
    name = yield from cursor.expect(*offered.names)
    yield from cursor.expect(">")
    yield from cursor.blank()
    tag = yield from cursor.expect(_NEXT, _LAST)
    yield offered.call(name)
    yield Part("arguments", "{")
    separator = ""
    while tag == _NEXT:
        key, end = yield from cursor.until(">", "\n")
        if end != ">" or not key:
            raise UnreadableError
        yield Part("arguments", f'{separator}"{quoted(key)}": ')
        yield from told_value(cursor, offered.parameters(name), key, (_NEXT, _VALUE_END), lines)
        separator = ", "
        yield from cursor.blank()
        tag = yield from cursor.expect(_NEXT, _LAST)
    yield Part("arguments", "}")
    if mark != FUNCTION:
        yield from cursor.closing(mark.replace("<", "</"))
    yield Part("call_end")
    if mark == FUNCTION:
        yield from cursor.blank()
        yield from cursor.expect(CLOSE)


def told_value(
    cursor: Cursor, parameters: dict[str, Any], key: str, tags: tuple[str, str], lines: bool = False
) -> Steps[None]:
    """Read a value up to the second of the `tags` around values, and tell it as JSON: a string while it is read, all
    else at its end. With `lines`, the template put one newline at each end of it.

    Raises:
        UnreadableError: it has no end.
    """
    written = is_text(parameters, key)
    held: list[str] = []
    if written:
        yield Part("arguments", '"')
    for piece in _pieces(cursor, *tags, lines):
        if piece is None:
            yield None
        elif written and piece:
            yield Part("arguments", quoted(piece))
        else:
            held.append(piece)
    yield Part("arguments", '"' if written else json_of("".join(held), parameters, key))


def _pieces(cursor: Cursor, begin: str, end: str, lines: bool) -> Generator[str | None, None, None]:
    """The text of a value, and None where more is needed. Tags within it, as of a call that a text shows, are its own
    if they are paired; else it has no end."""
    ends = (f"\n{end}", end) if lines else (end,)
    if lines:
        while not cursor.known and not cursor.ended:
            yield None
        cursor.take(int(cursor.ahead(1) == "\n"))
    inner = 0
    while True:
        text, mark = cursor.before(begin, *ends)
        if mark in ends and not inner:
            yield text
            return
        inner += (mark == begin) - (mark in ends)
        yield text + mark
        if not mark:
            if cursor.ended:
                raise UnreadableError
            yield None
