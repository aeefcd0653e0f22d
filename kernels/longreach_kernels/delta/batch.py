"""The sequences of a step, and the slots of the states that they start from and leave behind."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class HostRange(NamedTuple):
    """The rows of one sequence, and its slots."""

    start: int
    end: int
    read: int
    write: int


@dataclass(frozen=True, eq=False)
class StateBatch:
    """Sequences of one step. Tensors are contiguous, on the device of the inputs, and read there when a kernel runs.

    A sequence starts from the state of one slot and leaves its last state in another, or in the same. A slot that a
    sequence writes is read and written by no other sequence of the step. A sequence without tokens copies its state.
    Rows beyond the last sequence are not computed, and what a result has there is not defined.

    Attributes:
        cu_seqlens_q: (B + 1,) int32, where each sequence's rows start; the last entry is where they end.
        read: (B,) int64, the slot of the state before the step; -1 for zeros.
        write: (B,) int64, the slot of the state after it; -1 for nowhere.
        max_seqlen_q: bound of the rows of a sequence.
        num_decodes: leading sequences of exactly one row, whose rows are the first ones. With ``max_seqlen_q == 1``
            every sequence is one.

    Raises:
        ValueError: a tensor has the wrong dtype or shape, or a bound is impossible.
    """

    cu_seqlens_q: Tensor
    read: Tensor
    write: Tensor
    max_seqlen_q: int
    num_decodes: int = 0

    def __post_init__(self) -> None:
        for name, dtype in (("cu_seqlens_q", torch.int32), ("read", torch.int64), ("write", torch.int64)):
            tensor = getattr(self, name)
            if tensor.dtype != dtype or tensor.dim() != 1 or not tensor.is_contiguous():
                raise ValueError(
                    f"{name}: needs a contiguous {dtype} tensor of one dimension, "
                    f"got {tensor.dtype} of shape {tuple(tensor.shape)}"
                )
        size = self.size
        if self.cu_seqlens_q.shape[0] != size + 1 or self.write.shape[0] != size:
            raise ValueError(
                f"read: {size} slots need {size} of write and {size + 1} entries of cu_seqlens_q, "
                f"got {self.write.shape[0]} and {self.cu_seqlens_q.shape[0]}"
            )
        if self.max_seqlen_q < 1:
            raise ValueError(f"max_seqlen_q: must be at least 1, got {self.max_seqlen_q}")
        if not 0 <= self.num_decodes <= size:
            raise ValueError(f"num_decodes: must lie between 0 and the {size} sequences, got {self.num_decodes}")

    @property
    def size(self) -> int:
        """Number of sequences, padding included."""
        return self.read.shape[0]

    @property
    def decodes(self) -> int:
        """Number of leading sequences of one row."""
        return self.size if self.max_seqlen_q == 1 else self.num_decodes

    @cached_property
    def host_ranges(self) -> tuple[HostRange, ...]:
        """The sequences as host integers (copies from the device); made once a batch, shared by all layers."""
        starts = self.cu_seqlens_q.tolist()
        return tuple(map(HostRange, starts, starts[1:], self.read.tolist(), self.write.tolist()))
