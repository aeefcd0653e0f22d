"""From a plan to the arrays of one forward pass. Host side only: numpy in, numpy out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt
from longreach_patches import PLACE_MASK, ROW_SHIFT

from longreach.engine.requests.request import Request
from longreach.engine.requests.step_plan import Chunk, StepPlan
from longreach.engine.requests.tile_worth import TilePart, Tiling
from longreach.policies.values import DENSE, Dynamic, StepPolicy

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class HostGroup:
    """The sequences of one attention policy, neighbours in a step.

    Attributes:
        policy: theirs.
        sequences, tokens: which of the step's B sequences and T tokens they are.
        cu_seqlens_q: where each starts, counted from the group's first token.
        num_decodes: leading sequences of one token.
        max_seqlen_q, max_context_len: the longest of each.
        prompt_lens: tokens of each sequence's prompt.
        parts: where key tiles are chosen, the parts of each sequence in order, each with the sequence's number.
    """

    policy: StepPolicy
    sequences: slice
    tokens: slice
    cu_seqlens_q: Int32
    num_decodes: int
    max_seqlen_q: int
    max_context_len: int
    prompt_lens: Int32
    parts: tuple[tuple[int, TilePart], ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether it has no sequence, as a group of a step of which nothing is wanted."""
        return self.sequences.start == self.sequences.stop


