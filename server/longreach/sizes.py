"""Sizes that the processes of a server share.

Nothing here loads torch. `longreach_kernels.sizes` has the tile and the block of keys, too; a test holds them equal.
"""

from __future__ import annotations

# Queries and keys of a tile: block patterns are made of whole tiles, and dynamic policies choose whole tiles.
TILE = 128
# Keys that a token of an answer reads, or leaves out, together.
KEY_BLOCK = 16
# Steps that are shorter read prompts in parts of tiles: answers would leave no room for whole ones beside them.
LEAST_TILED_STEP = 4 * TILE
MAX_PROMPT_TOKENS = 2**24


def whole_tiles(tokens: int) -> int:
    """`tokens`, rounded up to whole tiles."""
    return -(-tokens // TILE) * TILE
