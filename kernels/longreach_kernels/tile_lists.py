"""Lists of key tiles for masks without a closed form: which tiles a query tile visits, and which need masking.

For each query tile there are two ascending lists in CSR form: full tiles, where nothing is masked, and partial tiles.
A partial tile carries an index into a table of bit tiles, from which equal ones are shared (the diagonal of a causal
pattern is one entry, whatever the length). So the kernels evaluate no predicate and know no pattern.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from .masks import Mask

_CHUNK_PAIRS = 1 << 24  # pairs looked at together while the bit tiles are made


@dataclass(frozen=True, eq=False)
class TileLists:
    """Key tiles of every query tile of every head that the mask tells apart (H of them, 1 if all are alike).

    Row ``h * num_q_tiles + i`` of the CSR lists is query tile ``i`` of head ``h``. All tensors are int32.

    Attributes:
        tile_q, tile_k: tile sizes.
        num_queries, num_keys: the lengths they were made for.
        heads: H.
        full_start, full_tiles: (H * num_q_tiles + 1,), (number of full tiles,).
        part_start, part_tiles: the same for partial tiles.
        part_bits: (number of partial tiles,) index of each one's bit tile.
        bits: (unique, tile_q, tile_k // 32); bit ``c % 32`` of word ``c // 32`` of row r: does query r see key c?
        order: (H, num_q_tiles) query tiles by falling number of key tiles, the order to start them in.
    """

    tile_q: int
    tile_k: int
    num_queries: int
    num_keys: int
    heads: int
    full_start: Tensor
    full_tiles: Tensor
    part_start: Tensor
    part_tiles: Tensor
    part_bits: Tensor
    bits: Tensor
    order: Tensor

    @property
    def num_q_tiles(self) -> int:
        """Query tiles of a head."""
        return self.order.shape[1]

    @cached_property
    def transposed(self) -> TileLists:
        """The same tiles listed by key tile: for each key tile its query tiles (rows are key tiles now).

        Bit tiles stay as they are, (tile_q, tile_k). Used by the backward pass for dK and dV.
        """
        num_k_tiles = -(-self.num_keys // self.tile_k)
        full_start, full_tiles, _ = _transpose(self, self.full_start, self.full_tiles, num_k_tiles)
        part_start, part_tiles, source = _transpose(self, self.part_start, self.part_tiles, num_k_tiles)
        counts = (full_start.diff() + part_start.diff()).view(self.heads, num_k_tiles)
        return TileLists(
            tile_q=self.tile_q,
            tile_k=self.tile_k,
            num_queries=self.num_queries,
            num_keys=self.num_keys,
            heads=self.heads,
            full_start=full_start,
            full_tiles=full_tiles,
            part_start=part_start,
            part_tiles=part_tiles,
            part_bits=self.part_bits[source],
            bits=self.bits,
            order=_falling(counts),
        )


def _falling(counts: Tensor) -> Tensor:
    return torch.argsort(counts, dim=1, descending=True, stable=True).int()


def _transpose(lists: TileLists, start: Tensor, tiles: Tensor, num_k_tiles: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = torch.repeat_interleave(torch.arange(len(start) - 1, device=start.device), start.diff().long())
    head, q_tile = rows // lists.num_q_tiles, rows % lists.num_q_tiles
    column = head * num_k_tiles + tiles
    source = torch.argsort(column, stable=True)  # rows ascend, so query tiles ascend within a column
    return _starts(column, lists.heads * num_k_tiles), q_tile[source].int(), source


def _starts(rows: Tensor, num_rows: int) -> Tensor:
    counts = torch.bincount(rows, minlength=num_rows)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()


def tile_lists(
    mask: Mask, num_queries: int, num_keys: int, tile_q: int, tile_k: int, device: torch.device | str = "cpu"
) -> TileLists:
    """The tile lists of any mask, cached by value.

    Args:
        mask: any mask; the lists hold exactly its visible pairs.
        num_queries, num_keys: lengths, aligned at the bottom right; both at least 1.
        tile_q: queries of a tile.
        tile_k: keys of a tile, a multiple of 32.
        device: where the lists go.

    Raises:
        ValueError: ``tile_k`` is not a multiple of 32, or the mask's layout is too small for the lengths.
    """
    if tile_k % 32:
        raise ValueError(f"tile_k: must be a multiple of 32, got {tile_k}")
    return _build(mask, num_queries, num_keys, tile_q, tile_k, torch.device(device))


def _edges(count: int, tile: int, offset: int) -> Tensor:
    first = torch.arange(0, count, tile)
    return torch.stack([first, (first + tile).clamp(max=count) - 1], dim=1) + offset


@lru_cache(maxsize=32)
def _build(mask: Mask, num_queries: int, num_keys: int, tile_q: int, tile_k: int, device: torch.device) -> TileLists:
    offset = num_keys - num_queries
    q, k = _edges(num_queries, tile_q, offset), _edges(num_keys, tile_k, 0)
    some, every = mask.tile_state(q, k)
    # The kernels read a full tile without bounds, so a ragged last tile is never one, be it of keys or of queries.
    whole = ((q[:, 1] - q[:, 0] + 1) == tile_q)[:, None] & ((k[:, 1] - k[:, 0] + 1) == tile_k)[None]
    full = every & whole
    candidates = (some & ~full).nonzero()  # (n, 3): head, query tile, key tile; sorted
    bits, index, ones, zeros = _bit_tiles(mask, candidates, q, k, tile_q, tile_k)
    promoted = candidates[ones & whole[candidates[:, 1], candidates[:, 2]]]
    full[promoted.unbind(1)] = True
    kept = ~zeros & ~full[candidates.unbind(1)]
    parts, index = candidates[kept], index[kept]
    used, index = torch.unique(index, return_inverse=True)

    heads, num_q_tiles = full.shape[0], full.shape[1]
    fulls = full.nonzero()
    full_start = _starts(fulls[:, 0] * num_q_tiles + fulls[:, 1], heads * num_q_tiles)
    part_start = _starts(parts[:, 0] * num_q_tiles + parts[:, 1], heads * num_q_tiles)
    counts = (full_start.diff() + part_start.diff()).view(heads, num_q_tiles)
    return TileLists(
        tile_q=tile_q,
        tile_k=tile_k,
        num_queries=num_queries,
        num_keys=num_keys,
        heads=heads,
        full_start=full_start.to(device),
        full_tiles=fulls[:, 2].int().to(device),
        part_start=part_start.to(device),
        part_tiles=parts[:, 2].int().to(device),
        part_bits=index.int().to(device),
        bits=bits[used].to(device),
        order=_falling(counts).to(device),
    )


def _bit_tiles(
    mask: Mask, tiles: Tensor, q: Tensor, k: Tensor, tile_q: int, tile_k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bit tiles of the given tiles: the table, each tile's index in it, and which tiles are all ones or all zeros."""
    words = tile_k // 32
    weights = torch.ones(32, dtype=torch.int64) << torch.arange(32)
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
        packed = (pairs.view(-1, tile_q, words, 32).long() * weights).sum(-1)
        packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()
        table, inverse = torch.unique(packed, dim=0, return_inverse=True)
        tables.append(table)
        indices.append(inverse + seen)
        seen += len(table)
    if not tables:
        nothing = torch.zeros(0, dtype=torch.bool)
        return torch.zeros(0, tile_q, words, dtype=torch.int32), torch.zeros(0, dtype=torch.int64), nothing, nothing
    table, inverse = torch.unique(torch.cat(tables), dim=0, return_inverse=True)
    return table, inverse[torch.cat(indices)], torch.cat(ones), torch.cat(zeros)
