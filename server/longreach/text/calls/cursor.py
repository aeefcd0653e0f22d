"""Reading a text that is still being written.

Readers are generators. They yield the parts that they are certain of, and None where they need more text. So they read
a text the same way whatever pieces it arrives in: what they decide depends on characters alone.
"""

from __future__ import annotations

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
        rest: the text from here on, as far as it is known.
        at: characters before this place.
        ended: no more text will come.
        cut: it ended because it had to, by a limit, and not because the model was done.
    """

    def __init__(self) -> None:
        self.rest = ""
        self.at = 0
        self.ended = self.cut = False
        self._kept: list[str] | None = None

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
        self.rest, self.at = kept + self.rest, self.at - len(kept)

    def take(self, count: int) -> str:
        """Read so many characters, which are known."""
        taken, self.rest = self.rest[:count], self.rest[count:]
        self.at += len(taken)
        if self._kept is not None and taken:
            self._kept.append(taken)
        return taken

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
            self.take(len(self.rest) - len(self.rest.lstrip(BLANK)))
            if self.rest or self.ended:
                return
            yield None

    def peek(self) -> Steps[str]:
        """The next character, unread; empty at the end of the text."""
        while not self.rest and not self.ended:
            yield None
        return self.rest[:1]

    def accept(self, *literals: str) -> Steps[str]:
        """Read the longest of these that the text goes on with, and return it; empty if there is none."""
        while True:
            possible = [one for one in literals if one.startswith(self.rest[: len(one)])]
            known = [one for one in possible if len(one) <= len(self.rest)]
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
        places = [(place, -len(mark), mark) for mark in marks if (place := self.rest.find(mark)) >= 0]
        if places:
            place, _, mark = min(places)
            return self.take(place), mark
        held = max((open_end(self.rest, mark) for mark in marks), default=0)
        return self.take(len(self.rest) - held), ""

    def words(self, *marks: str) -> tuple[str, str]:
        """As `plain`, but a mark's beginning at the end of the whole text is read, since it is none."""
        text, mark = self.plain(*marks)
        return text + (self.take(len(self.rest)) if self.ended and not mark else ""), mark

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
        if not (yield from self.accept(*marks)) and (self.rest or self.cut or not self.ended):
            raise UnreadableError


def open_end(text: str, mark: str) -> int:
    """How many of the last characters of `text` may be the beginning of `mark`."""
    for count in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:count]):
            return count
    return 0
