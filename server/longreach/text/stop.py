"""Stop strings over text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

# Lone surrogates stand for special tokens in the text that is searched. No decoded text holds one.
_FIRST_SIGN, _MOST_SIGNS = 0xDC00, 1024


class Stops:
    """Stop strings, prepared once for all answers of a request, in time linear in their length.

    A string may name special tokens: then it is also found where those tokens are drawn, whose text an answer mostly
    leaves out.

    Arguments:
        strings: what ends an answer.
        special: the ids of the special tokens that stand in `strings`, by how they are written.

    Attributes:
        signs: what stands for such a token in the text that is searched, by the token's id.
    """

    def __init__(self, strings: Sequence[str] = (), special: Mapping[str, int] | None = None) -> None:
        assert all(strings), "an empty stop string would match everywhere"
        named = sorted(special or {}, key=len, reverse=True)[:_MOST_SIGNS]
        self._sign_of = {name: chr(_FIRST_SIGN + number) for number, name in enumerate(named)}
        self._name_of = {sign: name for name, sign in self._sign_of.items()}
        self._names = re.compile("|".join(map(re.escape, named))) if named else None
        self._signs = re.compile("[" + "".join(self._name_of) + "]") if named else None
        self.signs = {(special or {})[name]: sign for name, sign in self._sign_of.items()}
        self.strings = tuple(dict.fromkeys([*strings, *map(self._signed, strings)]))
        self.failures = [_failure(string) for string in self.strings]

    def _signed(self, string: str) -> str:
        return string if self._names is None else self._names.sub(lambda name: self._sign_of[name[0]], string)

    def searched(self, token: int, text: str) -> str:
        """The text of a token as it is searched: the name of a special token becomes a sign."""
        sign = self.signs.get(token)
        return text if sign is None else text.removesuffix(self._name_of[sign]) + sign

    def shown(self, text: str, names: bool) -> str:
        """What was searched as it is shown: without the signs, or with names in their place."""
        if self._signs is None:
            return text
        return self._signs.sub(lambda sign: self._name_of[sign[0]] if names else "", text)


class StopStrings:
    """Passes text through until one of `stops` has appeared, whatever pieces it arrives in; for one answer.

    Only the end of the text that could still become a stop string is held back. The stop string that ends first wins
    (of several that end together, the longest), and nothing after it is passed on; it itself only if `include`.

    Each stop string is matched by the Knuth-Morris-Pratt automaton, so a character costs amortised O(len(stops)),
    however long and repetitive they are.

    Attributes:
        matched: the stop string that ended the text, as it was searched, or None.
    """

    def __init__(self, stops: Stops, include: bool = False) -> None:
        self.matched: str | None = None
        self._stops = stops.strings
        self._include = include
        self._failures = stops.failures
        self._states = [0] * len(self._stops)  # for each stop: how many of its characters the text ends with
        self._held = ""

    def push(self, text: str) -> str:
        """Add a piece; return what can be passed on now. After a match, always the empty string."""
        if self.matched is not None or not self._stops:
            return text if self.matched is None else ""
        known = len(self._held)
        pending = self._held + text
        for position in range(known, len(pending)):
            longest = self._advance(pending[position])
            if longest:
                self.matched = pending[position + 1 - longest : position + 1]
                self._held = ""
                return pending[: position + 1 - (0 if self._include else longest)]
        self._held = pending[len(pending) - max(self._states) :]
        return pending[: len(pending) - len(self._held)]

    def flush(self) -> str:
        """The text has ended: return what was held back."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> int:
        """Feed every automaton; return the length of the longest stop string that is complete, or 0."""
        longest = 0
        for i, stop in enumerate(self._stops):
            state = self._states[i]
            while state and stop[state] != character:
                state = self._failures[i][state - 1]
            if stop[state] == character:
                state += 1
            self._states[i] = state
            if state == len(stop):
                longest = max(longest, state)
        return longest


def _failure(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = table[length - 1]
        if stop[i] == stop[length]:
            length += 1
        table[i] = length
    return table
