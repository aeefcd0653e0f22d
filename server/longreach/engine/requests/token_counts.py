"""How often each token occurs in a request, kept up token by token: a long prompt must not be counted each step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_ROOM = 256

Ids = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int32]


class TokenCounts:
    """The different tokens of a prompt and its answer, and how often each was generated.

    Attributes:
        generated: how many tokens of the answer have been counted.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        ids = np.unique(np.asarray(prompt, np.int64))
        self.generated = 0
        self._ids: Ids = np.concatenate([ids, np.empty(_ROOM, np.int64)])
        self._counts: Counts = np.zeros(len(self._ids), np.int32)
        self._places = {token: place for place, token in enumerate(ids.tolist())}

    def extend(self, tokens: Sequence[int]) -> None:
        """Count more tokens of the answer."""
        for token in tokens:
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token
            self._counts[place] += 1
        self.generated += len(tokens)

    def with_drafts(self, drafts: Sequence[int]) -> tuple[Ids, Counts]:
        """The different tokens and how often each was generated, if `drafts` had been, too: two arrays (U,)."""
        used = len(self._places)
        ids, counts = self._ids[:used], self._counts[:used]
        if not drafts:
            return ids, counts
        new = [token for token in dict.fromkeys(drafts) if token not in self._places]
        ids = np.concatenate([ids, np.array(new, np.int64)])
        counts = np.concatenate([counts, np.zeros(len(new), np.int32)])
        for token in drafts:
            counts[self._places[token] if token in self._places else used + new.index(token)] += 1
        return ids, counts
