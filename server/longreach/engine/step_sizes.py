"""The sizes of steps that read a prompt beside answers: what CUDA graphs are captured for, and what steps are cut to.

A GPU computes 128 rows as fast as one more than the last whole tile, so sizes are whole tiles; beside the answers there
is place for as many as the next of a few numbers of them. Nor are all whole tiles equal: a product whose tiles fill the
GPU one and a half times takes as long as one that fills it twice. So sizes are timed when they are captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_TILE = 128
_OFTEN = (*range(_TILE, 1025, _TILE), 1280, 1536, 1792, 2048)
# Answers that a step has places for, and the rows that it may have then: answers and prompts. Steps with more of either
# are not captured. Many answers are rarer, and each graph takes part of a second at the start.
SIZES = {8: _OFTEN, 32: _OFTEN, 64: _OFTEN, 128: (512, 1024, 1536, 2048)}
# Fewer tokens beside answers take a GPU as long.
LEAST_CHUNK = _TILE - 32

_MOST = _OFTEN[-1]
# A prompt's chunk is cut to a whole size of the step, unless fewer tokens were left of it.
_LEAST_CUT = 64
# A smaller step must read a prompt by so much faster than the largest one: each step has a cost that is not measured.
_WORTH = 1.02


def places_for(answers: int) -> int:
    """Rows that the answers of a step take, unused ones included."""
    return next((places for places in SIZES if places >= answers), answers)


def holding(places: int, rows: int) -> int | None:
    """The smallest captured size of a step with so many places for answers that holds so many rows."""
    return next((size for size in SIZES.get(places, ()) if size >= rows), None)


class SizeTime(NamedTuple):
    """How long a captured step takes in which one prompt fills the rows, in seconds: with nothing before it, and for
    each token before it."""

    base: float
    per_key: float


class StepSizes:
    """The sizes that the scheduler cuts steps to; `times` are those of sizes by their rows, if they were measured."""

    def __init__(self, times: Mapping[int, SizeTime] | None = None) -> None:
        self._times = dict(times or {})

    def cut(self, places: int, taken: int, most: int, start: int) -> int:
        """How many tokens of a prompt from `start` on a step should read, at most `most`, beside `taken` rows, places
        included. What the others' attention takes is no matter: it has to be computed in some step."""
        if taken + most >= _MOST:
            whole = most - (taken + most) % _TILE
            return whole if whole >= _LEAST_CUT else most
        sizes = SIZES.get(places, _OFTEN)
        fitting = [size - taken for size in sizes if taken + _LEAST_CUT <= size <= taken + most]
        if not fitting:
            return most

        def rate(tokens: int) -> float:
            base, per_key = self._times[taken + tokens]
            return tokens / (base + per_key * start)

        if not self._times.keys() >= {taken + tokens for tokens in fitting}:
            return fitting[-1]
        best = max(fitting, key=rate)
        return best if rate(best) > _WORTH * rate(fitting[-1]) else fitting[-1]
