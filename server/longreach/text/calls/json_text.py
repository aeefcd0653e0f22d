"""One JSON value in a text that is still being written: where it ends, and whether it can still be one.

The value is followed character by character and never changed, so that what is told of it is what the model wrote.
Beside the grammar of RFC 8259, three things that cannot be sent back are no values: half a surrogate pair, a number
beyond doubles, and more than `MAX_LEVELS` levels.
"""

from __future__ import annotations

import json
import math
import re

from longreach.text.calls.cursor import Cursor, Steps, UnreadableError
from longreach.text.parts import Part

MAX_LEVELS = 64
_BLANK = " \t\r\n"
_PLAIN = re.compile(r'[^"\\\x00-\x1f\ud800-\udfff]*')
_DIGITS = "0123456789"
_HEX = "0123456789abcdefABCDEF"
_WORDS = ("true", "false", "null")
# A number: from each state, what each kind of character leads to.
_NUMBER = {
    "": {"-": "minus", "0": "zero", "d": "whole"},
    "minus": {"0": "zero", "d": "whole"},
    "zero": {".": "point", "e": "exponent"},
    "whole": {"0": "whole", "d": "whole", ".": "point", "e": "exponent"},
    "point": {"0": "fraction", "d": "fraction"},
    "fraction": {"0": "fraction", "d": "fraction", "e": "exponent"},
    "exponent": {"0": "power", "d": "power", "-": "sign", "+": "sign"},
    "sign": {"0": "power", "d": "power"},
    "power": {"0": "power", "d": "power"},
}
_WHOLE_NUMBERS = {"zero", "whole", "fraction", "power"}


class JsonScanner:
    """Follows one JSON value.

    Attributes:
        done: the value has ended.
        failed: the next character cannot belong to any value that begins like this one.
    """

    def __init__(self) -> None:
        self.done = self.failed = False
        self._closers: list[str] = []  # of the objects and lists that are open
        self._expects = "value"
        self._is_key = False
        self._escape = ""  # what has been read of an escape sequence
        self._needs_low = False  # the first half of a surrogate pair has been read
        self._word = ""
        self._number = ""  # its state
        self._digits: list[str] = []

    def feed(self, text: str, start: int = 0) -> int:
        """Follow more text, which begins at `start`; how many of its characters belong to the value."""
        at = start
        while at < len(text) and not self.done and not self.failed:
            if self._expects == "string" and not self._escape and not self._needs_low:
                plain = _PLAIN.match(text, at)
                assert plain is not None
                at = plain.end()
                if at == len(text):
                    break
            if self._expects == "number" and not self._digit(text[at]):
                self._end_number()  # by a character that is not its own
                continue
            if self._expects != "number" and not self._step(text[at]):
                self.failed = True
                break
            at += 1
        return at - start

    def end(self) -> bool:
        """Whether the value is whole if the text ends here: a number outside of objects has no other end."""
        if self._expects == "number" and not self.done:
            self._end_number()
        return self.done

    def _step(self, character: str) -> bool:
        """Follow one character outside of numbers; whether it can stand here."""
        expects = self._expects
        if expects == "string":
            return self._in_string(character)
        if expects == "word":
            self._word += character
            if self._word in _WORDS:
                self._end_value()
            return any(word.startswith(self._word) for word in _WORDS)
        if character in _BLANK:
            return True
        if expects in ("key", "key or end") and character == '"':
            self._expects, self._is_key = "string", True
            return True
        if expects in ("key or end", "value or end", "comma or end") and character == self._closers[-1]:
            self._closers.pop()
            self._end_value()
            return True
        if expects == "colon" and character == ":":
            self._expects = "value"
            return True
        if expects == "comma or end" and character == ",":
            self._expects = "key" if self._closers[-1] == "}" else "value"
            return True
        return expects in ("value", "value or end") and self._begin_value(character)

    def _begin_value(self, character: str) -> bool:
        if character in "{[":
            self._closers.append("}" if character == "{" else "]")
            self._expects = "key or end" if character == "{" else "value or end"
            return len(self._closers) <= MAX_LEVELS
        if character == '"':
            self._expects, self._is_key = "string", False
            return True
        if character in "tfn":
            self._expects, self._word = "word", character
            return True
        self._expects, self._number = "number", ""
        self._digits.clear()
        return self._digit(character)

    def _in_string(self, character: str) -> bool:
        if self._escape:
            self._escape += character
            if self._escape[1] != "u":
                self._escape = ""
                return character in '"\\/bfnrt' and not self._needs_low
            if len(self._escape) > 2 and character not in _HEX:
                return False
            if len(self._escape) == len("\\u0000"):
                code, self._escape = int(self._escape[2:], 16), ""
                is_low = 0xDC00 <= code <= 0xDFFF
                if is_low != self._needs_low:
                    return False
                self._needs_low = 0xD800 <= code <= 0xDBFF
            return True
        if character == "\\":
            self._escape = character
            return True
        if character == '"' and not self._needs_low:
            if self._is_key:
                self._expects = "colon"
            else:
                self._end_value()
            return True
        return False

    def _digit(self, character: str) -> bool:
        kind = "d" if character in "123456789" else "e" if character in "eE" else character
        state = _NUMBER[self._number].get(kind)
        if state is None:
            return False
        self._number = state
        self._digits.append(character)
        return True

    def _end_number(self) -> None:
        if self._number in _WHOLE_NUMBERS and not math.isinf(float("".join(self._digits))):
            self._end_value()
        else:
            self.failed = True

    def _end_value(self) -> None:
        self._expects = "comma or end"
        self.done = not self._closers


def json_value(cursor: Cursor) -> Steps[str]:
    """Read a JSON value; its text.

    Raises:
        UnreadableError: there is none.
    """
    scanner = JsonScanner()
    pieces: list[str] = []
    while not scanner.done:
        pieces.append(cursor.take(scanner.feed(cursor.text, cursor.here)))
        if scanner.failed or (not scanner.done and cursor.ended and not scanner.end()):
            raise UnreadableError
        if not scanner.done:
            yield from cursor.more()
    return "".join(pieces)


def json_string(cursor: Cursor) -> Steps[str]:
    """Read a JSON string; what it means.

    Raises:
        UnreadableError: there is none.
    """
    if (yield from cursor.peek()) != '"':
        raise UnreadableError
    return json.loads((yield from json_value(cursor)))


def told_object(cursor: Cursor) -> Steps[None]:
    """Read a JSON object, and tell it as arguments while it is read.

    Raises:
        UnreadableError: there is none.
    """
    if (yield from cursor.peek()) != "{":
        raise UnreadableError
    scanner = JsonScanner()
    while True:
        if piece := cursor.take(scanner.feed(cursor.text, cursor.here)):
            yield Part("arguments", piece)
        if scanner.failed:
            raise UnreadableError
        if scanner.done:
            return
        yield from cursor.more()


def is_object(text: str) -> bool:
    """Whether a text is one JSON object and nothing else but blank space."""
    inner = text.strip(_BLANK)
    scanner = JsonScanner()
    return inner.startswith("{") and scanner.feed(inner) == len(inner) and scanner.done
