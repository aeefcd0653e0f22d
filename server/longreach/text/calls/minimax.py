"""`<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter>...</invoke>...</minimax:tool_call>`.

MiniMax-M2 writes several calls between one pair of marks.
"""

from __future__ import annotations

from longreach.text.calls.cursor import Cursor, Steps, UnreadableError
from longreach.text.calls.offered import Offered
from longreach.text.calls.values import quoted
from longreach.text.calls.xml_calls import told_value
from longreach.text.parts import Part

OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
_INVOKE, _INVOKE_END = '<invoke name="', "</invoke>"
_KEY, _VALUE_END = '<parameter name="', "</parameter>"


def read(cursor: Cursor, offered: Offered, mark: str) -> Steps[None]:
    """Read calls from behind their mark."""
    yield from cursor.blank()
    yield from cursor.expect(_INVOKE)
    while True:
        name = yield from cursor.expect(*offered.names)
        yield from cursor.expect('">')
        yield from cursor.blank()
        tag = yield from cursor.expect(_KEY, _INVOKE_END)
        yield offered.call(name)
        yield Part("arguments", "{")
        separator = ""
        while tag == _KEY:
            key, end = yield from cursor.until('">', "\n")
            if end != '">' or not key:
                raise UnreadableError
            yield Part("arguments", f'{separator}"{quoted(key)}": ')
            yield from told_value(cursor, offered.parameters(name), key, (_KEY, _VALUE_END))
            separator = ", "
            yield from cursor.blank()
            tag = yield from cursor.expect(_KEY, _INVOKE_END)
        yield Part("arguments", "}")
        yield from cursor.blank()
        found = yield from cursor.accept(_INVOKE, CLOSE)
        if not found and (cursor.cut or not cursor.is_over):
            raise UnreadableError
        yield Part("call_end")
        if found != _INVOKE:
            return
