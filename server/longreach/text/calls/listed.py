"""Calls as JSON objects in a list between marks; a format is its marks and the names of an object's members.

| format | written |
|---|---|
| `granite` | `<|tool_call|>[{"name": ..., "arguments": {...}}]` with no mark behind it, some with `<tool_call>` |
| `phi4_mini` | `<|tool_call|>[{...}]<|/tool_call|>`, or one object without the list; also `functools[{...}]` |
| `toolcall` | `<TOOLCALL>[{...}]</TOOLCALL>` |
| `cohere` | `<|START_ACTION|>[{"tool_call_id": ..., "tool_name": ..., "parameters": {...}}]<|END_ACTION|>` |
| `apertus` | `<|tools_prefix|>[{NAME: {...}}]<|tools_suffix|>` |

The ids that a model writes are not used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from longreach.text.calls.cursor import Cursor, Steps, UnreadableError
from longreach.text.calls.json_calls import told_call, told_named
from longreach.text.calls.json_text import json_string
from longreach.text.calls.offered import Offered
from longreach.text.parts import Part

GRANITE, PHI, FUNCTOOLS, HERMES = "<|tool_call|>", "<|tool_call|>", "functools", "<tool_call>"
TOOLCALL, ACTION, PREFIX = "<TOOLCALL>", "<|START_ACTION|>", "<|tools_prefix|>"
_Told = Callable[[Cursor, Offered], Steps[None]]


def read_list(cursor: Cursor, offered: Offered, closes: tuple[str, ...], told: _Told = told_call) -> Steps[None]:
    """Read a list of calls, or one call, and what closes them.

    Arguments:
        closes: the marks that do; none if nothing does.
        told: reads one object.

    Raises:
        UnreadableError: there is none.
    """
    yield from cursor.blank()
    is_list = bool((yield from cursor.accept("[")))
    while True:
        yield from cursor.blank()
        yield from told(cursor, offered)
        yield from cursor.blank()
        last = not is_list or (yield from cursor.expect(",", "]")) == "]"
        if last and closes:
            yield from cursor.closing(*closes)
        yield Part("call_end")
        if last:
            return


def read_granite(cursor: Cursor, offered: Offered, mark: str) -> Steps[None]:
    """Read a list, which nothing closes."""
    yield from cursor.blank()
    if (yield from cursor.peek()) != "[":
        raise UnreadableError
    yield from read_list(cursor, offered, ())


def read_phi(cursor: Cursor, offered: Offered, mark: str) -> Steps[None]:
    """Read a list, or an object that its mark closes."""
    if mark == FUNCTOOLS and (yield from cursor.peek()) != "[":
        raise UnreadableError
    yield from read_list(cursor, offered, () if mark == FUNCTOOLS else ("<|/tool_call|>",))


def read_toolcall(cursor: Cursor, offered: Offered, mark: str) -> Steps[None]:
    """Read a list between marks."""
    yield from read_list(cursor, offered, ("</TOOLCALL>",))


def read_cohere(cursor: Cursor, offered: Offered, mark: str) -> Steps[None]:
    """Read a list of objects with `tool_name` and `parameters`."""
    yield from read_list(cursor, offered, ("<|END_ACTION|>",), functools.partial(told_call, name_key="tool_name"))


def read_apertus(cursor: Cursor, offered: Offered, mark: str) -> Steps[None]:
    """Read a list of objects whose one member is the function's name."""
    yield from read_list(cursor, offered, ("<|tools_suffix|>",), _told_member)


def _told_member(cursor: Cursor, offered: Offered) -> Steps[None]:
    yield from cursor.expect("{")
    yield from cursor.blank()
    name = yield from json_string(cursor)
    if name not in offered.names:
        raise UnreadableError
    yield from cursor.blank()
    yield from cursor.expect(":")
    yield from cursor.blank()
    yield from told_named(cursor, offered, name)
    yield from cursor.blank()
    yield from cursor.expect("}")
