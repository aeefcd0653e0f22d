"""The tensors behind recurrent states: slots of a fixed number of bytes, one for each state that is kept.

A layer with a state has two tensors: the last inputs of its short convolution, in the model's dtype, and the recurrent
state itself, in fp32, which is empty where there is the convolution alone. A *slot* is a row of both in all such
layers. Who owns which slot is not known here: the engine deals in slots' numbers, and a step says for each of its
sequences which slot it starts from and which it leaves its state in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from longreach_kernels import PagedBatch
from longreach_kernels.delta import StateBatch
from torch import Tensor
from transformers import PretrainedConfig

from longreach_patches.families import (
    ConvolutionParts,
    DeltaParts,
    SsmParts,
    family_of,
    shares_states,
    state_layers,
)
from longreach_patches.layout import SINGLE, RankLayout

NO_SLOT = -1  # to start from zeros, or to leave a state nowhere


@dataclass(frozen=True)
class StateShape:
    """The size of one sequence's states across all layers that have one, of one rank.

    Attributes:
        num_layers: layers with a state.
        channels: those that the short convolution goes over.
        taps: how many inputs of each channel the convolution keeps, one less than its width.
        heads, key_dim, value_dim: matrices of a recurrent state, and their rows and columns: channels of keys or of B,
            and of values or of a head of Mamba-2. 0 where a layer keeps the convolution's inputs alone.
        dtype: of the convolution's inputs; the recurrent state is in fp32.
    """

    num_layers: int
    channels: int
    taps: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: PretrainedConfig, dtype: torch.dtype, layout: RankLayout = SINGLE) -> StateShape | None:
        """Read the shape from a model's config; None for a model whose layers all attend. Each rank has the states of
        its heads, or all of them (`shares_states`).

        Raises:
            UnsupportedModelError: the family is not in the table.
        """
        layers = state_layers(config)
        if not layers:
            return None
        parts, count = family_of(config).mixer, len(layers)
        ranks = layout.size if shares_states(config, layout.size) else 1
        if isinstance(parts, ConvolutionParts):
            return cls(count, config.hidden_size // ranks, getattr(config, parts.width) - 1, 0, 0, 0, dtype)
        if isinstance(parts, SsmParts):
            names = (parts.heads, parts.head_dim, parts.groups, parts.state_size, parts.width)
            heads, dim, groups, size, width = (cast("int", getattr(config, name)) for name in names)
            channels = (heads * dim + 2 * groups * size) // ranks
            return cls(count, channels, width - 1, heads // ranks, size, dim, dtype)
        assert isinstance(parts, DeltaParts), config.model_type
        names = ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim", "conv_kernel_dim")
        key_heads, key_dim, heads, value_dim, width = (cast("int", getattr(config, f"linear_{name}")) for name in names)
        channels = (2 * key_heads * key_dim + heads * value_dim) // ranks
        return cls(count, channels, width - 1, heads // ranks, key_dim, value_dim, dtype)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one state takes in all layers together."""
        convolution = self.channels * self.taps * self.dtype.itemsize
        recurrent = self.heads * self.key_dim * self.value_dim * torch.float32.itemsize
        return self.num_layers * (convolution + recurrent)


class StateStore:
    """`num_slots` slots, allocated once.

    Attributes:
        convolutions: of each layer with a state, (num_slots, channels, taps).
        recurrent: likewise, (num_slots, heads, key_dim, value_dim) fp32.
    """

    def __init__(self, shape: StateShape, num_slots: int, device: torch.device) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {num_slots}")
        self.shape = shape
        self.num_slots = num_slots
        size = (shape.num_layers, num_slots, shape.channels, shape.taps)
        self.convolutions: tuple[Tensor, ...] = torch.zeros(size, dtype=shape.dtype, device=device).unbind(0)
        size = (shape.num_layers, num_slots, shape.heads, shape.key_dim, shape.value_dim)
        self.recurrent: tuple[Tensor, ...] = torch.zeros(size, dtype=torch.float32, device=device).unbind(0)

    @property
    def device(self) -> torch.device:
        """Where the states are."""
        return self.convolutions[0].device

    def parts(self, slot: int) -> list[Tensor]:
        """The memory of a slot, `shape.bytes_per_slot` in all: tensors (n,) uint8 in one order, which write through."""
        return [tensor[slot].view(-1).view(torch.uint8) for tensor in (*self.convolutions, *self.recurrent)]


@dataclass(frozen=True)
class StateStep:
    """The states of a step's sequences: where states are kept, and which slots the sequences read and write.

    No slot is written by two sequences, or read by another one than writes it.
    """

    store: StateStore
    batch: StateBatch

    @classmethod
    def nowhere(cls, store: StateStore, batch: PagedBatch) -> StateStep:
        """Sequences that start from nothing and leave nothing, for a step whose results alone matter."""
        none = torch.full((batch.size,), NO_SLOT, dtype=torch.int64, device=store.device)
        return cls(store, StateBatch(batch.cu_seqlens_q, none, none, batch.max_seqlen_q, batch.num_decodes))
