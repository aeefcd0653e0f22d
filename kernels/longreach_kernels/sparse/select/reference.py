"""The estimates in plain torch: what the Triton kernels must agree with, and what runs on a CPU.

Each query tile is computed alone over the keys up to its own end, so that its result does not depend on the chunk that
it comes in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from longreach_kernels.batch import PagedBatch
from longreach_kernels.sparse.select.estimators import SPREAD, STRIP, strips_of
from longreach_kernels.sparse.select.query_tiles import QueryTiles
from longreach_kernels.sparse.select.targets import PARTS


class Logits(NamedTuple):
    """What makes logits of products: ``scale``, ``softcap`` (or None), and (Hkv,) factors of 8-bit keys (or None)."""

    scale: float
    softcap: float | None
    k_scale: Tensor | None


class _Tile(NamedTuple):
    """One query tile: rows (Hq, tile_q, D) padded with zeros, how many there are, and keys up to its end.

    ``summaries`` is one dict for all tiles of a sequence, for what is made of ``all_keys`` once.
    """

    slot: int
    queries: Tensor
    num_rows: int
    first: int
    keys: Tensor  # (Hkv, n, D), n a multiple of tile_k, zeros beyond the sequence's end
    num_keys: int
    all_keys: Tensor
    summaries: dict[int, tuple[Tensor, Tensor]]


def _each_tile(q: Tensor, k_pages: Tensor, batch: PagedBatch, tiles: QueryTiles, logits: Logits) -> Iterator[_Tile]:
    page_size = k_pages.shape[1]
    queries, keys = batch.host_lengths
    starts = batch.cu_seqlens_q.tolist()
    for b, (num_queries, num_keys) in enumerate(zip(queries, keys, strict=True)):
        if num_keys == 0 or num_queries == 0:
            continue
        pages = batch.page_table[b, : -(-num_keys // page_size)].long()
        k = k_pages[pages].flatten(0, 1)[:num_keys].float().transpose(0, 1)
        if logits.k_scale is not None:
            k = k * logits.k_scale[:, None, None]
        k = torch.nn.functional.pad(k, (0, 0, 0, -num_keys % tiles.tile_k)).contiguous()
        slot = (starts[b] - starts[0]) // tiles.tile_q + b
        summaries: dict[int, tuple[Tensor, Tensor]] = {}
        for i in range(-(-num_queries // tiles.tile_q)):
            rows = q[starts[b] + i * tiles.tile_q : starts[b] + min((i + 1) * tiles.tile_q, num_queries)]
            first = num_keys - num_queries + i * tiles.tile_q
            stop = max(0, first + len(rows))
            rows = torch.nn.functional.pad(rows.float(), (0, 0, 0, 0, 0, tiles.tile_q - len(rows))).transpose(0, 1)
            num_rows = min(tiles.tile_q, num_queries - i * tiles.tile_q)
            seen = k[:, : -(-stop // tiles.tile_k) * tiles.tile_k]
            yield _Tile(slot + i, rows, num_rows, first, seen, num_keys, k, summaries)


def _masses(
    q: Tensor,
    k_pages: Tensor,
    batch: PagedBatch,
    tiles: QueryTiles,
    logits: Logits,
    rows_of: Callable[[_Tile], tuple[Tensor, Tensor, Tensor]],
    *,
    squared: bool = False,
) -> Tensor:
    """(Hkv, Q, 1, K) int32 in `PARTS`, the mean over rows and heads, or the root of the mean square for each strip of
    rows, (Hkv, Q, S, K). ``rows_of``: products (Hkv, G, R, n), which of them count (R, n), and which rows are real
    (R,); n a multiple of the key tiles."""
    heads = k_pages.shape[2]
    strips = strips_of(tiles.tile_q) if squared else 1
    masses = torch.zeros(heads, len(tiles.seq), strips, tiles.key_tiles, dtype=torch.int32)
    for tile in _each_tile(q, k_pages, batch, tiles, logits):
        products, allowed, real = rows_of(tile)
        scores = products * logits.scale
        if logits.softcap is not None:
            scores = logits.softcap * torch.tanh(scores / logits.softcap)
        scores = scores.masked_fill(~allowed, float("-inf"))
        weights = torch.softmax(scores, -1).nan_to_num(0.0)[:, :, real]
        key_tiles = tile.keys.shape[1] // tiles.tile_k
        shares = weights.unflatten(-1, (key_tiles, -1)).sum(-1)
        for strip, part in enumerate(shares.split(STRIP, 2) if squared else [shares]):
            mass = part.square().mean((1, 2)).sqrt() if squared else part.mean((1, 2))
            masses[:, tile.slot, strip, :key_tiles] = (mass.double() * PARTS).round().int()
    return masses


def antidiagonal_mass(
    q: Tensor, k_pages: Tensor, batch: PagedBatch, tiles: QueryTiles, logits: Logits, stride: int
) -> Tensor:
    """`estimators.Antidiagonal`: (Hkv, Q, 1, K) int32 in `PARTS`, the mean over the tile's rows and the group's heads.

    Args:
        q: (T, Hq, D).
        k_pages: (num_pages, page_size, Hkv, D).
        batch, tiles, logits: of these.
        stride: keys of a folded vector; divides both sizes of tiles.
    """
    kv_heads = k_pages.shape[2]

    def rows_of(tile: _Tile) -> tuple[Tensor, Tensor, Tensor]:
        queries = tile.queries.unflatten(1, (-1, stride)).flip(2).flatten(2)
        keys = tile.keys.unflatten(1, (-1, stride)).flatten(2)
        products = queries.view(kv_heads, -1, queries.shape[-1]) @ keys.mT / stride
        folds = torch.arange(queries.shape[1]) * stride
        position, start = (tile.first + folds)[:, None], torch.arange(keys.shape[1]) * stride
        allowed = (start <= position) & (start < tile.num_keys)
        if tiles.window is not None:
            allowed &= start + stride > position - tiles.window + 1
        return products.view(kv_heads, -1, len(folds), keys.shape[1]), allowed, folds < tile.num_rows

    return _masses(q, k_pages, batch, tiles, logits, rows_of)


def pooled_mass(q: Tensor, k_pages: Tensor, batch: PagedBatch, tiles: QueryTiles, logits: Logits) -> Tensor:
    """`estimators.Pooled`: as `antidiagonal_mass`."""

    def rows_of(tile: _Tile) -> tuple[Tensor, Tensor, Tensor]:
        means, _ = _moments(tile, tiles.tile_k)
        return _by_block(tile, tiles, tiles.tile_k, tile.queries, means.to(q.dtype).float())

    return _masses(q, k_pages, batch, tiles, logits, rows_of)


def moments_mass(
    q: Tensor, k_pages: Tensor, batch: PagedBatch, tiles: QueryTiles, logits: Logits, block: int
) -> Tensor:
    """`estimators.Moments`: (Hkv, Q, S, K), as `antidiagonal_mass`, but the root of the mean square over the rows of
    each strip and the heads.

    ``block``, keys of a block, divides those of a tile.
    """
    squares, frozen = squares_dtype(q.dtype), math.sqrt(2 * math.log(block))

    def rows_of(tile: _Tile) -> tuple[Tensor, Tensor, Tensor]:
        means, variances = _moments(tile, block)
        products, allowed, real = _by_block(tile, tiles, block, tile.queries, means.to(q.dtype).float())
        spread = tile.queries.square().to(squares).float(), variances.to(squares).float()
        deviation = _by_block(tile, tiles, block, *spread)[0].clamp(min=0).sqrt() * logits.scale
        excess = torch.where(deviation < frozen, deviation**2, frozen * (2 * deviation - frozen))
        return products + excess * (0.5 / logits.scale), allowed, real

    return _masses(q, k_pages, batch, tiles, logits, rows_of, squared=True)


def squares_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of squared channels and variances: half precision could not hold those of channels above 256."""
    return dtype if dtype == torch.float32 else torch.bfloat16