@dataclass(frozen=True)
class HostBatch:
    """The arrays of one step: T tokens of B sequences, with logits of R rows.

    Attributes:
        input_ids, positions, slots: (T,) the tokens, where they sit in their sequence, and where their keys go. Of a
            model with rotary tables a position names the sequence's, as `longreach_patches.rope_tables` says.
        seq_slots: (B,) the requests' `seq_slot`.
        cu_seqlens_q: (B + 1,) where each sequence's tokens start.
        context_lens: (B,) tokens of each sequence that are in its pages after this step.
        num_pages: pages of the longest sequence: what lies beyond in its row of the page tables is never read.
        table_changes: (2, n) what differs in the page tables from those of the step before: places in them, as if they
            were one row, and page ids. See `device_tables.DeviceTables`.
        logit_rows: (R,) of which of the T rows the logits are wanted: the last of each chunk that draws or is scored.
        num_decodes: leading sequences of one token, if all are dense.
        max_seqlen_q, max_context_len: the longest of each.
        groups: the sequences by policy, unless all are dense.
        other_slots: (groups - 1, T) as `slots`, of the groups of layers after the first; None where all layers are in
            one.
        state_reads, state_writes: (B,) the slots that each sequence's recurrent state is read from (-1: zeros) and left
            in, all of them different; None for a model without states.
    """

    input_ids: Int64
    positions: Int64
    slots: Int64
    seq_slots: Int64
    cu_seqlens_q: Int32
    context_lens: Int32
    logit_rows: Int64
    table_changes: Int64
    num_decodes: int
    max_seqlen_q: int
    max_context_len: int
    num_pages: int
    groups: tuple[HostGroup, ...] = ()
    other_slots: Int64 | None = None
    state_reads: Int64 | None = None
    state_writes: Int64 | None = None

    @property
    def places(self) -> Int64:
        """(T,) where the tokens sit in their sequence, whatever their rotary tables are."""
        return self.positions & PLACE_MASK

    @property
    def all_slots(self) -> list[Int64]:
        """(T,) of each group of layers, in order."""
        return [self.slots] if self.other_slots is None else [self.slots, *self.other_slots]

    @property
    def has_pending(self) -> bool:
        """Whether the step before this one draws some of its tokens."""
        return bool((self.input_ids < 0).any())

    @property
    def is_decode_only(self) -> bool:
        """Whether every sequence computes one token, of which it wants the logits."""
        return self.max_seqlen_q == 1 and len(self.logit_rows) == len(self.seq_slots)

    @property
    def state_slots(self) -> list[Int64]:
        """(B,) the slots that states are read from, and those that they are left in; none in models without states."""
        if self.state_reads is None or self.state_writes is None:
            return []
        return [self.state_reads, self.state_writes]

    @property
    def state_decodes(self) -> int:
        """Leading sequences of one token each, whatever their policies are."""
        longer = np.diff(self.cu_seqlens_q) > 1
        return int(np.argmax(longer)) if longer.any() else len(longer)

    @property
    def rows_wanted(self) -> Int64:
        """(B,) of how many of its last tokens each sequence wants the logits."""
        owners = np.searchsorted(self.cu_seqlens_q, self.logit_rows, side="right") - 1
        return np.bincount(owners, minlength=len(self.seq_slots))

    def of_wanted(self, *, lone_as_decodes: bool) -> HostBatch:
        """The step of `logit_rows` alone, of which there must be some. Each group keeps its place, be it empty; where
        tiles are chosen the rows are at the end of a prompt, which sees everything, and their group is dense.

        With `lone_as_decodes` leading sequences of one row are decodes, otherwise those alone that are so here.
        """
        wanted = self.rows_wanted
        kept = np.flatnonzero(wanted)
        counts = wanted[kept]
        longest = int(counts.max())
        lone = int(np.argmax(counts > 1)) if longest > 1 else len(counts)
        decodes = lone if lone_as_decodes else int((kept < self.num_decodes).sum())
        rows = self.logit_rows
        return replace(
            self,
            input_ids=self.input_ids[rows],
            positions=self.positions[rows],
            slots=self.slots[rows],
            seq_slots=self.seq_slots[kept],
            cu_seqlens_q=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            context_lens=self.context_lens[kept],
            logit_rows=np.arange(len(rows)),
            num_decodes=decodes,
            max_seqlen_q=1 if decodes == len(kept) else max(2, longest),
            max_context_len=int(self.context_lens[kept].max()),
            groups=tuple(self._wanted_groups(kept, counts, lone_as_decodes=lone_as_decodes)),
            other_slots=None if self.other_slots is None else self.other_slots.take(rows, 1),
            state_reads=None,  # a layer that keeps a state needs all rows
            state_writes=None,
        )

    def _wanted_groups(self, kept: Int64, counts: Int64, *, lone_as_decodes: bool) -> Iterator[HostGroup]:
        """The groups of the step of so many rows of each sequence that is `kept`."""
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        for group in self.groups:
            first, last = np.searchsorted(kept, [group.sequences.start, group.sequences.stop]).tolist()
            of_group = counts[first:last]
            lone = int(np.argmax(of_group > 1)) if (of_group > 1).any() else len(of_group)
            decodes = (
                lone if lone_as_decodes else int((kept[first:last] < group.sequences.start + group.num_decodes).sum())
            )
            yield HostGroup(
                policy=DENSE if isinstance(group.policy, Dynamic) else group.policy,
                sequences=slice(first, last),
                tokens=slice(int(starts[first]), int(starts[last])),
                cu_seqlens_q=starts[first : last + 1] - starts[first],
                num_decodes=decodes,
                max_seqlen_q=1 if decodes == len(of_group) else max(2, int(of_group.max())),
                max_context_len=int(self.context_lens[kept[first:last]].max(initial=0)),
                prompt_lens=group.prompt_lens[kept[first:last] - group.sequences.start],
            )


