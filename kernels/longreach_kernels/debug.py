"""Debug mode: with ``LONGREACH_DEBUG=1`` in the environment, read once at import, indices into pages are checked.

Kernels trust page ids, slots and lengths: a wrong one reads or overwrites another sequence's keys, or memory that
belongs to nobody. Looking at them means waiting for the device, so `ragged_attention`, `paged_attention` and
`write_pages` do it in debug mode only. A CUDA graph cannot wait: capturing one of them in debug mode is refused, and
replays are never checked.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from longreach_kernels.batch import PagedBatch
from longreach_kernels.masks.tile_lists import TileLists


def _flag(value: str) -> bool:
    if value not in ("", "0", "1"):
        raise ValueError(f"LONGREACH_DEBUG: must be 0 or 1, got {value!r}")
    return value == "1"


ENABLED = _flag(os.environ.get("LONGREACH_DEBUG", ""))


def _refuse_capture(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError("LONGREACH_DEBUG: checks wait for the device and cannot be captured; run without CUDA graphs")


def check_batch(batch: PagedBatch, num_tokens: int, num_pages: int, page_size: int) -> None:
    """Check what `paged_attention` will read, page ids of all tokens of a sequence included. Waits for the device.

    Args:
        batch: the batch.
        num_tokens: T, the queries of all sequences.
        num_pages, page_size: of the tensors of pages.

    Raises:
        ValueError: a length or an index is out of range; the message begins with the name of its tensor. Or a CUDA
            graph is being captured.
    """
    counts = check_starts("cu_seqlens_q", batch.cu_seqlens_q, "q", num_tokens)
    if (wrong := _first(counts > batch.max_seqlen_q)) is not None:
        raise ValueError(
            f"cu_seqlens_q: sequence {wrong} has {counts[wrong]} queries, max_seqlen_q is {batch.max_seqlen_q}"
        )
    if (wrong := _first(counts[: batch.decodes] != 1)) is not None:
        raise ValueError(
            f"cu_seqlens_q: sequence {wrong} is one of {batch.decodes} decodes and needs 1 query, got {counts[wrong]}"
        )
    lengths = batch.context_lens.cpu()
    limit = min(batch.max_context_len, batch.page_table.shape[1] * page_size)
    if (wrong := _first((lengths < 0) | (lengths > limit))) is not None:
        raise ValueError(
            f"context_lens: sequence {wrong} has {lengths[wrong]} keys, must lie between 0 and {limit} "
            f"(max_context_len {batch.max_context_len}, {batch.page_table.shape[1]} pages of {page_size} in page_table)"
        )
    table = batch.page_table.cpu()
    in_use = torch.arange(table.shape[1]) * page_size < lengths[:, None]
    wrong = _first((in_use & ((table < 0) | (table >= num_pages))).flatten())
    if wrong is not None:
        row, column = divmod(wrong, table.shape[1])
        raise ValueError(
            f"page_table: page {column} of sequence {row} must lie between 0 and {num_pages - 1}, "
            f"got {table[row, column]}"
        )


def check_starts(name: str, cu_seqlens: Tensor, rows_name: str, num_rows: int) -> Tensor:
    """Check where the sequences of a batch start in a tensor of ``num_rows`` rows, and return their lengths on the CPU.
    Waits for the device.

    Raises:
        ValueError: they do not ascend from 0 to the number of rows, or a CUDA graph is being captured.
    """
    _refuse_capture(cu_seqlens.device)
    starts = cu_seqlens.cpu()
    lengths = starts.diff()
    if starts[0] != 0 or starts[-1] != num_rows or (lengths < 0).any():
        raise ValueError(f"{name}: must ascend from 0 to the {num_rows} rows of {rows_name}, got {starts.tolist()}")
    return lengths


def check_lists(lists: TileLists, batch: PagedBatch) -> None:
    """Check that the lists that a caller brings lead to tiles of the batch. Waits for the device.

    Raises:
        ValueError: a row, a tile or a bit tile is out of range, or a CUDA graph is being captured.
    """
    _refuse_capture(lists.start.device)
    start, partial, tiles, bit_index, order, first_row = (
        x.cpu().long() for x in (lists.start, lists.partial, lists.tiles, lists.bit_index, lists.order, lists.first_row)
    )
    for b, (queries, keys) in enumerate(zip(*batch.host_lengths, strict=True)):
        q_tiles, k_tiles = -(-queries // lists.tile_q), -(-keys // lists.tile_k)
        first, stop = int(first_row[b]), int(first_row[b]) + lists.heads * q_tiles
        if not 0 <= first <= stop <= len(partial):
            raise ValueError(
                f"lists: first_row of sequence {b} needs {stop - first} rows of {len(partial)}, is {first}"
            )
        bounds = torch.stack([start[first:stop], partial[first:stop], start[first + 1 : stop + 1]])
        if (bounds.diff(dim=0) < 0).any() or (bounds < 0).any() or (bounds > len(tiles)).any():
            raise ValueError(f"lists: start and partial of sequence {b} must ascend to at most {len(tiles)}")
        if not torch.equal(
            order[first:stop].view(lists.heads, q_tiles).sort(1)[0], torch.arange(q_tiles).expand(lists.heads, -1)
        ):
            raise ValueError(f"lists: order of sequence {b} must hold each of its {q_tiles} query tiles once a head")
        if first == stop:
            continue
        inside = slice(int(start[first]), int(start[stop]))
        entry, bit = tiles[inside], bit_index[inside]
        tile = torch.where(entry < 0, -1 - entry, entry)
        if (wrong := _first(tile >= k_tiles)) is not None:
            raise ValueError(f"lists: a tile of sequence {b} must lie below {k_tiles}, got {tile[wrong]}")
        if (wrong := _first((bit >= len(lists.bits)) | ((bit < 0) != (entry >= 0)))) is not None:
            raise ValueError(f"lists: an entry {entry[wrong]} of sequence {b} has bit tile {bit[wrong]}")


def check_slots(slots: Tensor, num_pages: int, page_size: int) -> None:
    """Check that `write_pages` will write inside its pages. Waits for the device.

    Raises:
        ValueError: a slot is out of range, or a CUDA graph is being captured.
    """
    _refuse_capture(slots.device)
    on_host = slots.cpu()
    last = num_pages * page_size - 1
    if (wrong := _first((on_host < -1) | (on_host > last))) is not None:
        raise ValueError(f"slots: slot of token {wrong} must lie between -1 and {last}, got {on_host[wrong]}")


def _first(wrong: Tensor) -> int | None:
    """The index of the first True of a vector."""
    found = wrong.nonzero()
    return int(found[0]) if len(found) else None
