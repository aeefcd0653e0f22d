# pyright: reportGeneralTypeIssues=false
"""Keys in splits, for a prefill of so few queries that its query tiles do not keep all multiprocessors busy.

A query tile walks its keys alone: with 128 query tiles of 128K keys for 132 multiprocessors a call takes as long as
with one, and with 160 twice as long. So the keys are cut into splits of equal size, each of which is a work item with a
result of its own, and the results are merged by their log-sum-exp: split-KV, as FlashDecoding has it for one query.
The merge adds the splits in ascending order, whichever was ready first.

A split costs some key tiles of time whatever it holds: its queries are loaded, its first scores wait for no product,
and its results go to memory as fp32 and come back. So short sequences are computed whole. Idle multiprocessors in the
last round count half, which is what fits the measurements
(docs/dev/kernel-log.md#small-chunks-in-one-part).

How many splits suit the multiprocessors depends on all queries of a call. Where a query's result must not, splits hold
`FIXED_KEYS` keys each, whatever else is computed: then all queries with more keys than that are computed in splits, in
pieces of the batch whose results fit the same room.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longreach_kernels.backends.triton.config import launch
from longreach_kernels.batch import PagedBatch

_MERGE_ROWS = 16  # of a program of the merge
LEAST_TILES = 16  # of keys in a split
_MOST_BYTES = 1 << 27  # of the splits' results
# What a work item costs beside its key tiles, and what a query tile's share of the merge costs for each split, in the
# time of a key tile; docs/dev/kernel-log.md#small-chunks-in-one-part has what they were fitted to.
_ITEM_TILES = 6.0
_MERGE_TILES = 0.02
_TYPICAL_TILES = 512  # of keys, where all that is known is the longest that there could be
# A multiple of every key tile. Smaller splits would keep more multiprocessors busy with few queries. In a prompt of
# full chunks each costs one more tile of work and two passes over its results: at this size a few percent together.
FIXED_KEYS = 8192


class KeySplits(NamedTuple):
    """Results of `number` splits of each sequence's keys.

    A sequence's splits are of equal size, by its own length, which the kernel reads on the device; one of few key tiles
    has one split.

    Attributes:
        out: (number, T, Hq, D) fp32, normalised.
        lse: (number, T, Hq) fp32, -inf where a row has no key in a split.
        least_tiles: key tiles of a split, at least.
        whole_tiles: a sequence of at most so many key tiles is one split.
    """

    number: int
    out: Tensor
    lse: Tensor
    least_tiles: int = LEAST_TILES
    whole_tiles: int = 0


def split_keys(
    q: Tensor, tokens: int, max_context_len: int, block_m: int, block_n: int, processors: int, value_parts: int = 1
) -> KeySplits | None:
    """Room for the splits of a call with `tokens` of the queries q (T, Hq, D); None if it is better done in one."""
    heads = q.shape[1] * value_parts
    key_tiles = -(-max_context_len // block_n)
    most = min(key_tiles // LEAST_TILES, _MOST_BYTES // max(1, 4 * q.numel()))
    number, whole_tiles = _best_number(heads * -(-tokens // block_m), key_tiles, most, processors)
    return None if number < 2 else _room(q, number, LEAST_TILES, whole_tiles)


def _room(q: Tensor, number: int, least_tiles: int, whole_tiles: int = 0) -> KeySplits:
    out = torch.empty((number, *q.shape), dtype=torch.float32, device=q.device)
    lse = torch.full((number, *q.shape[:2]), float("-inf"), dtype=torch.float32, device=q.device)
    return KeySplits(number, out, lse, least_tiles, whole_tiles)


class Piece(NamedTuple):
    """Some rows of a batch's queries, as a batch of their own, and room for the splits of their keys."""

    rows: slice
    batch: PagedBatch
    splits: KeySplits


