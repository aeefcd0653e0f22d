"""Calls between DeepSeek's marks, all inside `<｜tool▁calls▁begin｜>...<｜tool▁calls▁end｜>`.

| models | each call, between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>` |
|---|---|
| V3, R1 | `function<｜tool▁sep｜>NAME`, a newline, and the arguments in a fenced block of `json` |
| V3.1 | `NAME<｜tool▁sep｜>{...}` |
"""

from __future__ import annotations

from longreach.text.calls.cursor import Cursor, Steps
from longreach.text.calls.json_calls import told_named
from longreach.text.calls.offered import Offered
from longreach.text.parts import Part

OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_TYPE = "function"
_FENCE = "```"


def read(cursor: Cursor, offered: Offered, mark: str) -> Steps[None]:
    """Read calls from behind the mark that begins them all."""
    yield from cursor.blank()
    yield from cursor.expect(_BEGIN)
    while True:
        yield from _told(cursor, offered)
        yield from cursor.closing(_END)
        yield Part("call_end")
        yield from cursor.blank()
        if (yield from cursor.expect(_BEGIN, CLOSE)) == CLOSE:
            return


def _told(cursor: Cursor, offered: Offered) -> Steps[None]:
    yield from cursor.blank()
    name = yield from cursor.expect(_TYPE + _SEPARATOR, *(one + _SEPARATOR for one in offered.names))
    name = name.removesuffix(_SEPARATOR)
    yield from cursor.blank()
    if name in offered.names and (name != _TYPE or (yield from cursor.peek()) == "{"):
        yield from told_named(cursor, offered, name)
        return
    name = yield from cursor.expect(*offered.names)
    yield from told_fenced(cursor, offered, name)


def told_fenced(cursor: Cursor, offered: Offered, name: str) -> Steps[None]:
    """Read arguments in a fenced block of `json`, and tell the call while they are read, without its end.

    Raises:
        UnreadableError: there are none.
    """
    yield from cursor.blank()
    yield from cursor.expect(f"{_FENCE}json")
    yield from cursor.blank()
    yield from told_named(cursor, offered, name)
    yield from cursor.blank()
    yield from cursor.expect(_FENCE)