def _moments(tile: _Tile, block: int) -> tuple[Tensor, Tensor]:
    """Mean and `SPREAD` variances (Hkv, n / block, D) of the keys that each block has, up to the end of the tile's."""
    if block not in tile.summaries:
        keys = tile.all_keys.unflatten(1, (-1, block))
        real = (tile.num_keys - torch.arange(0, tile.all_keys.shape[1], block)).clamp(0, block)
        count = real.clamp(min=1)[:, None]
        means = keys.sum(2) / count
        there = (torch.arange(block) < real[:, None])[..., None]
        apart = (keys - means[:, :, None]) * there
        tile.summaries[block] = means, apart.square().sum(2) * (SPREAD / count)
    means, variances = tile.summaries[block]
    blocks = tile.keys.shape[1] // block
    return means[:, :blocks], variances[:, :blocks]


def _by_block(
    tile: _Tile, tiles: QueryTiles, block: int, queries: Tensor, of_blocks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What `_masses` asks for: products of each query (Hq, R, D) with (Hkv, n, D), blocks that it sees, real rows."""
    products = queries.reshape(len(of_blocks), -1, of_blocks.shape[-1]) @ of_blocks.mT
    starts, rows = torch.arange(0, tile.keys.shape[1], block), torch.arange(tiles.tile_q)
    position = (tile.first + rows)[:, None]
    allowed = starts <= position
    if tiles.window is not None:
        allowed &= starts + block > position - tiles.window + 1
    return products.view(len(of_blocks), -1, len(rows), len(starts)), allowed, rows < tile.num_rows


def row_masses(
    q: Tensor,
    k_pages: Tensor,
    batch: PagedBatch,
    tiles: QueryTiles,
    rows: tuple[Tensor, Tensor, Tensor],
    logits: Logits,
) -> Tensor:
    """(K, Hkv, R, G) fp32: the log-sum-exp, in log2 units, of each row's logits in each key tile; -inf where it sees
    none.

    Args:
        q: (T, Hq, D).
        k_pages: (num_pages, page_size, Hkv, D).
        batch, tiles, logits: of these.
        rows: three (R,) int32: which of the T queries, or below 0 for none, their positions, and their sequences.
    """
    kv_heads = k_pages.shape[2]
    group = q.shape[1] // kv_heads
    found = torch.full((len(rows[0]), kv_heads, group, tiles.key_tiles), float("-inf"))
    keys_of: dict[int, Tensor] = {}
    for index, (row, position, seq) in enumerate(zip(*(x.tolist() for x in rows), strict=True)):
        if row < 0:
            continue
        if seq not in keys_of:
            length = int(batch.context_lens[seq])
            pages = batch.page_table[seq, : -(-length // k_pages.shape[1])].long()
            k = k_pages[pages].flatten(0, 1)[:length].float().transpose(0, 1)
            keys_of[seq] = k if logits.k_scale is None else k * logits.k_scale[:, None, None]
        scores = q[row].float().view(kv_heads, group, -1) @ keys_of[seq][:, : position + 1].mT * logits.scale
        if logits.softcap is not None:
            scores = logits.softcap * torch.tanh(scores / logits.softcap)
        short = tiles.key_tiles * tiles.tile_k - position - 1
        scores = torch.nn.functional.pad(scores, (0, short), value=float("-inf"))
        found[index] = scores.unflatten(-1, (-1, tiles.tile_k)).logsumexp(-1) * math.log2(math.e)
    return found.permute(3, 1, 0, 2).contiguous()
