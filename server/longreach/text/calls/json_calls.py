"""Calls as JSON objects: `{"name": ..., "arguments": {...}}`, in any order; some models write `parameters`."""

from __future__ import annotations

from longreach.text.calls.cursor import Cursor, Steps, UnreadableError
from longreach.text.calls.json_text import is_object, json_string, json_value, told_object
from longreach.text.calls.offered import Offered
from longreach.text.parts import Part

_ARGUMENTS = ("arguments", "parameters")
# Members that formats add; anything else is no call where no mark says that there is one.
_KNOWN = ("name", "id", "type", *_ARGUMENTS)


def told_call(cursor: Cursor, offered: Offered, marked: bool = True, name_key: str = "name") -> Steps[None]:
    """Read an object that calls a function, and tell it while it is read, without its end.

    The raw text of the arguments is told as it is written, once the name is known and is that of a function that is
    offered. Arguments may also be written as a string with an object in it.

    Arguments:
        marked: a mark said that a call follows. Without one, only an object of known members is a call.
        name_key: the member that is the function's name.

    Raises:
        UnreadableError: there is none.
    """
    name: str | None = None
    arguments: str | None = None  # those that came before the name
    seen: set[str] = set()
    yield from cursor.expect("{")
    while True:
        yield from cursor.blank()
        key = yield from json_string(cursor)
        kind = "arguments" if key in _ARGUMENTS else key
        if (kind in seen and key in (*_KNOWN, name_key)) or (not marked and key not in _KNOWN):
            raise UnreadableError
        seen.add(kind)
        yield from cursor.blank()
        yield from cursor.expect(":")
        yield from cursor.blank()
        if kind == name_key:
            name = yield from json_string(cursor)
            if name not in offered.names:
                raise UnreadableError
            if arguments is not None:
                yield offered.call(name)
                yield Part("arguments", arguments)
        elif kind != "arguments":
            yield from json_value(cursor)
        elif name is not None and (yield from cursor.peek()) == "{":
            yield from told_named(cursor, offered, name)
        else:
            arguments = yield from _object(cursor)
            if name is not None:
                yield offered.call(name)
                yield Part("arguments", arguments)
        yield from cursor.blank()
        if (yield from cursor.expect(",", "}")) == "}":
            break
    if name is None:
        raise UnreadableError
    if "arguments" not in seen:
        yield offered.call(name)
        yield Part("arguments", "{}")


def told_named(cursor: Cursor, offered: Offered, name: str) -> Steps[None]:
    """Read an object that is the arguments of the function `name`, and tell the call while it is read, without its end.

    Raises:
        UnreadableError: there is none.
    """
    if (yield from cursor.peek()) != "{":
        raise UnreadableError
    yield offered.call(name)
    yield from told_object(cursor)


def _object(cursor: Cursor) -> Steps[str]:
    quoted = (yield from cursor.peek()) == '"'
    text = yield from (json_string(cursor) if quoted else json_value(cursor))
    if not is_object(text):
        raise UnreadableError
    return text
