"""How the programs of the Hopper kernels are made, by head dim and kind of call: fixed, and tested to compile well."""

from __future__ import annotations

from typing import NamedTuple

from longreach_kernels.backends.hopper.tma import padded
from longreach_kernels.masks.mask import Mask

FORWARD_HEAD_DIMS = (64, 96, 128, 192, 256, 512)
FP8_FORWARD_HEAD_DIMS = (64, 96, 128)  # at 256 the sums of a tile and those of all tiles do not fit the registers
DECODE_HEAD_DIMS = (64, 128, 256)
BACKWARD_HEAD_DIMS = (64, 128)


class ForwardConfig(NamedTuple):
    """A program of the forward kernel.

    Attributes:
        block_n: keys in a tile.
        consumers: warpgroups of 64 queries.
        registers, producer_registers: of a thread of a consumer and of the producer.
        own_out: whether results have shared memory of their own, or that of the queries.
        ring: tiles of K and of V in shared memory; three of 16 bits at D=128 leave no room for results of their own.
        value_parts: parts of the values' channels, each of which is an item of its own. A thread holds the sums of at
            most 256 channels.
    """

    block_n: int
    consumers: int
    registers: int
    producer_registers: int
    own_out: bool = True
    ring: int = 2
    value_parts: int = 1

    @property
    def block_m(self) -> int:
        """Queries in a tile."""
        return 64 * self.consumers


def forward_config(head_dim: int, mask: Mask | None, fp8: bool = False) -> ForwardConfig:
    """The configuration for a head dim, a kind of mask (None: lists that the caller brings) and of keys; each compiles
    for sm_90 without spills where it matters."""
    width = padded(head_dim)
    if fp8:
        return ForwardConfig(128, 2, 240, 24, ring=4)
    if width == 512:
        return ForwardConfig(32, 2, 240, 24, False, value_parts=2)
    if width == 256:
        return ForwardConfig(64, 2, 240, 24, False)
    if width == 64 and mask is not None and mask.band is not None and mask.band.window is None:
        return ForwardConfig(128, 3, 160, 32)
    return ForwardConfig(128, 2, 240, 24)


class DecodeConfig(NamedTuple):
    """Keys in a tile, tiles in the ring, consumer warps, and programs on a multiprocessor."""

    block_n: int
    ring: int
    warps: int
    programs: int


def decode_config(head_dim: int, fp8: bool) -> DecodeConfig:
    """The configuration for a head dim and a kind of pages; the loops over tiles compile for sm_90 without spills.

    At head dim 128 two programs share a multiprocessor: one's scores and merge run while the other's tiles arrive. That
    is worth 1 percent where all sequences are long and even, and 3 to 15 beside the products of a step:
    docs/dev/kernel-log.md#two-decode-programs-on-a-multiprocessor.
    """
    if head_dim == 256:
        return DecodeConfig(64, 6 if fp8 else 3, 8, 1)
    if head_dim == 64:
        return DecodeConfig(128, 6, 4, 2 if fp8 else 1)
    return DecodeConfig(128 if fp8 else 64, 3, 4, 2)


class SplitRule(NamedTuple):
    """How a decode's keys are split: keys of the smallest split, and how many splits a sequence and KV head has before
    they grow. Beyond `EARLY_SPLITS` they grow, too, up to twice the smallest."""

    least_keys: int
    max_splits: int


EARLY_SPLITS = 16
_MOST_SPLITS = 44
_PROCESSORS = 132


def split_rule(kv_heads: int) -> SplitRule:
    """One long sequence has an item for each multiprocessor of an H100 or H200, since few heads are few items; but no
    more splits of a head than that, for a program merges all of them. Each split costs about as much as 512 keys.

    It depends on neither the batch nor the GPU, so that a sequence's bits do not. What was measured:
    docs/dev/kernel-log.md#splits-by-the-number-of-kv-heads.
    """
    return SplitRule(1024 if kv_heads >= 8 else 512, max(EARLY_SPLITS, min(_PROCESSORS // kv_heads, _MOST_SPLITS)))


class BackwardConfig(NamedTuple):
    """Queries in a tile, how many tiles and how many parts of dQ shared memory holds, and the registers of a consumer's
    threads and of the other warps'."""

    block_m: int
    ring: int
    parts: int
    registers: int
    worker_registers: int


def backward_config(head_dim: int) -> BackwardConfig:
    """The configuration for a head dim.

    What the compiler spills are addresses and bounds that stay the same in the loop, under 150 bytes of stack; the
    accumulators stay in registers.
    """
    return BackwardConfig(64 if head_dim == 128 else 128, 2, 2, 240, 24)
