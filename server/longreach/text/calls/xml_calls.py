"""Calls in tags: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`.

Qwen3-Coder and its relatives put each value on lines of its own; Seed-OSS has other outer tags, and no newlines.
"""

from __future__ import annotations

from longreach.text.calls.cursor import Cursor, Steps, UnreadableError
from longreach.text.calls.offered import Offered
from longreach.text.calls.values import is_text, json_of, quoted
from longreach.text.parts import Part

_LAST, _NEXT, _VALUE_END = "</function>", "<parameter=", "</parameter>"
SEED_OPEN, SEED_CLOSE = "<seed:tool_call>", "</seed:tool_call>"


def read(cursor: Cursor, offered: Offered, mark: str) -> Steps[None]:
    """Read one call from behind its mark."""
    lines = mark != SEED_OPEN
    yield from cursor.blank()
    yield from cursor.expect("<function=")
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
        yield from told_value(cursor, offered.parameters(name), key, _VALUE_END, lines)
        separator = ", "
        yield from cursor.blank()
        tag = yield from cursor.expect(_NEXT, _LAST)
    yield Part("arguments", "}")
    yield from cursor.closing(mark.replace("<", "</"))
    yield Part("call_end")


def told_value(cursor: Cursor, parameters: dict, key: str, end: str, lines: bool = False) -> Steps[None]:
    """Read a value up to the tag that ends it, and tell it as JSON: a string while it is read, all else at its end.

    With `lines`, the template put one newline at each end of it.
    """
    if lines:
        yield from cursor.accept("\n")
    marks = (f"\n{end}", end) if lines else (end,)
    if not is_text(parameters, key):
        text, _ = yield from cursor.until(*marks)
        yield Part("arguments", json_of(text, parameters, key))
        return
    yield Part("arguments", '"')
    while True:
        text, found = cursor.before(*marks)
        if text:
            yield Part("arguments", quoted(text))
        if found:
            break
        yield from cursor.more()
    yield Part("arguments", '"')
