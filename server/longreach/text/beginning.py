"""What the first part of many texts was encoded to, so that only the rest of each has to be."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Beginning:
    """The token ids of texts that begin alike, as far as no later text can change them; made by `GrowingText`.

    Attributes:
        characters: of the part that is alike.
        digest: of that part, see `digest_of`.
        special, parse_special: as it was encoded, see `Tokenizer.encoding`.
        at: the ids stand for so many of the characters.
        ids: int32, those of `special` before the text included.
    """

    characters: int
    digest: bytes
    special: bool
    parse_special: bool
    at: int
    ids: array[int] = field(repr=False)

    def begins(self, text: str, special: bool, parse_special: bool) -> bool:
        """Whether a text that is encoded so begins with it."""
        return (
            (self.special, self.parse_special) == (special, parse_special)
            and len(text) >= self.characters
            and digest_of(text[: self.characters]) == self.digest
        )


class TextDigest:
    """The digest of a text that comes in parts."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()

    def add(self, text: str) -> None:
        """The text goes on so."""
        self._sha256.update(text.encode("utf-8", "surrogatepass"))

    @property
    def value(self) -> bytes:
        """The digest of what has come."""
        return self._sha256.digest()


def digest_of(text: str) -> bytes:
    """The SHA-256 of a text in UTF-8, the lone surrogates of `marks.GUARD` included."""
    digest = TextDigest()
    digest.add(text)
    return digest.value
