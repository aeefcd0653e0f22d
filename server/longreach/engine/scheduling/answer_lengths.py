"""How long answers are, from those that have ended: what is expected of those that are being written."""

from __future__ import annotations

# What the last answer weighs.
_WEIGHT = 0.1


class AnswerLengths:
    """The mean of the answers that have ended, the last ones more than those before; in tokens."""

    def __init__(self) -> None:
        self._mean: float | None = None

    def note(self, tokens: int) -> None:
        """An answer of so many tokens has ended."""
        self._mean = tokens if self._mean is None else self._mean + _WEIGHT * (tokens - self._mean)

    def expected(self, most: int) -> float:
        """The tokens that are still to come of an answer that may have at most so many more.

        However many it has: an answer that has gone on for long is likely to go on. At most, before any has ended.
        """
        return most if self._mean is None else min(most, self._mean)
