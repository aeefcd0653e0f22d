"""`{"name": ..., "parameters": {...}}`, after `<|python_tag|>` or as a whole answer: Llama 3.1 and later."""

from __future__ import annotations

from longreach.text.calls.cursor import Cursor, Steps
from longreach.text.calls.json_calls import told_call, told_named
from longreach.text.calls.offered import Offered
from longreach.text.parts import Part

OPEN = "<|python_tag|>"


def read(cursor: Cursor, offered: Offered, mark: str) -> Steps[None]:
    """Read calls, between which semicolons stand, from behind the mark or from the beginning of the answer.

    Raises:
        UnreadableError: no further call follows. What has ended before is a call.
    """
    yield from cursor.blank()
    if not mark:
        yield from cursor.accept(OPEN)
        yield from cursor.blank()
    while True:
        yield from told_call(cursor, offered, marked=False)
        yield Part("call_end")
        yield from cursor.blank()
        yield from cursor.expect(";")
        yield from cursor.blank()


def read_exact(cursor: Cursor, offered: Offered, mark: str) -> Steps[None]:
    """As `read`, of calls that begin with their name: what the grammar of calls has.

    Raises:
        UnreadableError: as `read`.
    """
    if not mark:
        yield from cursor.blank()
        yield from cursor.accept(OPEN)
    while True:
        yield from _expect(cursor, "{")
        if (yield from _expect(cursor, '"name"', '"type"')) == '"type"':
            for literal in (":", '"function"', ",", '"name"'):
                yield from _expect(cursor, literal)
        yield from _expect(cursor, ":")
        name = (yield from _expect(cursor, *(f'"{name}"' for name in offered.names)))[1:-1]
        yield from _expect(cursor, ",")
        yield from _expect(cursor, '"parameters"', '"arguments"')
        yield from _expect(cursor, ":")
        yield from cursor.blank()
        yield from told_named(cursor, offered, name)
        yield from _expect(cursor, "}")
        yield Part("call_end")
        yield from _expect(cursor, ";")


def _expect(cursor: Cursor, *literals: str) -> Steps[str]:
    yield from cursor.blank()
    return (yield from cursor.expect(*literals))
