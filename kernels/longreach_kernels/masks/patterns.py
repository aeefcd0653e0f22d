"""Makers of the sparse patterns of the literature. All but A-shape are block patterns over a given length.

Sizes that are counted in blocks say so. A pattern for a causal model ends in ``& Causal()``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longreach_kernels.masks.block_sparse import BlockSparse
from longreach_kernels.masks.mask import Causal, Mask, Window


def _grid(length: int, block: int) -> tuple[Tensor, Tensor]:
    if length < 1:
        raise ValueError(f"length: must be at least 1, got {length}")
    index = torch.arange(-(-length // block))
    return index[:, None], index[None, :]


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}: must be at least {least}, got {value}")


def strided(length: int, *, block: int = 128, stride: int) -> Mask:
    """Sparse Transformer, strided (Child et al. 2019, section 4.2): the last ``stride`` blocks, and every ``stride``-th
    block before. Causal."""
    _at_least("stride", stride, 1)
    i, j = _grid(length, block)
    return BlockSparse((i >= j) & ((i - j < stride) | ((i - j) % stride == 0)), block) & Causal()


def fixed(length: int, *, block: int = 128, stride: int, summary: int = 1) -> Mask:
    """Sparse Transformer, fixed (Child et al. 2019, section 4.2): blocks of the own stretch of ``stride`` blocks, and
    the last ``summary`` blocks of every earlier stretch. Causal."""
    _at_least("stride", stride, 1)
    if not 1 <= summary <= stride:
        raise ValueError(f"summary: must lie between 1 and stride, {stride}, got {summary}")
    i, j = _grid(length, block)
    return BlockSparse((i >= j) & ((i // stride == j // stride) | (j % stride >= stride - summary)), block) & Causal()


def local_global(length: int, *, block: int = 128, window: int, global_blocks: int = 1, causal: bool = False) -> Mask:
    """Longformer (Beltagy et al. 2020): ``window`` blocks on each side of the own, and first blocks that see and are
    seen by all."""
    _at_least("window", window, 0)
    _at_least("global_blocks", global_blocks, 0)
    i, j = _grid(length, block)
    mask = BlockSparse(((i - j).abs() <= window) | (i < global_blocks) | (j < global_blocks), block)
    return mask & Causal() if causal else mask


def bigbird(
    length: int,
    *,
    block: int = 64,
    window: int = 1,
    global_blocks: int = 1,
    random_blocks: int = 3,
    heads: int = 1,
    seed: int = 0,
    causal: bool = False,
) -> Mask:
    """BigBird (Zaheer et al. 2020): local, global, and for each row of blocks ``random_blocks`` drawn at random, other
    ones for every head. The same seed gives the same mask."""
    _at_least("random_blocks", random_blocks, 0)
    _at_least("heads", heads, 1)
    i, j = _grid(length, block)
    local = ((i - j).abs() <= window) | (i < global_blocks) | (j < global_blocks)
    layout = local.repeat(heads, 1, 1)
    scores = torch.rand(layout.shape, generator=torch.Generator().manual_seed(seed))
    scores = scores.masked_fill(layout | (causal & (j > i)), -1.0)
    best, drawn = scores.topk(min(random_blocks, layout.shape[2]), dim=-1)
    layout.scatter_(-1, drawn, layout.gather(-1, drawn) | (best >= 0))
    mask = BlockSparse(layout, block)
    return mask & Causal() if causal else mask


def a_shape(sinks: int, window: int) -> Window:
    """A-shape (StreamingLLM, Xiao et al. 2023; MInference, Jiang et al. 2024): first keys and a window. Has a closed
    form, so it needs no length and no list."""
    return Window(window, sinks)


def vertical_slash(
    length: int, *, verticals: Sequence[Sequence[int]], slashes: Sequence[Sequence[int]], block: int = 64
) -> Mask:
    """Vertical-slash (MInference, Jiang et al. 2024), rounded out to blocks: for each head the key positions that all
    queries see, and the distances ``q - k`` that are seen. Causal.

    Raises:
        ValueError: no heads, as many verticals as slashes are not given, or a position outside the length.
    """
    if not verticals or len(verticals) != len(slashes):
        raise ValueError(
            f"slashes: needs one list for each head's verticals, got {len(slashes)} for {len(verticals)} heads"
        )
    i, j = _grid(length, block)
    layout = torch.zeros(len(verticals), i.shape[0], j.shape[1], dtype=torch.bool)
    for head, (columns, distances) in enumerate(zip(verticals, slashes, strict=True)):
        for name, values in (("verticals", columns), ("slashes", distances)):
            if any(not 0 <= x < length for x in values):
                raise ValueError(f"{name}: must lie between 0 and {length - 1}")
        for column in columns:
            layout[head, :, column // block] = True
        for distance in distances:  # a diagonal crosses at most two blocks of a row of blocks
            near, far = distance // block, -(-distance // block)
            layout[head] |= (i - j == near) | (i - j == far)
    return BlockSparse(layout & (i >= j), block) & Causal()
