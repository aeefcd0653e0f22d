"""Reading a text that is still being written.

Readers are generators. They yield the parts that they are certain of, and None where they need more text. So they read
a text the same way whatever pieces it arrives in: what they decide depends on characters alone.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Generator
from typing import TypeVar

from longreach.text.parts import Part

T = TypeVar("T")
Steps = Generator[Part | None, None, T]

BLANK = " \t\r\n"


class UnreadableError(Exception):
    """What was to be read does not stand here: the text is no call, or it ends before the call does."""


class Cursor:
    """A place in a text that grows.

    Attributes:
        text: what is known of the text; its beginning is dropped once it has been read.
        here: the place in `text`.
        at: the place in the whole text.
        ended: no more text will come.
        cut: it ended because it had to, by a limit, and not because the model was done.
    """

    def __init__(self, text: str = "") -> None:
        self.text = text
        self.here = self.at = 0
        self.ended = self.cut = False
        self._kept: list[str] | None = None

    @property
    def known(self) -> int:
        """Characters that are known from here on."""
        return len(self.text) - self.here

    @property
    def rest(self) -> str:
        """A copy of all that is known from here on."""
        return self.text[self.here :]

    @property
    def is_over(self) -> bool:
        """Whether the whole text has been read."""
        return self.ended and self.here == len(self.text)

    def add(self, text: str) -> None:
        """The text goes on."""
        self.text, self.here = self.rest + text, 0

    def ahead(self, count: int) -> str:
        """The next characters, unread: so many, or as many as are known."""
        return self.text[self.here : self.here + count]

    def mark(self) -> None:
        """Keep what is read from here on, for `kept` and `rewind`."""
        self._kept = []

    def forget(self) -> None:
        """Keep nothing any more."""
        self._kept = None

    def kept(self) -> str:
        """What has been read since the mark."""
        return "".join(self._kept or ())

    def rewind(self) -> None:
        """Go back to the mark, and forget it."""
        kept = self.kept()
        self._kept = None
        self.at -= len(kept)
        self.here -= len(kept)
        if self.here < 0:  # the text before has been dropped
            self.text, self.here = kept + self.text[self.here + len(kept) :], 0

    def take(self, count: int) -> str:
        """Read so many characters, or as many as are known."""
        taken = self.ahead(count)
        self.here += len(taken)
        self.at += len(taken)
        if self._kept is not None and taken:
            self._kept.append(taken)
        return taken

    def take_all(self) -> str:
        """Read all that is known."""
        return self.take(self.known)

    def more(self) -> Steps[None]:
        """Wait for more text.

        Raises:
            UnreadableError: there is none.
        """
        if self.ended:
            raise UnreadableError
        yield None

    def blank(self) -> Steps[None]:
        """Read blank space, if any."""
        while True:
            end = self.here
            while end < len(self.text) and self.text[end] in BLANK:
                end += 1
            self.take(end - self.here)
            if self.known or self.ended:
                return
            yield None

    def peek(self) -> Steps[str]:
        """The next character, unread; empty at the end of the text."""
        while not self.known and not self.ended:
            yield None
        return self.ahead(1)

    def accept(self, *literals: str) -> Steps[str]:
        """Read the longest of these that the text goes on with, and return it; empty if there is none."""
        while True:
            possible = [one for one in literals if one.startswith(self.ahead(len(one)))]
            known = [one for one in possible if len(one) <= self.known]
            if len(known) == len(possible) or self.ended:
                return self.take(max(map(len, known), default=0))
            yield None

    def expect(self, *literals: str) -> Steps[str]:
        """Read one of these.

        Raises:
            UnreadableError: the text does not go on with any.
        """
        found = yield from self.accept(*literals)
        if not found:
            raise UnreadableError
        return found

    def plain(self, *marks: str) -> tuple[str, str]:
        """Read what certainly stands before the first of `marks`; and that mark, which stays unread, or nothing if it
        is not there yet. What may be a mark's beginning stays unread, too."""
        found = _any(marks).search(self.text, self.here) if marks else None
        if found is not None:
            return self.take(found.start() - self.here), found[0]
        end = self.rest[-max(map(len, marks), default=1) :]
        held = max((open_end(end, mark) for mark in marks), default=0)
        return self.take(self.known - held), ""

    def words(self, *marks: str) -> tuple[str, str]:
        """As `plain`, but a mark's beginning at the end of the whole text is read, since it is none."""
        text, mark = self.plain(*marks)
        return text + (self.take_all() if self.ended and not mark else ""), mark

    def before(self, *marks: str) -> tuple[str, str]:
        """As `plain`, but the mark is read, too."""
        text, mark = self.plain(*marks)
        self.take(len(mark))
        return text, mark

    def until(self, *marks: str) -> Steps[tuple[str, str]]:
        """Read up to the first of `marks`, and that; return both.

        Raises:
            UnreadableError: the text ends before.
        """
        pieces = []
        while True:
            text, mark = self.before(*marks)
            pieces.append(text)
            if mark:
                return "".join(pieces), mark
            yield from self.more()

    def closing(self, *marks: str) -> Steps[None]:
        """Read one of the marks that close a call, after blank space. A model may also end its answer in its place,
        for instance because the mark is a stop string of the request.

        Raises:
            UnreadableError: something else stands here.
        """
        yield from self.blank()
        if not (yield from self.accept(*marks)) and (self.cut or not self.is_over):
            raise UnreadableError


@functools.lru_cache
def _any(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Finds the first of some marks, of those that begin together the longest."""
    return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))


def open_end(text: str, mark: str) -> int:
    """How many of the last characters of `text` may be the beginning of `mark`."""
    for count in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:count]):
            return count
    return 0
