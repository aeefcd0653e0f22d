"""Where in a prompt's text each of its tokens begins, found token by token."""

from __future__ import annotations

from longreach.text.tokenizer import Tokenizer


class TokenPlaces:
    """Goes through the tokens of a `text`.

    Attributes:
        offset: where the next token begins, in characters. A character of several tokens begins with the last of them.
    """

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        self.offset = 0
        self._text, self._tokenizer = text, tokenizer
        self._detokenizer = tokenizer.detokenizer(special=True)

    def next(self, token: int) -> int:
        """Go past a token; where it begins."""
        place, piece = self.offset, self._detokenizer.push(token)
        self.offset += self._length(token, piece)
        return place

    def _length(self, token: int, piece: str) -> int:
        """How much of the text a token is. The tokenizer may have put a special token, or a blank, into the prompt."""
        if self._text.startswith(piece, self.offset):
            return len(piece)
        if self._tokenizer.is_special(token):
            return 0
        if piece.startswith(" ") and self._text.startswith(piece[1:], self.offset):
            return len(piece) - 1
        return min(len(piece), len(self._text) - self.offset)  # a normalizer has changed it
