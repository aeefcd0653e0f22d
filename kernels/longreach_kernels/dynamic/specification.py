"""The estimates in plain torch: what the Triton kernels must agree with, and what runs on a CPU.

Each query tile is computed alone over the keys up to its own end, so that its result does not depend on the chunk that
it comes in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from longreach_kernels.batch import PagedBatch

from .query_tiles import QueryTiles
from .targets import PARTS


class Logits(NamedTuple):
    """What makes logits of products: ``scale``, ``softcap`` (or None), and (Hkv,) factors of 8-bit keys (or None)."""

    scale: float
    softcap: float | None
    k_scale: Tensor | None


class _Tile(NamedTuple):
    """One query tile: rows (Hq, tile_q, D) padded with zeros, how many there are, and keys up to its end."""

    slot: int
    queries: Tensor
    num_rows: int
    first: int
    keys: Tensor  # (Hkv, n, D), n a multiple of tile_k, zeros beyond the sequence's end
    num_keys: int


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
        for i in range(-(-num_queries // tiles.tile_q)):
            rows = q[starts[b] + i * tiles.tile_q : starts[b] + min((i + 1) * tiles.tile_q, num_queries)]
            first = num_keys - num_queries + i * tiles.tile_q
            stop = max(0, first + len(rows))
            rows = torch.nn.functional.pad(rows.float(), (0, 0, 0, 0, 0, tiles.tile_q - len(rows))).transpose(0, 1)
            num_rows = min(tiles.tile_q, num_queries - i * tiles.tile_q)
            yield _Tile(slot + i, rows, num_rows, first, k[:, : -(-stop // tiles.tile_k) * tiles.tile_k], num_keys)


def _masses(
    q: Tensor,
    k_pages: Tensor,
    batch: PagedBatch,
    tiles: QueryTiles,
    logits: Logits,
    rows_of: Callable[[_Tile], tuple[Tensor, Tensor, Tensor]],
) -> Tensor:
    """(Hkv, Q, K) int32 in `PARTS`. ``rows_of``: products (Hkv, G, R, n), which of them count (R, n), and which rows
    are real (R,); n a multiple of the key tiles."""
    heads = k_pages.shape[2]
    masses = torch.zeros(heads, len(tiles.seq), tiles.key_tiles, dtype=torch.int32)
    for tile in _each_tile(q, k_pages, batch, tiles, logits):
        products, allowed, real = rows_of(tile)
        scores = products * logits.scale
        if logits.softcap is not None:
            scores = logits.softcap * torch.tanh(scores / logits.softcap)
        scores = scores.masked_fill(~allowed, float("-inf"))
        weights = torch.softmax(scores, -1).nan_to_num(0.0)[:, :, real]
        key_tiles = tile.keys.shape[1] // tiles.tile_k
        mass = weights.unflatten(-1, (key_tiles, -1)).sum(-1).mean((1, 2))
        masses[:, tile.slot, :key_tiles] = (mass.double() * PARTS).round().int()
    return masses


def antidiagonal_mass(
    q: Tensor, k_pages: Tensor, batch: PagedBatch, tiles: QueryTiles, logits: Logits, stride: int
) -> Tensor:
    """`estimators.Antidiagonal`: (Hkv, Q, K) int32 in `PARTS`, the mean over the tile's rows and the group's heads.

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
    kv_heads = k_pages.shape[2]

    def rows_of(tile: _Tile) -> tuple[Tensor, Tensor, Tensor]:
        starts = torch.arange(0, tile.keys.shape[1], tiles.tile_k)
        real = (tile.num_keys - starts).clamp(max=tiles.tile_k)
        means = tile.keys.unflatten(1, (-1, tiles.tile_k)).sum(2) / real[:, None]
        products = tile.queries.reshape(kv_heads, -1, means.shape[-1]) @ means.to(q.dtype).float().mT
        rows = torch.arange(tiles.tile_q)
        position = (tile.first + rows)[:, None]
        allowed = starts <= position
        if tiles.window is not None:
            allowed &= starts + tiles.tile_k > position - tiles.window + 1
        return products.view(kv_heads, -1, len(rows), len(starts)), allowed, rows < tile.num_rows

    return _masses(q, k_pages, batch, tiles, logits, rows_of)