class BatchBuilder:
    """Turns plans into arrays; keeps the tables of page ids between steps, since little of them changes in one.

    The table of each group of layers has a row for each running request, at its `Request.seq_slot`, of page ids times
    the group's stride: there is one group for each of `strides`. `dropped` is the id that stands for a page that a
    window has left behind. The device has the same tables:
    each batch says what has changed since the one before it, and all of them have to reach the device.
    `rope_factors` are those of the model's rotary tables, in their order, if it has such. `tiling` says how dynamic
    policies choose tiles; None where there are none.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_pages: int,
        page_size: int,
        strides: Sequence[int] = (1,),
        dropped: int = 0,
        rope_factors: Sequence[float] = (),
        tiling: Tiling | None = None,
    ) -> None:
        num_groups = len(strides)
        self._rope_rows = {factor: row << ROW_SHIFT for row, factor in enumerate(rope_factors)}
        self._tiling = tiling
        self._page_size = page_size
        self._strides = strides
        self._tables: Int32 = np.zeros((num_groups, max_num_seqs, max_pages), np.int32)
        self._dropped = [dropped * stride for stride in strides]
        self._pages: list[list[int] | None] = [None] * max_num_seqs  # whose pages a row shows
        self._filled = [0] * max_num_seqs
        self._settled = [0] * max_num_seqs  # of the request, when the row was last brought up to date
        self._first = [[0] * num_groups for _ in range(max_num_seqs)]
        self._changed: list[tuple[int, int]] = []  # ranges of places in all tables: their starts and lengths

    def forget(self) -> None:
        """Take it that the device has none of the tables: the batch before may not have reached it."""
        self._pages = [None] * len(self._pages)

    def build(self, plan: StepPlan) -> HostBatch:
        """The arrays of `plan`, sequences in the order of its chunks; each token of a decode is one."""
        chunks = plan.chunks
        for chunk in chunks:
            self._update_row(chunk.request)
        sizes = np.array([chunk.length for chunk in chunks])
        sequences = np.array([chunk.num_sequences for chunk in chunks])
        lengths = np.repeat(sizes // sequences, sequences)
        starts = np.array([chunk.start for chunk in chunks], np.int64)
        positions = np.arange(sizes.sum()) + np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
        cu_seqlens_q = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=cu_seqlens_q[1:])
        ends = positions[cu_seqlens_q[1:] - 1].astype(np.int32) + 1
        slots = np.repeat(np.array([chunk.request.seq_slot for chunk in chunks], np.int64), sequences)
        longest = int(ends.max())
        input_ids = np.array(list(chain.from_iterable(chunk.token_ids for chunk in chunks)), np.int64)
        owners, places, offsets = np.repeat(slots, lengths), positions // self._page_size, positions % self._page_size
        in_pages = self._tables[:, owners, places].astype(np.int64, order="C") * self._page_size + offsets
        wanted = np.array([chunk.num_rows for chunk in chunks])
        # The last rows of each chunk, as many as are wanted: counted down from its end.
        before_end = np.repeat(np.cumsum(wanted), wanted) - np.arange(wanted.sum())
        reads, writes = _states(chunks)
        if self._rope_rows:
            rows = [self._rope_rows[chunk.request.spec.rope_factor] for chunk in chunks]
            positions |= np.repeat(np.array(rows, np.int64), sizes)
        return HostBatch(
            input_ids=input_ids,
            positions=positions,
            slots=in_pages[0],
            seq_slots=slots,
            cu_seqlens_q=cu_seqlens_q,
            context_lens=ends,
            logit_rows=np.repeat(np.cumsum(sizes), wanted).astype(np.int64) - before_end,
            table_changes=self._take_changes(),
            num_decodes=_decodes(chunks),
            max_seqlen_q=_longest(chunks),
            max_context_len=longest,
            num_pages=-(-longest // self._page_size),
            groups=() if plan.is_dense else tuple(_groups(plan, cu_seqlens_q, ends, self._tiling)),
            other_slots=in_pages[1:] if len(in_pages) > 1 else None,
            state_reads=reads,
            state_writes=writes,
        )

    def _update_row(self, request: Request) -> None:
        # A request that comes back after a preemption may get its old slot, but it has another list of pages.
        slot, hold = request.seq_slot, request.hold
        pages = hold.pages
        if self._pages[slot] is not pages:
            self._pages[slot] = pages
            self._filled[slot] = self._settled[slot] = 0
            self._first[slot] = [0] * len(self._tables)
        filled = self._filled[slot]
        if filled < len(pages):
            for group, table in enumerate(hold.tables):
                new = self._tables[group, slot, filled : len(table)]
                new[:] = table[filled:]
                new *= self._strides[group]
                if hold.first[group] > filled:
                    new[: hold.first[group] - filled] = self._dropped[group]
                self._note_change(group, slot, filled, len(table))
            self._filled[slot] = len(pages)
        if hold.settled > self._settled[slot]:
            self._settled[slot] = hold.settled
            for group, first in enumerate(hold.first):
                before = self._first[slot][group]
                self._tables[group, slot, before:first] = self._dropped[group]
                self._note_change(group, slot, before, first)
            self._first[slot] = list(hold.first)

    def _note_change(self, group: int, slot: int, start: int, end: int) -> None:
        _, max_num_seqs, max_pages = self._tables.shape
        if start < end:
            self._changed.append(((group * max_num_seqs + slot) * max_pages + start, end - start))

    def _take_changes(self) -> Int64:
        """As `HostBatch.table_changes`, of all changes since the last call."""
        if not self._changed:
            return np.zeros((2, 0), np.int64)
        starts, counts = np.array(self._changed, np.int64).T
        self._changed.clear()
        before = np.cumsum(counts) - counts
        places = np.arange(counts.sum()) + np.repeat(starts - before, counts)
        return np.stack([places, self._tables.reshape(-1)[places].astype(np.int64)])


def _states(chunks: Sequence[Chunk]) -> tuple[Int64 | None, Int64 | None]:
    """The slots that the chunks' states are read from, and those that they are left in; None without states.

    Each chunk is one sequence: tokens that are computed as sequences of their own would have to wait for each other.
    """
    if chunks[0].state is None:
        return None, None
    slots = [chunk.state for chunk in chunks if chunk.state is not None]
    assert all(chunk.num_sequences == 1 for chunk in chunks), "a state is read by one sequence of a chunk"
    reads, writes = np.array(slots, np.int64).reshape(len(chunks), 2).T
    return np.ascontiguousarray(reads), np.ascontiguousarray(writes)


def _decodes(chunks: Sequence[Chunk]) -> int:
    """The sequences of those that are computed as decodes."""
    return sum(chunk.num_sequences for chunk in chunks if chunk.as_decodes)


def _longest(chunks: Sequence[Chunk]) -> int:
    """A bound of the tokens of a sequence, above 1 unless all are decodes: that is how kernels tell."""
    return max(1 if chunk.as_decodes else max(2, chunk.length) for chunk in chunks)


def _groups(plan: StepPlan, cu_seqlens_q: Int32, ends: Int32, tiling: Tiling | None) -> Iterator[HostGroup]:
    first = 0
    for policy, chunks in plan.groups:
        counts = [chunk.num_sequences for chunk in chunks]
        last = first + sum(counts)
        starts = cu_seqlens_q[first : last + 1]
        yield HostGroup(
            policy=policy,
            sequences=slice(first, last),
            tokens=slice(int(starts[0]), int(starts[-1])),
            cu_seqlens_q=starts - starts[0],
            num_decodes=_decodes(chunks),
            max_seqlen_q=_longest(chunks),
            max_context_len=int(ends[first:last].max()),
            prompt_lens=np.repeat(np.array([chunk.request.prompt_tokens for chunk in chunks], np.int32), counts),
            parts=_parts(policy, chunks, tiling),
        )
        first = last


def _parts(policy: StepPolicy, chunks: Sequence[Chunk], tiling: Tiling | None) -> tuple[tuple[int, TilePart], ...]:
    """As `HostGroup.parts`: each chunk of a prompt is one sequence."""
    if not isinstance(policy, Dynamic) or not policy.chooses_tiles or tiling is None:
        return ()
    return tuple(
        (index, part)
        for index, chunk in enumerate(chunks)
        for part in chunk.request.measured.tiles.parts(
            chunk.start, chunk.end, chunk.request.prompt_tokens, policy.dense_below, tiling
        )
    )
