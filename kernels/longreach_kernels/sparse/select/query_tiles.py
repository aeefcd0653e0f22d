"""The query tiles of a batch as tensors: where each lies and what it may see, without the host knowing any length."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longreach_kernels.batch import PagedBatch


@dataclass(frozen=True, eq=False)
class QueryTiles:
    """Query tiles in slots: sequence b owns those from ``(cu_seqlens_q[b] - cu_seqlens_q[0]) // tile_q + b`` on, as in
    the kernels. There are more slots than tiles; those that hold none do not exist. Q slots, K key tiles at most.

    Attributes:
        tile_q, tile_k: queries and keys of a tile.
        key_tiles: K, a bound on the host.
        window: keys that a query sees, itself counted; None for all before it.
        seq, tile: (Q,) int64, the sequence of a slot and the tile's number in it.
        first, last: (Q,) int64, positions of its first and of its last query.
        exists: (Q,) bool.
        count: (B,) int64, query tiles of each sequence.
    """

    tile_q: int
    tile_k: int
    key_tiles: int
    window: int | None
    seq: Tensor
    tile: Tensor
    first: Tensor
    last: Tensor
    exists: Tensor
    count: Tensor

    @property
    def key_starts(self) -> Tensor:
        """(K,) int64, position of each key tile's first key."""
        return torch.arange(self.key_tiles, device=self.first.device) * self.tile_k

    def visible(self) -> Tensor:
        """(Q, K) bool: does some query of the tile see some key of the tile?"""
        starts = self.key_starts
        seen = (starts <= self.last[:, None]) & self.exists[:, None]
        if self.window is not None:
            seen &= starts + self.tile_k > self.first[:, None] - self.window + 1
        return seen


def query_tiles(batch: PagedBatch, num_queries: int, tile_q: int, tile_k: int, window: int | None) -> QueryTiles:
    """The tiles of a batch of ``num_queries`` queries in all. Does not wait for the device."""
    starts = batch.cu_seqlens_q.long()
    numbers = torch.arange(batch.size, device=starts.device)
    first_slot = (starts[:-1] - starts[0]) // tile_q + numbers
    slots = torch.arange(num_queries // tile_q + batch.size, device=starts.device)
    seq = torch.searchsorted(first_slot, slots, right=True) - 1
    queries = starts.diff()
    count = (queries + tile_q - 1) // tile_q
    tile = slots - first_slot[seq]
    keys, queries = batch.context_lens.long()[seq], queries[seq]
    first = keys - queries + tile * tile_q
    return QueryTiles(
        tile_q=tile_q,
        tile_k=tile_k,
        key_tiles=-(-max(1, batch.max_context_len) // tile_k),
        window=window,
        seq=seq,
        tile=tile,
        first=first,
        last=torch.minimum(first + tile_q, keys) - 1,
        exists=tile < count[seq],
        count=count,
    )
