"""From a choice of key tiles to the lists that kernels walk, on the device and without the host waiting for it."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from longreach_kernels.tile_lists import TileLists, pack_bits

from .query_tiles import QueryTiles


def lists_of_choice(keep: Tensor, tiles: QueryTiles, *, kernels: bool) -> TileLists:
    """The lists of the kept tiles; bit tiles where the causal edge or the window's edge cuts one.

    Args:
        keep: (H, Q, K) bool, no tile among them that the query tile does not see.
        tiles: where the query tiles lie.
        kernels: whether Triton kernels make the entries, with the same result. Without them the device is waited for.

    Raises:
        ValueError: more tiles than 32-bit lists can count.
    """
    bits = _edge_bits(tiles.tile_q, tiles.tile_k, tiles.window, keep.device)
    return cut_lists(keep, tiles, _bit_tile(tiles), bits, kernels=kernels)


def cut_lists(keep: Tensor, tiles: QueryTiles, bit_tile: Tensor, bits: Tensor, *, kernels: bool) -> TileLists:
    """The lists of the kept tiles, of which some are cut.

    Memory is that of lists of all tiles, since the host does not know how many are kept.

    Args:
        keep: (H, Q, K) bool.
        tiles: where the query tiles lie.
        bit_tile: (Q, K), for each tile its entry in ``bits``, or -1 if it is full.
        bits: as in `TileLists`.
        kernels: as in `lists_of_choice`.

    Raises:
        ValueError: more tiles than 32-bit lists can count.
    """
    heads, slots, key_tiles = keep.shape
    rows, entries = heads * slots, keep.numel()
    if entries >= 1 << 31:
        raise ValueError(f"batch: {heads} heads of {slots} x {key_tiles} tiles are too many; take a shorter chunk")
    device = keep.device
    is_full = bit_tile < 0

    # Rows follow each other by sequence, head, tile; slots without a tile have the row after the last.
    per_seq = heads * tiles.count
    first_row = per_seq.cumsum(0) - per_seq
    head = torch.arange(heads, device=device)[:, None]
    segment_start = first_row[tiles.seq] + head * tiles.count[tiles.seq]
    row = torch.where(tiles.exists, segment_start + tiles.tile, rows).flatten()

    def by_row(x: Tensor, otherwise: int = 0) -> Tensor:
        return torch.full((rows + 1,), otherwise, device=device).scatter(0, row, x.flatten())[:rows]

    num_full, counts = (keep & is_full).sum(-1, dtype=torch.int32), keep.sum(-1)
    counts_by_row = by_row(counts)
    start = torch.zeros(rows + 1, dtype=torch.int64, device=device)
    torch.cumsum(counts_by_row, 0, out=start[1:])
    listed, bit_index = torch.zeros(2, entries, dtype=torch.int32, device=device).unbind(0)
    start_of = start[row].view(heads, slots)
    if kernels:
        from .listing import write_entries

        write_entries(keep, bit_tile.int(), start_of, num_full, listed, bit_index)
    else:
        of_head, slot, number = keep.nonzero(as_tuple=True)
        kept_full, kept_bit = is_full[slot, number], bit_tile[slot, number]
        # Stable: full tiles first, and both kinds in order, behind each other row by row as `nonzero` gives them.
        source = torch.argsort(2 * start_of[of_head, slot] + ~kept_full, stable=True)
        listed[: len(source)] = torch.where(kept_full, number, -1 - number)[source].int()
        bit_index[: len(source)] = kept_bit[source].int()

    # Longest first within a sequence and head; rows are in the order of those already.
    segment = by_row((tiles.seq * heads + head).expand(heads, slots), heads * (len(tiles.count) + 1))
    longest = torch.argsort(segment * (key_tiles + 1) + key_tiles - counts_by_row, stable=True)
    order = longest - by_row(segment_start)[longest]
    return TileLists(
        tile_q=tiles.tile_q,
        tile_k=tiles.tile_k,
        queries=(),
        keys=(),
        heads=heads,
        first_row=first_row.int(),
        start=start.int(),
        partial=(start[:-1] + by_row(num_full.long())).int(),
        tiles=listed,
        bit_index=bit_index,
        bits=bits,
        order=order.int(),
    )


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
