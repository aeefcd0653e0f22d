"""The sizes of steps that read a prompt beside answers: what CUDA graphs are captured for, and what steps are cut to.

A GPU computes 128 rows as fast as one more than the last whole tile, so sizes are whole tiles; beside the answers there
is place for as many as the next of a few numbers of them.
"""

from __future__ import annotations

from longreach.sizes import TILE

_OFTEN = (*range(TILE, 1025, TILE), 1280, 1536, 1792, 2048)
# Answers that a step has places for, and the rows that it may have then: answers and prompts. Steps with more of either
# are not captured. Many answers are rarer, and each graph takes part of a second at the start.
SIZES = {8: _OFTEN, 32: _OFTEN, 64: _OFTEN, 128: (512, 1024, 1536, 2048)}
# Rows of steps of prompts alone, which are captured where launching their kernels takes longer than computing them.
ALONE = (3072, 4096, 6144, 8192)
# Fewer tokens beside answers take a GPU as long.
LEAST_CHUNK = TILE - 32

MOST_BESIDE = _OFTEN[-1]  # rows of a captured step with places for answers
# A prompt's chunk is cut to a whole size of the step, unless fewer tokens were left of it.
_LEAST_CUT = 64


def places_for(answers: int) -> int:
    """Rows that the answers of a step take, unused ones included."""
    return next((places for places in SIZES if places >= answers), answers)


def holding(places: int, rows: int) -> int | None:
    """The smallest size of a step with so many places for answers that holds so many rows; places are 0 for prompts
    alone in a large step."""
    return next((size for size in (ALONE if places == 0 else SIZES.get(places, ())) if size >= rows), None)


def cut(places: int, taken: int, most: int) -> int:
    """How many tokens of a prompt a step should read, at most `most`, beside `taken` rows, places included: as many as
    fill a captured size, or whole tiles where the step is larger than all of them."""
    if taken + most >= MOST_BESIDE:
        whole = most - (taken + most) % TILE
        return whole if whole >= _LEAST_CUT else most
    sizes = SIZES.get(places, _OFTEN)
    return max((size - taken for size in sizes if taken + _LEAST_CUT <= size <= taken + most), default=most)
