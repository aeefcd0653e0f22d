"""A floor under the mass that a choice of key tiles keeps, checked before attention is computed.

A few queries of each query tile are drawn. Where one of them would keep less than the floor, in any head of a KV head,
the tile reads more there, and everything if that is not enough. So a tile that reads its choice has passed the test of
its drawn queries; what the others may have lost is estimated by leaving one of them out (Good and Turing 1953): the
share of queries below the floor is, in the mean, at most the share of tiles in which exactly one drawn query decided,
over the number of those drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from longreach_kernels.batch import PagedBatch
from longreach_kernels.sparse.select import reference
from longreach_kernels.sparse.select.query_tiles import QueryTiles
from longreach_kernels.sparse.select.reference import Logits

# What the log-sum-exps of drawn queries may take of memory at once; three arrays of this size exist at a time.
_BYTES = 32 << 20
# Drawn queries of a tile of 128; of smaller tiles as many in proportion, but two at least.
DRAWN = 8
_LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class MassFloor:
    """What a drawn query keeps at least, of dense attention's mass.

    Attributes:
        share: between 0 and 1, exclusive.
        layer: the layer's number; other queries are drawn in each.

    Raises:
        ValueError: ``share`` is out of its range.
    """

    share: float
    layer: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"floor: must lie between 0 and 1, exclusive, got {self.share}")


class FloorCounts(NamedTuple):
    """What the test of one layer found in each of Q slots, over KV heads; a *row* is a query tile and a KV head in
    which something could be left out.

    Attributes:
        counts: (Q, 5) fp64: tested rows; those that read more than was chosen but not all; those that read everything;
            those in which a single drawn query decided what is read; and over the tested rows the sum of the least mass
            that a drawn query keeps of what is read.
        least: (Q, 2) fp32: the least mass that a drawn query keeps, of what is read and of what was chosen at first; 1
            without rows.
        tile_q: queries of a tile.
    """

    counts: Tensor
    least: Tensor
    tile_q: int


def drawn_count(tile_q: int) -> int:
    """Queries that are drawn of a tile of so many."""
    return max(2, DRAWN * tile_q // 128)


def drawn_rows(tiles: QueryTiles, batch: PagedBatch, layer: int, tested: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The drawn queries: their rows among those of the step, positions, and sequences, each (Q * n,) int32; a row is -1
    in tiles that are not ``tested`` (Q,).

    One is drawn of each n-th of a tile, by the tile's place in its prompt and the layer alone.
    """
    count = drawn_count(tiles.tile_q)
    width = tiles.tile_q // count
    part = torch.arange(count, device=tiles.first.device)
    number = (tiles.first.clamp(min=0)[:, None] // tiles.tile_q * count + part) * 2 + 1
    mixed = (number * 0x9E3779B1 + (layer + 1) * 0x85EBCA77) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 12)) * 0x297A2D39) & 0xFFFFFFFF
    place = part * width + (mixed ^ (mixed >> 15)) % width
    place = torch.minimum(place, (tiles.last - tiles.first).clamp(min=0)[:, None])
    starts = batch.cu_seqlens_q.long()
    row = (starts[tiles.seq] + tiles.tile * tiles.tile_q)[:, None] + place
    row = torch.where(tested[:, None], row, -1)
    position = tiles.first[:, None] + place
    seq = tiles.seq[:, None].expand_as(place)
    return row.flatten().int(), position.flatten().int(), seq.flatten().int()


