"""`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>`: GLM 4.5 to 4.7.

Strings are written as they are and everything else as JSON; the template puts newlines between tags, and none inside.
"""

from __future__ import annotations

from longreach.text.calls.cursor import Cursor, Steps, UnreadableError
from longreach.text.calls.hermes import CLOSE
from longreach.text.calls.offered import Offered
from longreach.text.calls.values import quoted
from longreach.text.calls.xml_calls import told_value
from longreach.text.parts import Part

_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


def read(cursor: Cursor, offered: Offered, mark: str) -> Steps[None]:
    """Read one call from behind its mark."""
    yield from cursor.blank()
    name = yield from cursor.expect(*offered.names)
    yield from cursor.blank()
    end = yield from cursor.expect(_KEY, CLOSE)
    yield offered.call(name)
    yield Part("arguments", "{")
    separator = ""
    while end == _KEY:
        key, _ = yield from cursor.until(_KEY_END)
        yield from cursor.blank()
        yield from cursor.expect(_VALUE)
        if not key:
            raise UnreadableError
        yield Part("arguments", f'{separator}"{quoted(key)}": ')
        yield from told_value(cursor, offered.parameters(name), key, (_VALUE, _VALUE_END))
        separator = ", "
        yield from cursor.blank()
        end = yield from cursor.expect(_KEY, CLOSE)
    yield Part("arguments", "}")
    yield Part("call_end")
