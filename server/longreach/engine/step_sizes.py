"""The sizes of steps that read a prompt beside answers: what CUDA graphs are captured for, and what steps are cut to.

A GPU computes 128 rows as fast as one more than the last whole tile, so sizes are whole tiles; beside the answers there
is place for as many as the next of a few numbers of them.
"""

from __future__ import annotations

# Answers that a step has rows for, and all its rows: answers and prompts. Steps with more of either are not captured.
ANSWERS = (8, 32)
ROWS = (*range(128, 1025, 128), 1280, 1536, 1792, 2048)

_TILE = 128
# Fewer tokens beside answers take a GPU as long.
LEAST_CHUNK = ROWS[0] - ANSWERS[-1]


def rows_for(answers: int) -> int:
    """Rows that the answers of a step take, unused ones included."""
    return next((count for count in ANSWERS if count >= answers), answers)


def whole(rows: int) -> int:
    """The largest size of a step that has at most so many rows; 0 if there is none."""
    if rows >= ROWS[-1]:
        return rows - rows % _TILE
    return max((size for size in ROWS if size <= rows), default=0)


def holding(rows: int) -> int | None:
    """The smallest captured size of a step that holds so many rows."""
    return next((size for size in ROWS if size >= rows), None)
