"""`<function_calls>NAME(KEY=VALUE, ...)</function_calls>`, a call on each line: OLMo 3.

Values are Python's literals or JSON's. An argument is told when its end is known, written as JSON.
"""

from __future__ import annotations

import ast
import json
import math
import warnings

from longreach.text.calls.cursor import Cursor, Steps, UnreadableError
from longreach.text.calls.json_text import JsonScanner
from longreach.text.calls.offered import Offered
from longreach.text.calls.values import quoted
from longreach.text.parts import Part

OPEN, CLOSE = "<function_calls>", "</function_calls>"
_NAMES = ("true", "false", "null")
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_MOST_CHARACTERS = 1 << 20  # of one value


def read(cursor: Cursor, offered: Offered, mark: str) -> Steps[None]:
    """Read calls from behind their mark."""
    calls = {f"{name}(": name for name in offered.names}
    yield from cursor.blank()
    found = yield from cursor.expect(*calls)
    while found in calls:
        yield offered.call(calls[found])
        yield Part("arguments", "{")
        yield from _told_arguments(cursor)
        yield Part("arguments", "}")
        yield from cursor.blank()
        found = yield from cursor.accept(CLOSE, *calls)
        if not found and (cursor.cut or not cursor.is_over):
            raise UnreadableError
        yield Part("call_end")


def _told_arguments(cursor: Cursor) -> Steps[None]:
    """Read arguments and the bracket behind them, and tell the members of their object."""
    yield from cursor.blank()
    if (yield from cursor.accept(")")):
        return
    seen: set[str] = set()
    end = ","
    while end == ",":
        yield from cursor.blank()
        key, _ = yield from cursor.until("=")
        key = key.strip()
        if not key.isidentifier() or key in seen:
            raise UnreadableError
        text, end = yield from _value(cursor)
        yield Part("arguments", f'{", " if seen else ""}"{quoted(key)}": {json_of_python(text)}')
        seen.add(key)


def _value(cursor: Cursor) -> Steps[tuple[str, str]]:
    """Read one value, and the comma or bracket behind it; return both."""
    pieces: list[str] = []
    open_: list[str] = []
    quote, escaped, count = "", False, 0
    while True:
        character = yield from cursor.peek()
        if not character or count > _MOST_CHARACTERS:
            raise UnreadableError
        cursor.take(1)
        count += 1
        if quote:
            quote = "" if character == quote and not escaped else quote
            escaped = character == "\\" and not escaped
        elif character in "\"'":
            quote = character
        elif character in _CLOSERS:
            open_.append(_CLOSERS[character])
        elif not open_ and character in ",)":
            return "".join(pieces), character
        elif open_ and character == open_[-1]:
            open_.pop()
        elif character in ")]}":
            raise UnreadableError
        pieces.append(character)


def json_of_python(text: str) -> str:
    """The JSON text of a value that is written as Python's literal, or as JSON with its own names.

    Raises:
        UnreadableError: it is none, or cannot be sent back.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            found = _json(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UnreadableError from None
    scanner = JsonScanner()
    if scanner.feed(found) != len(found) or not scanner.end():
        raise UnreadableError
    return found


def _json(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return f'"{quoted(text)}"'
        case ast.Constant(value=None | bool() | int() as value):
            return json.dumps(value)
        case ast.Constant(value=float(number)) if not math.isinf(number):
            return repr(number)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            if not isinstance(number, bool):
                return f"-{_json(node.operand)}"
        case ast.Name(id=name) if name in _NAMES:
            return name
        case ast.List(elts=members):
            return f"[{', '.join(map(_json, members))}]"
        case ast.Dict(keys=keys, values=values):
            pairs = [f'"{_key(key)}": {_json(one)}' for key, one in zip(keys, values, strict=True)]
            return f"{{{', '.join(pairs)}}}"
    raise UnreadableError


def _key(node: ast.expr | None) -> str:
    match node:
        case ast.Constant(value=str(name)):
            return quoted(name)
    raise UnreadableError
