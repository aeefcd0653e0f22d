"""Lists of key tiles for masks without a closed form: which tiles a query tile visits, and which need masking.

For each query tile of each sequence there is one list in CSR form. A tile where nothing is masked is full; a partial
tile carries an index into a table of bit tiles, from which equal ones are shared (the diagonal of a causal
pattern is one entry, whatever the length). So the kernels evaluate no predicate and know no pattern, and lists that
were made on the device serve as well as these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from longreach_kernels.masks.mask import Mask

_CHUNK_PAIRS = 1 << 24  # pairs looked at together while the bit tiles are made


@dataclass(frozen=True, eq=False)
class TileLists:
    """Key tiles of every query tile of every sequence and of every head that the mask tells apart.

    There are H such heads: 1 if all are alike, else a divisor of the query heads, which share lists in runs. Row
    ``first_row[b] + h * T + i`` of the CSR lists is query tile ``i`` of the T of sequence ``b``, for head ``h``. A
    dense batch has the lists of one sequence, which all follow. All tensors are int32.

    Attributes:
        tile_q, tile_k: tile sizes.
        queries, keys: of each sequence; empty where only the device knows them.
        heads: H.
        first_row: (B,) the first row of each sequence.
        start: (rows + 1,) where each row's tiles start in ``tiles``.
        partial: (rows,) where each row's partial tiles start in ``tiles``; its full ones come before them.
        tiles: (entries,) key tiles: ``t`` where tile t is full, ``-1 - t`` where it is partial. Both kinds ascend.
        bit_index: (entries,) the bit tile of a partial tile, -1 of a full one.
        bits: (unique, tile_q, tile_k // 32); bit ``c % 32`` of word ``c // 32`` of row r: does query r see key c?
        order: (rows,) at each sequence's and head's rows: its tiles by falling number of entries, to start them in.
    """

    tile_q: int
    tile_k: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: int
    first_row: Tensor
    start: Tensor
    partial: Tensor
    tiles: Tensor
    bit_index: Tensor
    bits: Tensor
    order: Tensor

    def row(self, index: int) -> list[tuple[int, int]]:
        """The tiles of a row and their bit tiles, -1 for a full tile. Waits for the device."""
        inside = slice(int(self.start[index]), int(self.start[index + 1]))
        entries, bit_index = self.tiles[inside], self.bit_index[inside]
        return list(zip(torch.where(entries < 0, -1 - entries, entries).tolist(), bit_index.tolist(), strict=True))

    @cached_property
    def transposed(self) -> TileLists:
        """The same tiles of one sequence, listed by key tile: for each key tile its query tiles.

        Bit tiles stay as they are, (tile_q, tile_k). Used by the backward pass for dK and dV.
        """
        if len(self.queries) != 1:
            raise ValueError(f"queries: only lists of one sequence can be transposed, these are of {self.queries}")
        (num_queries,), (num_keys,) = self.queries, self.keys
        q_tiles, k_tiles = -(-num_queries // self.tile_q), -(-num_keys // self.tile_k)
        rows = torch.repeat_interleave(torch.arange(len(self.start) - 1, device=self.start.device), self.start.diff())
        partial = self.tiles < 0
        column = rows // q_tiles * k_tiles + torch.where(partial, -1 - self.tiles, self.tiles)
        source = torch.argsort(column, stable=True)  # rows ascend, so query tiles ascend within a column
        tile = rows % q_tiles
        return _csr(
            self, column[source], torch.where(partial, -1 - tile, tile)[source], self.bit_index[source], k_tiles
        )


def _csr(like: TileLists, rows: Tensor, tiles: Tensor, bit_index: Tensor, num_tiles: int) -> TileLists:
    """Lists of one sequence from ascending rows, ``num_tiles`` of each head; sizes and bit tiles as in ``like``."""
    counts = torch.bincount(rows, minlength=like.heads * num_tiles)
    full = torch.bincount(rows[tiles >= 0], minlength=like.heads * num_tiles)
    by_kind = torch.argsort(2 * rows + (tiles < 0), stable=True)
    start = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    order = torch.argsort(counts.view(like.heads, num_tiles), dim=1, descending=True, stable=True)
    return TileLists(
        tile_q=like.tile_q,
        tile_k=like.tile_k,
        queries=like.queries,
        keys=like.keys,
        heads=like.heads,
        first_row=like.first_row,
        start=start.int(),
        partial=(start[:-1] + full).int(),
        tiles=tiles[by_kind].int(),
        bit_index=bit_index[by_kind].int(),
        bits=like.bits,
        order=order.flatten().int(),
    )


def tile_lists(
    mask: Mask, num_queries: int, num_keys: int, tile_q: int, tile_k: int, device: torch.device | str = "cpu"
) -> TileLists:
    """The tile lists of any mask for one pair of lengths, cached by value.

    Args:
        mask: any mask; the lists hold exactly its visible pairs.
        num_queries, num_keys: lengths, aligned at the bottom right.
        tile_q: queries of a tile.
        tile_k: keys of a tile, a multiple of 32.
        device: where the lists go.

    Raises:
        ValueError: ``tile_k`` is not a multiple of 32, or the mask's layout is too small for the lengths.
    """
    return ragged_tile_lists(mask, (num_queries,), (num_keys,), tile_q, tile_k, device)


def ragged_tile_lists(
    mask: Mask,
    queries: Sequence[int],
    keys: Sequence[int],
    tile_q: int,
    tile_k: int,
    device: torch.device | str = "cpu",
    *,
    by_keys: bool = False,
) -> TileLists:
    """As `tile_lists`, for sequences of different lengths; ``by_keys`` gives those of `TileLists.transposed`."""
    if tile_k % 32:
        raise ValueError(f"tile_k: must be a multiple of 32, got {tile_k}")
    return _join(mask, tuple(queries), tuple(keys), tile_q, tile_k, torch.device(device), by_keys)


@lru_cache(maxsize=32)
def _join(
    mask: Mask,
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    tile_q: int,
    tile_k: int,
    device: torch.device,
    by_keys: bool,
) -> TileLists:
    parts = [_build(mask, n, m, tile_q, tile_k) for n, m in zip(queries, keys, strict=True)]
    if by_keys:
        parts = [part.transposed for part in parts]
    start, partial, bit_index, first_row = [torch.zeros(1, dtype=torch.int32)], [], [], []
    rows = entries = bits = 0
    for part in parts:
        start.append(part.start[1:] + entries)
        partial.append(part.partial + entries)
        bit_index.append(torch.where(part.bit_index < 0, -1, part.bit_index + bits))
        first_row.append(rows)
        rows, entries, bits = rows + len(part.order), entries + len(part.tiles), bits + len(part.bits)
    return TileLists(
        tile_q=tile_q,
        tile_k=tile_k,
        queries=queries,
        keys=keys,
        heads=mask.heads,
        first_row=torch.tensor(first_row, dtype=torch.int32).to(device),
        start=torch.cat(start).to(device),
        partial=torch.cat(partial).to(device),
        tiles=torch.cat([part.tiles for part in parts]).to(device),
        bit_index=torch.cat(bit_index).to(device),
        bits=torch.cat([part.bits for part in parts]).to(device),
        order=torch.cat([part.order for part in parts]).to(device),
    )


def _edges(count: int, tile: int, offset: int) -> Tensor:
    first = torch.arange(0, count, tile)
    return torch.stack([first, (first + tile).clamp(max=count) - 1], dim=1) + offset


@lru_cache(maxsize=64)
def _build(mask: Mask, num_queries: int, num_keys: int, tile_q: int, tile_k: int) -> TileLists:
    """The lists of one sequence, on the CPU."""
    offset = num_keys - num_queries
    q, k = _edges(num_queries, tile_q, offset), _edges(num_keys, tile_k, 0)
    none = torch.zeros(mask.heads, len(q), len(k), dtype=torch.bool)
    some, every = mask.tile_state(q, k) if none.numel() else (none, none)
    # The kernels read a full tile without bounds, so a ragged last tile is never one, be it of keys or of queries.
    whole = ((q[:, 1] - q[:, 0] + 1) == tile_q)[:, None] & ((k[:, 1] - k[:, 0] + 1) == tile_k)[None]
    full = every & whole
    candidates = (some & ~full).nonzero()  # (n, 3): head, query tile, key tile; sorted
    bits, index, ones, zeros = _bit_tiles(mask, candidates, q, k, tile_q, tile_k)
    promoted = candidates[ones & whole[candidates[:, 1], candidates[:, 2]]]
    full[promoted.unbind(1)] = True
    kept = ~zeros & ~full[candidates.unbind(1)]
    used, index = torch.unique(index[kept], return_inverse=True)
    bit_index = torch.full(full.shape, -1, dtype=torch.int64)
    partial = torch.zeros_like(full)
    partial[candidates[kept].unbind(1)] = True
    bit_index[candidates[kept].unbind(1)] = index
    entries = (full | partial).nonzero()
    head, q_tile, tile = entries.unbind(1)
    index = bit_index[entries.unbind(1)]
    alone = TileLists(
        tile_q=tile_q,
        tile_k=tile_k,
        queries=(num_queries,),
        keys=(num_keys,),
        heads=mask.heads,
        first_row=torch.zeros(1, dtype=torch.int32),
        start=index,
        partial=index,
        tiles=tile,
        bit_index=index,
        bits=bits[used],
        order=index,
    )
    return _csr(alone, head * len(q) + q_tile, torch.where(index < 0, tile, -1 - tile), index, len(q))


def pack_bits(pairs: Tensor) -> Tensor:
    """Bool tiles (n, tile_q, tile_k) as the bit tiles of `TileLists`, (n, tile_q, tile_k // 32) int32."""
    tiles, tile_q, tile_k = pairs.shape
    # Eight bools as one number, the first its lowest byte: the product has the i-th at bit 56 + i, without a carry.
    eights = pairs.contiguous().view(torch.int64) * 0x0102040810204080
    return ((eights >> 56) & 0xFF).to(torch.uint8).view(torch.int32).reshape(tiles, tile_q, tile_k // 32)


def _bit_tiles(
    mask: Mask, tiles: Tensor, q: Tensor, k: Tensor, tile_q: int, tile_k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bit tiles of the given tiles: the table, each tile's index in it, and which tiles are all ones or all zeros."""
    words = tile_k // 32
    tables, indices, ones, zeros, seen = [], [], [], [], 0
    chunk = max(1, _CHUNK_PAIRS // (tile_q * tile_k))
    for part in tiles.split(chunk):
        head, q_tile, k_tile = part.unbind(1)
        rows = q[q_tile, 0][:, None] + torch.arange(tile_q)
        keys = k[k_tile, 0][:, None] + torch.arange(tile_k)
        real_rows, real_keys = rows <= q[q_tile, 1][:, None], keys <= k[k_tile, 1][:, None]
        # Positions outside are clamped for the look-up and masked after it.
        pairs = mask.sees(
            torch.minimum(rows, q[q_tile, 1][:, None])[:, :, None],
            torch.minimum(keys, k[k_tile, 1][:, None])[:, None, :],
            head[:, None, None],
        )
        pairs = pairs & real_rows[:, :, None] & real_keys[:, None, :]
        ones.append(pairs.flatten(1).all(1))
        zeros.append(~pairs.flatten(1).any(1))
        table, inverse = torch.unique(pack_bits(pairs), dim=0, return_inverse=True)
        tables.append(table)
        indices.append(inverse + seen)
        seen += len(table)
    if not tables:
        nothing = torch.zeros(0, dtype=torch.bool)
        return torch.zeros(0, tile_q, words, dtype=torch.int32), torch.zeros(0, dtype=torch.int64), nothing, nothing
    table, inverse = torch.unique(torch.cat(tables), dim=0, return_inverse=True)
    return table, inverse[torch.cat(indices)], torch.cat(ones), torch.cat(zeros)