def raised(
    choices: Sequence[Tensor],
    visible: Tensor,
    forced: Tensor,
    floor: MassFloor,
    q: Tensor,
    k_pages: Tensor,
    batch: PagedBatch,
    tiles: QueryTiles,
    logits: Logits,
    sink_logits: Tensor | None,
    *,
    plain: bool,
) -> tuple[Tensor, FloorCounts]:
    """What is read in place of a choice, so that every drawn query keeps the floor. Does not wait for the device,
    unless ``plain``.

    Args:
        choices: (Hkv, Q, K) bool each, what was chosen, then what is tried in its place, each holding the one before.
        visible, forced: (Q, K) bool, of a `TilePlan`.
        floor: what a drawn query keeps at least.
        q, k_pages, batch, tiles, logits: as for the estimate.
        sink_logits: (Hq,) of a learned sink, whose weight counts as kept.
        plain: compute in torch, without kernels.

    Returns:
        (Hkv, Q, K) bool, and what was found.
    """
    slots = choices[0].shape[1]
    count = drawn_count(tiles.tile_q)
    tested = (visible & ~forced).any(-1)
    drawn = drawn_rows(tiles, batch, floor.layer, tested)
    parts = []
    room = max(1, _BYTES // (4 * q.shape[1] * tiles.key_tiles * count))
    for start in range(0, slots, room):
        own = slice(start, min(start + room, slots))
        row, position, seq = (x[own.start * count : own.stop * count] for x in drawn)
        seen = q, k_pages, batch, tiles, (row, position, seq), logits, sink_logits
        parts.append(shares_of([x[:, own] for x in choices], *seen, plain=plain))
    shares = parts[0] if len(parts) == 1 else torch.cat(parts, 2)  # (choices, Hkv, Q, n)
    short = shares < floor.share
    needs = short.sum(0)  # (Hkv, Q, n): how many of the choices are too little for a drawn query
    most = needs.amax(-1)
    read, kept = choices[0], shares[0]
    for index in range(1, len(choices)):
        further = most >= index
        read = torch.where(further[..., None], choices[index], read)
        kept = torch.where(further[..., None], shares[index], kept)
    everything = most >= len(choices)
    read = torch.where(everything[..., None], visible, read)
    kept = torch.where(everything[..., None], 1.0, kept).amin(-1)
    return read, _counts(tested, most, needs, everything, kept, shares[0].amin(-1), tiles.tile_q)


def shares_of(
    choices: Sequence[Tensor],
    q: Tensor,
    k_pages: Tensor,
    batch: PagedBatch,
    tiles: QueryTiles,
    rows: tuple[Tensor, Tensor, Tensor],
    logits: Logits,
    sink_logits: Tensor | None,
    *,
    plain: bool,
) -> Tensor:
    """(choices, Hkv, Q, n) fp32: what each of the ``rows`` of some slots keeps under each of the ``choices`` (Hkv, Q,
    K) for them, the least over a KV head's query heads.

    Args:
        rows: as `drawn_rows` has them, (Q * n,) each.
        q, k_pages, batch, tiles, logits, sink_logits, plain: as for `raised`.
    """
    if plain:
        lse = reference.row_masses(q, k_pages, batch, tiles, rows, logits)
    else:
        from longreach_kernels.sparse.select.row_masses import row_masses

        lse = row_masses(q, k_pages, batch, tiles, rows, logits)
    key_tiles, kv_heads, _, group = lse.shape
    lse = lse.view(key_tiles, kv_heads, choices[0].shape[1], -1, group)
    highest = lse.amax(0)
    sink = None
    if sink_logits is not None:
        sink = sink_logits.float().view(kv_heads, 1, 1, group) * _LOG2E
        highest = torch.maximum(highest, sink)
    highest = torch.where(highest == float("-inf"), 0.0, highest)
    weights = lse.sub_(highest).exp2_()
    sink = 0.0 if sink is None else (sink - highest).exp2()
    total = weights.sum(0) + sink
    found = []
    for keep in choices:
        seen = (weights * keep.permute(2, 0, 1)[..., None, None]).sum(0) + sink
        found.append(torch.where(total > 0, seen / total, 1.0).amin(-1))
    return torch.stack(found)


def _counts(
    tested: Tensor, most: Tensor, needs: Tensor, everything: Tensor, kept: Tensor, chosen: Tensor, tile_q: int
) -> FloorCounts:
    """Of rows (Hkv, Q); ``needs`` (Hkv, Q, n)."""
    alone = ((needs == most[..., None]).sum(-1) == 1) & (most > 0)
    counted = [torch.ones_like(kept), (most > 0) & ~everything, everything, alone, kept]
    counts = torch.stack([x.double().sum(0) for x in counted], -1)
    least = torch.stack([kept.amin(0), chosen.amin(0)], -1)
    return FloorCounts(
        counts=torch.where(tested[:, None], counts, 0.0),
        least=torch.where(tested[:, None], least, 1.0),
        tile_q=tile_q,
    )
