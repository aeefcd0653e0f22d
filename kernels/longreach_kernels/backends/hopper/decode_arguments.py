"""What the Hopper decode kernel is given, in groups, as `forward_arguments` has them for the forward kernel."""

from __future__ import annotations

from typing import Any, NamedTuple


class Form(NamedTuple):
    """What the kernel is compiled for.

    Attributes:
        kv_heads, group: KV heads, and query heads of each.
        group_block: the power of two that a group is padded to in the merge.
        head_dim, page_size: channels, and tokens of a page.
        block_n: keys of a tile.
        box: keys that one load brings, all of one page.
        ring: tiles in shared memory.
        max_seqs: the power of two that the sequences of a launch are padded to.
        merge_block: splits that the merge takes at a time.
        producer_registers: of a thread.
        messages: from the producer to the consumers, as many as are under way.
        windowed, softcap, sink_logits: whether there are any.
    """

    kv_heads: int
    group: int
    group_block: int
    head_dim: int
    page_size: int
    block_n: int
    box: int
    ring: int
    max_seqs: int
    merge_block: int
    producer_registers: int
    messages: int
    windowed: bool
    softcap: bool
    sink_logits: bool


class Output(NamedTuple):
    """Results of splits (num_seqs, Hkv, num_splits, group, D), normalised, with their lse in log2 units; and results,
    by the strides of a row and a head. `sink_logits` join in when splits are merged; None if there are none."""

    split_out: Any
    split_lse: Any
    out: Any
    lse: Any
    stride_ot: Any
    stride_oh: Any
    stride_lt: Any
    stride_lh: Any
    sink_logits: Any


class Pages(NamedTuple):
    """Where each sequence's query lies, its length, and its pages."""

    cu_q: Any
    context_lens: Any
    table: Any
    stride_table: Any


class Sizes(NamedTuple):
    """Counts: sequences, the mask's window and sinks, places for the splits of a sequence and KV head, and how keys are
    split (`config.SplitRule`)."""

    num_seqs: Any
    window: Any
    sinks: Any
    num_splits: Any
    least_keys: Any
    max_splits: Any


class Scales(NamedTuple):
    """Of logits in log2 units, of the softcap, and (Hkv,) of 8-bit pages; None of others."""

    scale_log2: Any
    softcap_log2: Any
    k_scale: Any
    v_scale: Any


class Buffers(NamedTuple):
    """Shared memory of the queries, of the rings of K and V, and of messages; and barriers that say when it is full or
    free."""

    q: Any
    k: Any
    v: Any
    messages: Any
    full: Any
    empty: Any
    message_full: Any
    message_empty: Any
