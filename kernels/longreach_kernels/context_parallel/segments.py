"""How the tokens of one sequence are dealt out to ranks.

Contiguously, rank r of R has the r-th part. Under a causal mask the last part then has 2R - 1 times the work of the
first, so attention that stays with its queries deals out two of 2R blocks to each rank: block r, and block 2R - 1 - r
(zig-zag). Every rank's two blocks together see as many keys as every other's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Segment(NamedTuple):
    """The tokens at positions ``start <= position < end`` of a sequence."""

    start: int
    end: int

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self.end - self.start


def contiguous_sizes(num_tokens: int, ranks: int) -> list[int]:
    """Tokens of each rank, dealt out contiguously; any two differ by at most one."""
    return [(rank + 1) * num_tokens // ranks - rank * num_tokens // ranks for rank in range(ranks)]


def zigzag_segments(num_tokens: int, ranks: int, rank: int) -> tuple[Segment, Segment]:
    """The two blocks of a rank, ascending; any two blocks of a sequence differ by at most one token."""

    def block(index: int) -> Segment:
        return Segment(index * num_tokens // (2 * ranks), (index + 1) * num_tokens // (2 * ranks))

    return block(rank), block(2 * ranks - 1 - rank)


def zigzag_split(x: Tensor, ranks: int, rank: int) -> Tensor:
    """The rows of x (N, ...) that a rank has in zig-zag order: its two blocks, one after the other.

    Raises:
        ValueError: there is no such rank.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank: must lie between 0 and {ranks - 1}, got {rank}")
    return torch.cat([x[part.start : part.end] for part in zigzag_segments(x.shape[0], ranks, rank)])


def zigzag_join(shards: Sequence[Tensor]) -> Tensor:
    """The rows (N, ...) in their own order, from every rank's shard.

    Raises:
        ValueError: these are not the shards of one sequence.
    """
    ranks, num_tokens = len(shards), sum(shard.shape[0] for shard in shards)
    earlier, later = [], []
    for rank, shard in enumerate(shards):
        first, second = zigzag_segments(num_tokens, ranks, rank)
        if shard.shape[0] != first.size + second.size:
            raise ValueError(
                f"shards: rank {rank} of {ranks} has {first.size + second.size} of {num_tokens} tokens, "
                f"got {shard.shape[0]}; give zigzag_split's, in the order of ranks"
            )
        earlier.append(shard[: first.size])
        later.append(shard[first.size :])
    return torch.cat([*earlier, *reversed(later)])
