"""The token ids of recent prompts, by who asked: where a new prompt parts from them is why the cache has no more of it.

Prompts are compared with those of the same caller, salt and attention policy alone, so that nobody learns of another's
text. This process forgets them when it ends, and keeps them when its engine is restarted.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# Of all prompts together: 16 MiB.
_MOST_TOKENS = 4 << 20
# A prompt counts as so many tokens at the least, which bounds the number of prompts: 256.
_LEAST_WEIGHT = 16 << 10
# Token ids are compared as unsigned ones of 32 bits: their array is made of a list in a third of the time.
_CODE = "I"


class Asker(NamedTuple):
    """Whose prompts share cached pages, and may be told of each other: a caller, its salt, and its policy's key."""

    caller: str
    salt: str
    policy: str


class Nearest(NamedTuple):
    """The recent prompt that a new one has most in common with, the newest of several.

    `common` first tokens of the two are equal, and `tokens` (N,) are the ids of all that the recent one has, with the
    tokens of its answer as far as they have come.
    """

    common: int
    tokens: npt.NDArray[np.uint32]


class RecentPrompt:
    """A prompt that was read, and the tokens of the answer behind it."""

    def __init__(self, asker: Asker, prompt: Sequence[int]) -> None:
        self.asker = asker
        self.tokens = array(_CODE, prompt)

    def extend(self, answer: Sequence[int]) -> None:
        """So many more tokens of the answer have come."""
        self.tokens.extend(answer)

    @property
    def weight(self) -> int:
        """How many tokens it counts as."""
        return max(len(self.tokens), _LEAST_WEIGHT)


class RecentPrompts:
    """Recent prompts of at most `most_tokens` tokens together. All methods are called in the event loop."""

    def __init__(self, most_tokens: int = _MOST_TOKENS) -> None:
        self._most_tokens = most_tokens
        self._prompts: list[RecentPrompt] = []  # the oldest first

    @property
    def num_tokens(self) -> int:
        """Tokens of all that are kept."""
        return sum(len(prompt.tokens) for prompt in self._prompts)

    def of(self, asker: Asker) -> list[RecentPrompt]:
        """Those that an asker's new prompt may be compared with, the newest first."""
        return [prompt for prompt in reversed(self._prompts) if prompt.asker == asker]

    def keep(self, asker: Asker, tokens: Sequence[int]) -> RecentPrompt:
        """Keep a new prompt in place of the asker's last one, if the two are one conversation, or of the oldest ones.

        Where there is no room, the caller who has most loses its oldest prompt: nobody pushes out another's.
        """
        new = RecentPrompt(asker, tokens)
        last = next(iter(self.of(asker)), None)
        if last is not None and _goes_on(last, new):
            self._prompts.remove(last)
        self._prompts.append(new)
        while len(self._prompts) > 1 and sum(prompt.weight for prompt in self._prompts) > self._most_tokens:
            self._drop_one()
        return new

    def _drop_one(self) -> None:
        weights: dict[str, int] = {}
        for prompt in self._prompts:
            weights[prompt.asker.caller] = weights.get(prompt.asker.caller, 0) + prompt.weight
        greediest = max(weights, key=lambda caller: weights[caller])
        self._prompts.remove(next(prompt for prompt in self._prompts if prompt.asker.caller == greediest))


def _goes_on(last: RecentPrompt, new: RecentPrompt) -> bool:
    """Whether one of the two prompts begins with the other."""
    return _common(_ids(last.tokens), _ids(new.tokens)) == min(len(last.tokens), len(new.tokens))


def nearest(prompts: Sequence[RecentPrompt], tokens: Sequence[int]) -> Nearest | None:
    """Which of `prompts`, the newest first, begins most like `tokens`; None where there are none.

    It may run in any thread, beside answers that go on.
    """
    found: Nearest | None = None
    new = _ids(array(_CODE, tokens))
    for prompt in prompts:
        own = _ids(prompt.tokens[:])  # a copy: an array that is looked at cannot grow
        common = _common(own, new)
        if found is None or common > found.common:
            found = Nearest(common, own)
        if common == len(new):
            break
    return found


def _ids(tokens: array[int]) -> npt.NDArray[np.uint32]:
    return np.frombuffer(tokens, dtype=np.uint32)


def _common(one: npt.NDArray[np.uint32], other: npt.NDArray[np.uint32]) -> int:
    """How many first tokens of two are equal."""
    both = min(len(one), len(other))
    differs = one[:both] != other[:both]
    first = int(differs.argmax()) if both else 0
    return first if both and differs[first] else both
