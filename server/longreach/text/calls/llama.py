"""`{"name": ..., "parameters": {...}}`, after `<|python_tag|>` or as a whole answer: Llama 3.1 and later."""

from __future__ import annotations

from longreach.text.calls.cursor import Cursor, Steps
from longreach.text.calls.json_calls import told_call
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
