"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes 2 and 3, Qwen 2.5 and 3, and many others."""

from __future__ import annotations

from longreach.text.calls.cursor import Cursor, Steps
from longreach.text.calls.json_calls import told_call
from longreach.text.calls.offered import Offered
from longreach.text.parts import Part

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def read(cursor: Cursor, offered: Offered, mark: str) -> Steps[None]:
    """Read one call from behind its mark."""
    yield from cursor.blank()
    yield from told_call(cursor, offered)
    yield from cursor.closing(CLOSE)
    yield Part("call_end")
