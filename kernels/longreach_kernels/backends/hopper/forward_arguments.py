"""What the Hopper forward kernel is given, in groups that both sides of the launch name alike.

The kernel's own entry takes the fields of `Output`, `Pages`, `Sizes`, `Lists`, `Logits` and `Split` one by one
(`argument_order`) and puts them together again. It cannot take the tuples: Triton compiles a kernel anew for every kind
of number in a tuple, and most of these numbers differ from call to call.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Form(NamedTuple):
    """What the kernel is compiled for.

    Attributes:
        group: query heads of a KV head.
        head_dim: the power of two that channels are padded to.
        value_dim: channels of the values that an item computes; the others are another item's.
        block_m, block_n: queries and keys of a tile.
        ring: tiles of K and of V in shared memory.
        consumers: warpgroups of 64 queries.
        registers, producer_registers: of a thread of a consumer and of the producer.
        own_out: whether results have shared memory of their own, or that of the queries.
        ragged: sequences are found by cu_q; else all have the same lengths.
        page_size: tokens of a page; 0 where keys are contiguous.
        listed: key tiles come from tile lists; else from the closed form.
        causal, windowed: the closed form.
        softcap, sink_logits: whether there are any.
        split: an item is one split of its sequence's keys (`forward_split`).
    """

    group: int
    head_dim: int
    value_dim: int
    block_m: int
    block_n: int
    ring: int
    consumers: int
    registers: int
    producer_registers: int
    own_out: bool
    ragged: bool
    page_size: int
    listed: bool
    causal: bool
    windowed: bool
    softcap: bool
    sink_logits: bool
    split: bool


class Output(NamedTuple):
    """Results, by the strides of a head, a row and a split; `head_dim` is the true one. Of splits, in fp32."""

    out: Any
    lse: Any
    stride_lh: Any
    stride_lt: Any
    stride_ls: Any
    stride_oh: Any
    stride_ot: Any
    stride_os: Any
    head_dim: Any


class Pages(NamedTuple):
    """Where the sequences of a ragged batch begin, and their keys: `cu_k`, or pages by `context_lens` and `table`.

    `tiles_of_seq`: places for transposed values of 8 bits that each sequence has (`transpose`).
    """

    cu_q: Any
    cu_k: Any
    context_lens: Any
    table: Any
    stride_table: Any
    tiles_of_seq: Any


class Sizes(NamedTuple):
    """Counts. Dense batches have `num_queries` and `num_keys` tokens in every sequence.

    `section` heads go through all query tiles together; `window` and `sinks` are the mask's.
    """

    num_seqs: Any
    num_queries: Any
    num_keys: Any
    heads: Any
    section: Any
    num_items: Any
    window: Any
    sinks: Any


class Lists(NamedTuple):
    """`TileLists` as the kernel reads them; `sharing` query heads in a row have the same list."""

    first_row: Any
    start: Any
    partial: Any
    tiles: Any
    order: Any
    sharing: Any
    bits: Any
    bit_index: Any


class Logits(NamedTuple):
    """How logits come from products: the scale in log2 units, the softcap, learned sinks, and scales of 8-bit pages."""

    scale_log2: Any
    softcap_log2: Any
    sink_logits: Any
    k_scale: Any
    v_scale: Any


class Split(NamedTuple):
    """A sequence's keys make `num_splits` splits of `least_tiles` tiles or more, or one if they are at most
    `whole_tiles`."""

    num_splits: Any
    least_tiles: Any
    whole_tiles: Any


class Batch(NamedTuple):
    """What all items of a launch share. Pointers that a kind of batch does not use are never read."""

    pages: Any
    sizes: Any
    lists: Any
    split: Any
    logits: Any
