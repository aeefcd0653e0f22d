"""Answers whose grammar makes them calls: the arguments of one function, or a list of calls."""

from __future__ import annotations

from longreach.text.calls.cursor import Cursor, Steps
from longreach.text.calls.json_calls import told_named
from longreach.text.calls.mistral import told_list
from longreach.text.calls.offered import Offered
from longreach.text.parts import Part


def read_named(cursor: Cursor, offered: Offered, mark: str) -> Steps[None]:
    """Read an object: the arguments of the only function that is offered."""
    [name] = offered.names
    yield from cursor.blank()
    yield from told_named(cursor, offered, name)
    yield Part("call_end")
    yield from cursor.blank()


def read_list(cursor: Cursor, offered: Offered, mark: str) -> Steps[None]:
    """Read a list of objects with `name` and `parameters`."""
    yield from cursor.blank()
    yield from told_list(cursor, offered)
    yield from cursor.blank()
