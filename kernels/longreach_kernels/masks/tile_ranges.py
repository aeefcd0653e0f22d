"""From a mask to the work a kernel does: ranges of key tiles for each query tile.

A mask with a closed form (`Mask.band`) needs at most four ranges for any query tile, computed from its two ends:
sinks, left boundary, interior, right boundary. Only the interior is free of masking. No list is ever built for them;
other masks are described by `longreach_kernels.masks.tile_lists`.
"""

from __future__ import annotations

from typing import NamedTuple

from longreach_kernels.masks.mask import Mask


class TileRange(NamedTuple):
    """Key tiles ``start <= t < end``. ``partial``: some (query, key) pair inside is masked or beyond the last key."""

    start: int
    end: int
    partial: bool


def key_ranges(mask: Mask, q_start: int, q_end: int, num_keys: int, tile_k: int) -> tuple[TileRange, ...]:
    """Key tiles that the queries at positions ``q_start <= q < q_end`` must visit, ascending and disjoint.

    Args:
        mask: a mask with a closed form.
        q_start, q_end: absolute positions (see `longreach_kernels.masks.mask`); may be negative.
        num_keys: keys in the sequence.
        tile_k: keys in a tile; 1 gives ranges of keys.

    Raises:
        ValueError: ``mask`` has no closed form.
    """
    band = mask.band
    if band is None:
        raise ValueError(f"mask: {mask!r} has no closed ranges; it is described by tile lists")
    if q_end <= q_start or num_keys <= 0:
        return ()
    last = q_end - 1
    # Keys that some query sees, and keys that all of them see, without the sinks.
    seen_end = min(num_keys, q_end) if band.causal else num_keys
    full_end = min(num_keys, q_start + 1) if band.causal else num_keys
    seen_start = full_start = 0
    if band.window is not None:
        seen_start = max(0, q_start - band.window + 1)
        full_start = max(0, last - band.window + 1)
    if seen_end <= 0:
        return ()

    first = seen_start // tile_k
    stop = -(-seen_end // tile_k)
    inner = -(-full_start // tile_k)
    # A ragged last tile reads beyond the last key, hence it is partial even where the mask hides nothing.
    inner_end = max(full_end, 0) // tile_k
    ranges: list[TileRange] = []
    if band.window is not None and band.sinks:
        sink_stop = min(first, -(-min(band.sinks, seen_end) // tile_k))
        sink_full = min(sink_stop, max(0, min(band.sinks, full_end)) // tile_k)
        ranges += [TileRange(0, sink_full, False), TileRange(sink_full, sink_stop, True)]
    if inner >= inner_end:
        ranges.append(TileRange(first, stop, True))
    else:
        ranges += [
            TileRange(first, inner, True),
            TileRange(inner, inner_end, False),
            TileRange(inner_end, stop, True),
        ]
    return tuple(r for r in ranges if r.start < r.end)
