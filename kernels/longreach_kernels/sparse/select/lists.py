"""From a choice of key tiles to the lists that kernels walk, on the device and without the host waiting for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from longreach_kernels.masks.tile_lists import TileLists, pack_bits
from longreach_kernels.sparse.select.query_tiles import QueryTiles


@dataclass(frozen=True, eq=False)
class ListFrame:
    """Lists of a batch's query tiles without what is in them: the same for all layers of a step. Q slots, K key tiles.

    Attributes:
        tiles: where the query tiles lie.
        heads: H.
        bit_tile: (Q, K) int32, for each tile its entry in ``bits``, or -1 if it is full.
        bits, first_row: as in `TileLists`.
        row: (H, Q) int64, the row of a slot; H * Q, the row after the last, where it holds no tile.
        segment_start: (H * Q,) int64, the first row of each row's sequence and head.
        rank: (H * Q,) int64; less a row's number of entries, what puts the rows of a sequence and head in their order.
    """

    tiles: QueryTiles
    heads: int
    bit_tile: Tensor
    bits: Tensor
    first_row: Tensor
    row: Tensor
    segment_start: Tensor
    rank: Tensor

    @property
    def rows(self) -> int:
        """H * Q, at least as many as there are."""
        return self.row.numel()


def edge_frame(tiles: QueryTiles, heads: int) -> ListFrame:
    """The frame of tiles that are cut by the causal edge and by the window's.

    Raises:
        ValueError: more tiles than 32-bit lists can count.
    """
    bits = _edge_bits(tiles.tile_q, tiles.tile_k, tiles.window, tiles.first.device)
    return cut_frame(tiles, heads, _bit_tile(tiles).int(), bits)


def cut_frame(tiles: QueryTiles, heads: int, bit_tile: Tensor, bits: Tensor) -> ListFrame:
    """The frame of tiles that are cut as ``bit_tile`` and ``bits`` say, as in `ListFrame`.

    Raises:
        ValueError: more tiles than 32-bit lists can count.
    """
    slots, key_tiles = bit_tile.shape
    rows = heads * slots
    if rows * key_tiles >= 1 << 31:
        raise ValueError(f"batch: {heads} heads of {slots} x {key_tiles} tiles are too many; take a shorter chunk")
    # Rows follow each other by sequence, head, tile; slots without a tile have the row after the last.
    per_seq = heads * tiles.count
    first_row = per_seq.cumsum(0) - per_seq
    head = torch.arange(heads, device=first_row.device)[:, None]
    segment_start = first_row[tiles.seq] + head * tiles.count[tiles.seq]
    row = torch.where(tiles.exists, segment_start + tiles.tile, rows)
    segment = _by_row(row, tiles.seq * heads + head, heads * (len(tiles.count) + 1))
    return ListFrame(
        tiles=tiles,
        heads=heads,
        bit_tile=bit_tile,
        bits=bits,
        first_row=first_row.int(),
        row=row,
        segment_start=_by_row(row, segment_start),
        rank=segment * (key_tiles + 1) + key_tiles,
    )


def _by_row(row: Tensor, x: Tensor, otherwise: int = 0) -> Tensor:
    """(H, Q) brought from slots to their ``row``, (H * Q,); ``otherwise`` in rows that no tile has."""
    rows = torch.full((row.numel() + 1,), otherwise, dtype=x.dtype, device=x.device)
    return rows.scatter(0, row.flatten(), x.flatten())[: row.numel()]


def lists_of_choice(keep: Tensor, frame: ListFrame, *, kernels: bool) -> TileLists:
    """The lists of the kept tiles.

    Memory is that of lists of all tiles, since the host does not know how many are kept.

    Args:
        keep: (H, Q, K) bool, no tile among them that the query tile does not see.
        frame: where the lists go.
        kernels: whether Triton kernels make the entries, with the same result. Without them the device is waited for.
    """
    if kernels:
        from longreach_kernels.sparse.select.list_kernels import count_entries

        count, full = count_entries(keep, frame)
    else:
        count = _by_row(frame.row, keep.sum(-1, dtype=torch.int32))
        full = _by_row(frame.row, (keep & (frame.bit_tile < 0)).sum(-1, dtype=torch.int32))
    start = torch.zeros(frame.rows + 1, dtype=torch.int32, device=keep.device)
    torch.cumsum(count[: frame.rows], 0, out=start[1:])
    if kernels:
        from longreach_kernels.sparse.select.list_kernels import write_entries

        listed, bit_index = write_entries(keep, frame, start, full)
    else:
        listed, bit_index = _entries(keep, frame, start)
    # Longest first within a sequence and head; rows are in the order of those already.
    longest = torch.argsort(frame.rank - count[: frame.rows], stable=True)
    return TileLists(
        tile_q=frame.tiles.tile_q,
        tile_k=frame.tiles.tile_k,
        queries=(),
        keys=(),
        heads=frame.heads,
        first_row=frame.first_row,
        start=start,
        partial=start[:-1] + full[: frame.rows],
        tiles=listed,
        bit_index=bit_index,
        bits=frame.bits,
        order=(longest - frame.segment_start[longest]).int(),
    )


def _entries(keep: Tensor, frame: ListFrame, start: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of kept tiles and their bit tiles, each (H * Q * K,) int32 and 0 after the last."""
    head, slot, number = keep.nonzero(as_tuple=True)
    bit_tile = frame.bit_tile[slot, number]
    # Stable: full tiles first, and both kinds in order, behind each other row by row as `nonzero` gives them.
    source = torch.argsort(2 * start[frame.row[head, slot]].long() + (bit_tile >= 0), stable=True)
    listed, bit_index = torch.zeros(2, keep.numel(), dtype=torch.int32, device=keep.device).unbind(0)
    listed[: len(source)] = torch.where(bit_tile < 0, number, -1 - number)[source].int()
    bit_index[: len(source)] = bit_tile[source]
    return listed, bit_index


def _bit_tile(tiles: QueryTiles) -> Tensor:
    """(Q, K): the entry of `_edge_bits` where an edge cuts a tile, else -1."""
    tile_q, tile_k = tiles.tile_q, tiles.tile_k
    shift = tiles.first[:, None] - tiles.key_starts
    index = torch.where(shift < tile_k - 1, shift + tile_q - 1, -1)
    if tiles.window is not None:
        cut = (index < 0) & (shift > tiles.window - tile_q)
        index = torch.where(cut, shift - tiles.window + tile_q - 1 + tile_q + tile_k - 2, index)
    return index


@lru_cache(maxsize=16)
def _edge_bits(tile_q: int, tile_k: int, window: int | None, device: torch.device) -> Tensor:
    """Bit tiles of all places of the causal edge in a tile, then of the window's left edge: by how far the tile's first
    query lies behind its first key, from the first place that cuts it on."""
    places = torch.arange(tile_q + tile_k - 2) - tile_q + 1
    shifts = places if window is None else torch.cat([places, places + window])
    distance = shifts[:, None, None] + torch.arange(tile_q)[:, None] - torch.arange(tile_k)
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    return pack_bits(seen).to(device)
