"""Calls of Hunyuan's models, all inside `<tool_calls>...</tool_calls>`.

| models | written |
|---|---|
| A13B | `[{"name": ..., "arguments": {...}}]` |
| 0.5B to 7B | `<tool_call>NAME`, a newline, the arguments in a fenced block of `json`, and `</tool_call>` |
| Hy3 | `<tool_call>NAME<tool_sep>`, parameters in tags as GLM's, `</tool_call>`; all tags may end in `:opensource` |
"""

from __future__ import annotations

from longreach.text.calls.cursor import Cursor, Steps, UnreadableError
from longreach.text.calls.deepseek import told_fenced
from longreach.text.calls.listed import read_list
from longreach.text.calls.offered import Offered
from longreach.text.calls.values import quoted
from longreach.text.calls.xml_calls import told_value
from longreach.text.parts import Part

OPEN, CLOSE = "<tool_calls>", "</tool_calls>"
OPEN_SOURCE = "<tool_calls:opensource>"
_CALL, _CALL_END = "<tool_call>", "</tool_call>"


def read(cursor: Cursor, offered: Offered, mark: str) -> Steps[None]:
    """Read a list of objects, or calls in marks of their own."""
    yield from cursor.blank()
    if (yield from cursor.peek()) == "[":
        yield from read_list(cursor, offered, (CLOSE,))
        return
    yield from cursor.expect(_CALL)
    while True:
        yield from cursor.blank()
        name = yield from cursor.expect(*offered.names)
        yield from told_fenced(cursor, offered, name)
        if (yield from _ended(cursor, _CALL, _CALL_END, CLOSE)) != _CALL:
            return


def read_tags(cursor: Cursor, offered: Offered, mark: str) -> Steps[None]:
    """Read calls whose parameters stand in tags."""
    suffix = mark.removeprefix("<tool_calls")  # of all tags, with what ends them

    def tags(name: str) -> tuple[str, str]:
        return f"<{name}{suffix}", f"</{name}{suffix}"

    (call, call_end), (key, key_end), value = tags("tool_call"), tags("arg_key"), tags("arg_value")
    yield from cursor.blank()
    yield from cursor.expect(call)
    while True:
        yield from cursor.blank()
        name = yield from cursor.expect(*offered.names)
        yield from cursor.blank()
        yield from cursor.expect(f"<tool_sep{suffix}")
        yield from cursor.blank()
        yield offered.call(name)
        yield Part("arguments", "{")
        separator = ""
        while (yield from cursor.accept(key)):
            parameter, _ = yield from cursor.until(key_end)
            yield from cursor.blank()
            yield from cursor.expect(value[0])
            if not parameter:
                raise UnreadableError
            yield Part("arguments", f'{separator}"{quoted(parameter)}": ')
            yield from told_value(cursor, offered.parameters(name), parameter, value)
            separator = ", "
            yield from cursor.blank()
        yield Part("arguments", "}")
        if (yield from _ended(cursor, call, call_end, tags("tool_calls")[1])) != call:
            return


def _ended(cursor: Cursor, begin: str, end: str, close: str) -> Steps[str]:
    """Read what ends a call, and what follows it: another one, or what closes them all.

    Raises:
        UnreadableError: neither does.
    """
    yield from cursor.blank()
    yield from cursor.expect(end)
    yield from cursor.blank()
    found = yield from cursor.accept(begin, close)
    if not found and (cursor.cut or not cursor.is_over):
        raise UnreadableError
    yield Part("call_end")
    return found