def split_fixed(batch: PagedBatch, q: Tensor, block_m: int, block_n: int) -> Iterator[Piece]:
    """The prefill of `batch`, with queries q (T, Hq, D) under a causal mask, in splits of `FIXED_KEYS` keys.

    Lengths are taken on the device, so that nothing waits and a CUDA graph may hold it.
    """
    number = -(-batch.max_context_len // FIXED_KEYS)
    fitting = _MOST_BYTES // (4 * number * q.shape[1] * q.shape[2])
    rows = max(block_m, fitting // block_m * block_m)
    for start in range(batch.decodes, q.shape[0], rows):
        end = min(start + rows, q.shape[0])
        yield Piece(slice(start, end), _piece(batch, start, end), _room(q[start:end], number, FIXED_KEYS // block_n))


def _piece(batch: PagedBatch, start: int, end: int) -> PagedBatch:
    """The sequences of a batch behind its decodes, with those of their queries that are rows `start` to `end`."""
    cu_seqlens = batch.cu_seqlens_q[batch.decodes :]
    # Queries stand at the end of their keys: without the last of them, the last keys are not there either.
    missing = (cu_seqlens[1:] - end).clamp_(min=0)
    return PagedBatch(
        cu_seqlens_q=cu_seqlens.clamp(start, end).sub_(start),
        context_lens=batch.context_lens[batch.decodes :] - missing,
        page_table=batch.page_table[batch.decodes :],
        max_seqlen_q=batch.max_seqlen_q,
        max_context_len=batch.max_context_len,
    )


@lru_cache(maxsize=256)
def _best_number(query_tiles: int, key_tiles: int, most: int, processors: int) -> tuple[int, int]:
    """KeySplits, at most `most`, with which sequences of `key_tiles` take least time, and how many key tiles a sequence
    has at which that is as long as in one split."""

    def rounds(number: int) -> float:
        items = query_tiles * number / processors
        return (math.ceil(items) + items) / 2

    def merging(number: int) -> float:
        return _MERGE_TILES * number * query_tiles if number > 1 else 0.0

    def tiles(number: int) -> float:
        length = min(key_tiles, _TYPICAL_TILES)
        return rounds(number) * (length / number + _ITEM_TILES) + merging(number)

    number = min(range(1, max(most, 1) + 1), key=tiles)
    if number == 1:
        return 1, 0
    for_each_tile = rounds(1) - rounds(number) / number
    for_each_item = (rounds(number) - rounds(1)) * _ITEM_TILES + merging(number)
    return number, int(for_each_item / for_each_tile)


@triton.jit(do_not_specialize=["number", "first", "end", "stride"])
def _merge_kernel(
    SplitOut, SplitLse, Out, Lse, number, first, end, stride, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr
):
    """Grid (blocks of ROWS rows from `first` to `end`,). Rows are (token, head); a split has `stride` of them."""
    rows = first + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < end
    columns = tl.arange(0, BLOCK_D)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    for split in range(number):
        lse = tl.load(SplitLse + split * stride + rows, mask=inside, other=float("-inf"))
        largest = tl.maximum(largest, lse)
    safe = tl.where(largest == float("-inf"), 0.0, largest)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for split in range(number):
        place = split * stride.to(tl.int64) + rows
        lse = tl.load(SplitLse + place, mask=inside, other=float("-inf"))
        seen = lse != float("-inf")  # true of what is not a number, which goes on to the result
        mask = seen[:, None] & (columns < D)[None, :]
        weight = tl.exp(lse - safe)
        acc += weight[:, None] * tl.load(SplitOut + place[:, None] * D + columns[None, :], mask=mask, other=0.0)
        total += weight
    nothing = total == 0.0
    acc /= tl.where(nothing, 1.0, total)[:, None]
    result = tl.where(nothing, float("-inf"), tl.log(total) + safe)
    tl.store(Lse + rows, result, mask=inside)
    place = rows.to(tl.int64)[:, None] * D + columns[None, :]
    tl.store(Out + place, acc.to(Out.dtype.element_ty), mask=inside[:, None] & (columns < D)[None, :])


def merge_splits(splits: KeySplits, out: Tensor, lse: Tensor, first: int) -> None:
    """Write the rows of out (T, Hq, D) and lse (T, Hq), both contiguous, from token `first` on."""
    tokens, heads, head_dim = out.shape
    launch(
        _merge_kernel,
        (-(-(tokens - first) * heads // _MERGE_ROWS),),
        splits.out,
        splits.lse,
        out,
        lse,
        splits.number,
        first * heads,
        tokens * heads,
        tokens * heads,
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        ROWS=_MERGE_ROWS,
    )
