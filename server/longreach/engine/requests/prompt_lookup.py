"""Speculation by prompt lookup: what followed the last tokens when they occurred before is likely to follow again.

Drafted tokens are computed together with the token that is wanted anyway, and the model then draws at each of these
positions as it would have done one step after the other. A draft stands iff it is the token that was drawn; the draw at
a position depends on the seed, the position and the tokens before it alone, so that speculation changes the number
of steps and never the answer (prompt lookup decoding: Saxena 2023; the acceptance rule is the exact one, not that
of rejection sampling).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# A match of fewer tokens predicts little; one of more is not looked for.
MIN_MATCH = 3
MAX_MATCH = 16
# Drafts in one step, of all requests together: each takes a row of logits, as wide as the vocabulary.
MAX_DRAFTS = 64


class PromptLookup:
    """Drafts for one growing sequence. Keeps its tokens as an array: a long prompt must not be copied each step."""

    def __init__(self, capacity: int) -> None:
        self._tokens = np.empty(capacity, np.int32)
        self._length = 0

    def draft(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """`count` tokens that may follow `tokens`, or none where nothing in them says so.

        They follow the place, the latest of several, where the longest run (MIN_MATCH to MAX_MATCH) of the last tokens
        occurred before. `tokens` only ever grows from call to call.
        """
        if count < 1 or len(tokens) <= MIN_MATCH:
            return ()
        self._tokens[self._length : len(tokens)] = tokens[self._length :]
        self._length = length = len(tokens)
        known = self._tokens[:length]
        ends = np.flatnonzero(known[MIN_MATCH - 1 : length - 1] == known[-1]) + MIN_MATCH - 1
        best = -1
        for back in range(1, min(MAX_MATCH, length)):
            ends = ends[ends >= back]
            ends = ends[known[ends - back] == known[length - 1 - back]]
            if not ends.size:
                break
            if back + 1 >= MIN_MATCH:
                best = int(ends[-1])
        if best < 0:
            return ()
        period = length - 1 - best  # beyond the end the drafts themselves are what follows
        return tuple(known[best + 1 + np.arange(count) % period].tolist())


def standing(drafts: Sequence[int], drawn: Sequence[int]) -> list[int]:
    """The tokens that stand of those `drawn` (one more than `drafts`): up to the first that was not drafted."""
    for position, draft in enumerate(drafts):
        if drawn[position] != draft:
            return list(drawn[: position + 1])
    return list(drawn)
