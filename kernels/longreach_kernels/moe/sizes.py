"""Numbers of rows at which one form of a product gives way to the next."""

from __future__ import annotations

FEW_PAIRS = 2048  # pairs of a token and an expert that one kernel sorts
# Rows of an expert, on average, up to which a form is quickest.
FEW_ROWS, SOME_ROWS, MEDIUM_ROWS = 12, 40, 96


def step_sizes(experts: int, top_k: int) -> list[int]:
    """Numbers of tokens of steps that take, between them, every kind of kernel that there is for a layer."""
    averages = (FEW_ROWS - 4, SOME_ROWS - 8, MEDIUM_ROWS - 16, 2 * MEDIUM_ROWS)
    by_rows = (average * experts // top_k for average in averages)
    return sorted({1, 2, *(max(1, tokens) for tokens in by_rows), FEW_PAIRS // top_k + 1})
