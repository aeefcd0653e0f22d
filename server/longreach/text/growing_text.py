"""The token ids of a text that is still coming, given out as soon as nothing that may follow can change them.

What has come is cut where `Tokenizer.borders` says that a cut changes nothing. What stands before the last cut is
certain; the rest waits for more text. So the memory that is held is that of one piece, however long the text is.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from longreach.text.beginning import Beginning, TextDigest
from longreach.text.borders import Borders
from longreach.text.tokenizer import MAX_STRETCH_CHARACTERS, Tokenizer, TooManyTokensError, UnbrokenTextError
from longreach.util.work_pool import done

# Characters of a piece: half of what is there, within these bounds. Long ones take less time for each character.
LEAST_PIECE = 1024
MOST_PIECE = 32 * 1024


@dataclass(frozen=True)
class Piece:
    """A part of a text whose tokens are certain; `is_first` and `is_last` say what stands around it."""

    text: str
    is_first: bool
    is_last: bool


class GrowingText:
    """The tokens of one text. All ids that `feed` and `end` return, put together, are those of `Tokenizer.encoding`.

    `feed` and `end` do everything in the calling thread. Whoever encodes in several threads takes pieces of `cut` and
    `last`, in their order, gives each to `encode` in any thread, and each one's ids to `count`, in order again.

    Attributes:
        waits_for_end: the tokenizer has no safe cuts, so that all text is held, and all ids come from `end`.
        num_tokens: of the ids that were given out.
    """

    def __init__(
        self, tokenizer: Tokenizer, special: bool = True, parse_special: bool = True, most: int | None = None
    ) -> None:
        """`special`, `parse_special` and `most` as for `Tokenizer.encoding`."""
        self._tokenizer = tokenizer
        self._special = special
        self._parse_special = parse_special
        self._most = most
        cuts = tokenizer.borders if tokenizer.around is not None or not special else None
        self._borders: Borders | None = cuts
        self.waits_for_end = cuts is None
        self.num_tokens = 0
        self._texts: list[str] = []  # of a text that is not cut
        self._rest = ""
        self._searched = 0  # characters of the rest in which there is no cut behind the least piece
        self._at = 0  # where the rest begins in the text, in characters
        self._digest = TextDigest()
        self._is_first = True

    @property
    def held_characters(self) -> int:
        """Characters that have come and whose tokens were not given out."""
        return len(self._rest) + sum(map(len, self._texts))

    def feed(self, text: str) -> list[int]:
        """The text goes on so; further token ids that are certain now.

        Raises:
            TooManyTokensError: there are more than `most`.
            UnbrokenTextError: there is no cut in too long a stretch.
        """
        return done(self.feeding(text))

    def end(self) -> list[int]:
        """The text has ended; its last token ids.

        Raises:
            TooManyTokensError: there are more than `most`.
        """
        return done(self.ending())

    def feeding(self, text: str) -> Generator[None, None, list[int]]:
        """`feed` as work, piece by piece."""
        ids: list[int] = []
        for piece in self.cut(text):
            ids += self.count(self.encode(piece))
            yield
        return ids

    def ending(self) -> Generator[None, None, list[int]]:
        """`end` as work, piece by piece where the text was not cut."""
        piece = self.last()
        if self.waits_for_end:
            ids = yield from self._tokenizer.encoding(piece.text, self._special, self._parse_special, self._most)
            return self.count(ids)
        return self.count(self.encode(piece))

    def cut(self, text: str) -> Iterator[Piece]:
        """The text goes on so; its further pieces. All of them have to be taken.

        Raises:
            UnbrokenTextError: there is no cut in too long a stretch.
        """
        if self._borders is None:
            self._texts.append(text)
            return
        self._digest.add(text)
        rest, start = self._rest + text, 0
        while (cut := self._next_cut(self._borders, rest, start)) is not None:
            self._check_stretch(start, cut)
            yield self._piece(rest[start:cut])
            start, self._searched = self._borders.begin(rest, cut), 0
        self._check_stretch(start, len(rest))
        self._rest, self._at = rest[start:], self._at + start
        self._searched = max(len(self._rest) - 1, 0)  # a cut may need the character behind the separator

    def settled(self) -> Piece | None:
        """All of the rest that is certain as a piece, if there is any: for a text that goes on otherwise each time."""
        cut = None if self._borders is None else self._borders.last(self._rest)
        if self._borders is None or cut is None:
            return None
        piece = self._piece(self._rest[:cut])
        start, self._searched = self._borders.begin(self._rest, cut), 0
        self._rest, self._at = self._rest[start:], self._at + start
        return piece

    def beginning(self, ids: array[int]) -> Beginning | None:
        """What has come, as the first part of other texts; `ids` are all that were given out so far.

        None before the first are, and where the text is not cut.
        """
        assert len(ids) == self.num_tokens, "these are not the ids that were given out"
        if self._borders is None or self._is_first:
            return None
        characters = self._at + len(self._rest)
        return Beginning(characters, self._digest.value, self._special, self._parse_special, self._at, ids)

    def last(self) -> Piece:
        """The text has ended; its last piece."""
        if self._borders is None:
            text, self._texts = "".join(self._texts), []
            return Piece(text, is_first=True, is_last=True)
        rest, self._rest = self._rest, ""
        return self._piece(rest, is_last=True)

    def encode(self, piece: Piece) -> list[int]:
        """The token ids of a piece."""
        if self.waits_for_end:
            return self._tokenizer.encode_here(piece.text, self._special, self._parse_special)
        before, behind = (self._tokenizer.around or ([], [])) if self._special else ([], [])
        ids = self._tokenizer.encode_part(piece.text, self._parse_special)
        return [*(before if piece.is_first else ()), *ids, *(behind if piece.is_last else ())]

    def count(self, ids: list[int]) -> list[int]:
        """The same ids, which are given out.

        Raises:
            TooManyTokensError: there are more than `most` by now.
        """
        self.num_tokens += len(ids)
        if self._most is not None and self.num_tokens > self._most:
            raise TooManyTokensError(self.num_tokens)
        return ids

    def _next_cut(self, borders: Borders, rest: str, start: int) -> int | None:
        least = min((len(rest) - start) // 2, MOST_PIECE)
        if least > max(LEAST_PIECE, self._searched) and (cut := borders.first(rest, start + least)) is not None:
            return cut
        return borders.first(rest, start + max(LEAST_PIECE, self._searched))

    def _piece(self, text: str, is_last: bool = False) -> Piece:
        piece = Piece(text, self._is_first, is_last)
        self._is_first = False
        return piece

    def _check_stretch(self, start: int, end: int) -> None:
        if end - start > MOST_PIECE + MAX_STRETCH_CHARACTERS:
            raise UnbrokenTextError(self._at + start + LEAST_PIECE)
