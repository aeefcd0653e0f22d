"""What the warps of the Hopper backward kernel are given, in groups."""

from __future__ import annotations

from typing import Any, NamedTuple


class Form(NamedTuple):
    """What the kernel is compiled for.

    Attributes:
        group: query heads of a KV head.
        head_dim: channels.
        block_m: queries of a tile.
        ring: tiles of queries in shared memory.
        parts: of dQ in shared memory.
        registers, worker_registers: of a thread of the consumers and of the other warps.
        ragged: sequences are found by cu_q and cu_k; else all have the same lengths.
        causal, windowed: the mask.
    """

    group: int
    head_dim: int
    block_m: int
    ring: int
    parts: int
    registers: int
    worker_registers: int
    ragged: bool
    causal: bool
    windowed: bool


class Inputs(NamedTuple):
    """Shared memory of the keys and values of a program, of the rings of queries, dO and statistics, and barriers that
    say when it is full or free."""

    q: Any
    k: Any
    v: Any
    grad: Any
    stats: Any
    kv_full: Any
    full: Any
    empty: Any


class Gradients(NamedTuple):
    """Shared memory of dS and of parts of dQ, and barriers that say when a part is full or free. `iota` has the numbers
    of the columns of a tile: as constants they would take registers all through the loop."""

    iota: Any
    ds: Any
    dq: Any
    dq_full: Any
    dq_empty: Any


class KeyTile(NamedTuple):
    """The keys of a program and the query tiles that see them.

    Attributes:
        tile: which key tile of its sequence.
        first, num_tiles: the query tiles that see keys of this one.
        inner, inner_end: query tiles ``inner <= tile < inner_end`` see all of them.
        num_keys: of the sequence.
        offset: position of its first query.
        window: of the mask.
    """

    tile: Any
    first: Any
    inner: Any
    inner_end: Any
    num_tiles: Any
    num_keys: Any
    offset: Any
    window: Any


class Places(NamedTuple):
    """Where the rows and columns of a group's first query head begin in the matrices of queries, of dO, of keys and
    values, and its tiles in the padded buffers; and how far the next query head's are from there."""

    q_row: Any
    q_col: Any
    q_head_row: Any
    q_head_col: Any
    g_row: Any
    g_col: Any
    g_head_row: Any
    g_head_col: Any
    kv_row: Any
    kv_col: Any
    padded_tile: Any
    padded_head: Any
