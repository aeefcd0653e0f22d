"""The description of a step of paged attention: whose queries these are, and where their keys lie."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor


class HostSequence(NamedTuple):
    """One sequence of a batch as host integers.

    Its pages are given as runs of consecutive pages: the position of a run's first key, and the row where that key
    lies when the pages are seen as one tensor of rows, (num_pages * page_size, Hkv, D).
    """

    q_start: int
    q_end: int
    context_len: int
    run_starts: tuple[int, ...]
    run_rows: tuple[int, ...]


class DecodeNeeds(NamedTuple):
    """What a paged decode takes beside its inputs and its result, if it allows for sequences up to some length.

    Whoever captures a decode in a CUDA graph must know it.

    Attributes:
        workspace_bytes: of partial results.
        by_length: work is shared out on the device by the sequences' own lengths, so that allowing for longer ones
            takes no time.
    """

    workspace_bytes: int
    by_length: bool


class PageTables(TypedDict):
    """Those fields of `PagedBatch` that say where keys lie."""

    page_table: Tensor
    other_tables: Tensor | None


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """Sequences of one step. All tensors int32, contiguous, on the device of the queries.

    Query ``i`` of sequence ``b`` sits at position ``context_lens[b] - q_len[b] + i``. A sequence with context length 0
    is padding: its output is 0. Host integers are bounds, so that a call never waits for the device and can be captured
    in a CUDA graph: true lengths are read on the device.

    Attributes:
        cu_seqlens_q: (B + 1,) where each sequence's queries start in q; the last entry is their number.
        context_lens: (B,) keys of each sequence after this step, its new tokens included.
        page_table: (B, max_pages) page ids; entries beyond a sequence's length are never read.
        max_seqlen_q: bound of the number of queries of a sequence.
        max_context_len: bound of ``context_lens``.
        num_decodes: leading sequences that have exactly one query; they take the split-KV decode kernel, the others
            the prefill kernel. With ``max_seqlen_q == 1`` every sequence is a decode.
        known_lengths: queries and keys of each sequence, where the caller has them on the host: masks without a closed
            form then need not wait for the device. Believed.
        other_tables: (groups - 1, B, max_pages) the page tables of other groups of layers, where layers do not all have
            their keys in the same pages; see `of_group`.

    Raises:
        ValueError: a tensor has the wrong dtype or shape, or a bound is impossible.
    """

    cu_seqlens_q: Tensor
    context_lens: Tensor
    page_table: Tensor
    max_seqlen_q: int
    max_context_len: int
    num_decodes: int = 0
    known_lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    other_tables: Tensor | None = None

    def __post_init__(self) -> None:
        for name, dims in (("cu_seqlens_q", 1), ("context_lens", 1), ("page_table", 2)):
            tensor = getattr(self, name)
            if tensor.dtype != torch.int32 or tensor.dim() != dims or not tensor.is_contiguous():
                raise ValueError(
                    f"{name}: needs a contiguous int32 tensor of {dims} dimension(s), "
                    f"got {tensor.dtype} of shape {tuple(tensor.shape)}"
                )
        size = self.size
        if self.cu_seqlens_q.shape[0] != size + 1:
            raise ValueError(
                f"cu_seqlens_q: {size} context_lens need {size + 1} entries, got {self.cu_seqlens_q.shape[0]}"
            )
        if self.page_table.shape[0] != size:
            raise ValueError(f"page_table: {size} context_lens need {size} rows, got {self.page_table.shape[0]}")
        others = self.other_tables
        if others is not None and (others.dtype != torch.int32 or others.shape[1:] != self.page_table.shape):
            raise ValueError(
                f"other_tables: needs int32 of shape (groups - 1, {', '.join(map(str, self.page_table.shape))}), "
                f"got {others.dtype} {tuple(others.shape)}"
            )
        if self.max_seqlen_q < 1:
            raise ValueError(f"max_seqlen_q: must be at least 1, got {self.max_seqlen_q}")
        if self.max_context_len < 0:
            raise ValueError(f"max_context_len: must be at least 0, got {self.max_context_len}")
        if not 0 <= self.num_decodes <= size:
            raise ValueError(f"num_decodes: must lie between 0 and the {size} sequences, got {self.num_decodes}")

    @property
    def size(self) -> int:
        """Number of sequences, padding included."""
        return self.context_lens.shape[0]

    @property
    def decodes(self) -> int:
        """Number of leading sequences that are decodes."""
        return self.size if self.max_seqlen_q == 1 else self.num_decodes

    def of_group(self, index: int) -> PagedBatch:
        """The batch with the page table of a group of layers: 0 is `page_table`'s. Without `other_tables` all are."""
        return self if index == 0 or self.other_tables is None else self._by_group[index - 1]

    @cached_property
    def _by_group(self) -> tuple[PagedBatch, ...]:
        assert self.other_tables is not None
        return tuple(replace(self, page_table=table, other_tables=None) for table in self.other_tables)

    def tables_of(self, sequences: slice | Tensor) -> PageTables:
        """The page tables of some of the sequences."""
        others = self.other_tables
        if others is not None:
            # Slices stay views, whose contents a captured step replaces. What an index makes may have any strides.
            others = others[:, sequences] if isinstance(sequences, slice) else others.index_select(1, sequences)
        return PageTables(page_table=self.page_table[sequences], other_tables=others)

    @cached_property
    def host_lengths(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Queries and keys of each sequence (copies from the device, unless known); read once a batch, shared by all
        layers."""
        if self.known_lengths is not None:
            return self.known_lengths
        return tuple(self.cu_seqlens_q.diff().tolist()), tuple(self.context_lens.tolist())

    def host_sequences(self, page_size: int) -> tuple[HostSequence, ...]:
        """The batch as host integers (copies from the device); made once a batch, shared by all layers."""
        cached = self._host.get(page_size)
        if cached is None:
            cached = self._host[page_size] = self._read(page_size)
        return cached

    @cached_property
    def _host(self) -> dict[int, tuple[HostSequence, ...]]:
        return {}

    def _read(self, page_size: int) -> tuple[HostSequence, ...]:
        cu_seqlens = self.cu_seqlens_q.tolist()
        lengths = self.context_lens.tolist()
        sequences = []
        for b, length in enumerate(lengths):
            pages = self.page_table[b, : -(-length // page_size)].tolist()
            starts: list[int] = []
            rows: list[int] = []
            for i, page in enumerate(pages):
                if i == 0 or page != pages[i - 1] + 1:
                    starts.append(i * page_size)
                    rows.append(page * page_size)
            sequence = HostSequence(cu_seqlens[b], cu_seqlens[b + 1], length, tuple(starts), tuple(rows))
            sequences.append(sequence)
        return tuple(sequences)
