"""Sizes that several modules go by."""

from __future__ import annotations

# Queries and keys of a tile: of block patterns, of what dynamic policies choose, and of what is counted.
TILE = 128
# Keys whose bounds are kept together, and that a token of an answer reads or leaves out together (`sparse.decode`).
KEY_BLOCK = 16
# The most channels of a head that the forward kernels take, those among them that the Hopper kernels compute in prompts
# and in answers, and those that the GPU's backward kernels take.
MAX_HEAD_DIM = 512
MAX_HOPPER_HEAD_DIM = 512
MAX_HOPPER_DECODE_HEAD_DIM = 256
MAX_GRADIENT_HEAD_DIM = 256
