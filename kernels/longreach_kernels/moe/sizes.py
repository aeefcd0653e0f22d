"""Numbers of rows at which one form of a product gives way to the next."""

from __future__ import annotations

FEW_PAIRS = 2048  # pairs of a token and an expert that one kernel sorts
# Rows of an expert, on average, up to which tiles of MXFP4 have 8 rows.
ROWS_8 = 4
# Rows of an expert, on average, up to which tiles of 16, 32 and 64 rows are quickest in the form for few rows; then up
# to which tiles of 64 rows are in the form for many, whose other tiles have 128. `unpacking_tile` takes the place of
# the form for few rows above ROWS_32, and above ROWS_16 in MXFP4.
ROWS_16, ROWS_32, ROWS_64, MEDIUM_ROWS = 10, 22, 56, 96
# Rows of an expert, on average, from which tiles of FP8 in blocks are two tiles side by side.
TWICE_ROWS = 384
# Rows of an expert, on average, up to which packed weights are unpacked in the registers of the product; with more they
# are unpacked before it. 0 for never.
UNPACKED_ROWS = {"int4": 512, "mxfp4": 384}


def step_sizes(experts: int, top_k: int) -> list[int]:
    """Numbers of tokens of steps that take, between them, every kind of kernel that there is for a layer."""
    wide = TWICE_ROWS + 64, max(UNPACKED_ROWS.values()) + 128
    averages = (ROWS_8 - 2, ROWS_16 - 4, ROWS_32 - 6, ROWS_64 - 16, MEDIUM_ROWS - 16, 2 * MEDIUM_ROWS, *wide)
    by_rows = (average * experts // top_k for average in averages)
    return sorted({1, 2, *(max(1, tokens) for tokens in by_rows), FEW_PAIRS // top_k + 1})
