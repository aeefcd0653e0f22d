"""Tile sizes, by head dim, dtype and architecture: fixed, so that results and compile times never depend on a tuner."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from longreach_kernels.backends.resolve import interpreting
from longreach_kernels.compilation import launches_compile_only
from longreach_kernels.masks.block_sparse import BlockSparse
from longreach_kernels.masks.mask import And, Mask, Or


class TileConfig(NamedTuple):
    """Launch configuration of a kernel: tile sizes, warps, and stages of the software pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, int]:
        """The options that Triton's launcher takes."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a kernel, or under `compile_only` compile it. Every launch comes through here.

    Untyped on purpose: a kernel's annotations describe the device side.
    """
    if launches_compile_only():
        kernel.warmup(*args, grid=grid, **options)
    else:
        kernel[grid](*args, **options)


def cdiv(a: int, b: int) -> int:
    """Quotient of two positive integers, rounded up."""
    return -(-a // b)


@lru_cache(maxsize=8)
def capability(device: torch.device) -> int:
    """Compute capability as one number (90 for 9.0); 0 in the interpreter."""
    if device.type != "cuda":
        assert interpreting(), "a portable kernel outside a GPU runs in the interpreter"
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@lru_cache(maxsize=8)
def processors(device: torch.device) -> int:
    """Streaming multiprocessors; in the interpreter, which has one, so many that persistent programs have turns."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@lru_cache(maxsize=64)
def forward_config(head_dim: int, dtype: torch.dtype, arch: int, page_size: int | None) -> TileConfig:
    """Configuration of the forward kernel; ``page_size`` is None where keys are contiguous.

    Measured on an H200 at D=128, causal, 16K: 128x128 with 8 warps and 3 stages 498 TFLOP/s, 128x64 480 to 488,
    2 stages 437. Three buffers of 128x128 fill the shared memory of sm_90 (224 KB), which leaves no room for the page
    ids of a gather: pages smaller than a tile take 128x64.
    """
    if arch == 0:
        return TileConfig(32, 32, 4, 1)
    if dtype == torch.float32:
        # Exact fp32 products run on the ordinary units, whose operands sit in registers: larger tiles spill.
        return TileConfig(32, 32, 8, 1) if head_dim <= 128 else TileConfig(16, 16, 8, 1)
    if head_dim > 256:
        # A thread holds 128 numbers of the sums of 64 queries. Before sm_90, queries are in registers as well, and 99
        # KB of shared memory hold two tiles of 16 keys and values beside them.
        return TileConfig(64, 32, 8, 2) if arch >= 90 and arch < 120 else TileConfig(64, 16, 8, 2)
    if arch >= 90 and arch < 120:
        if head_dim > 128:
            return TileConfig(128, 64, 8, 2)
        if page_size is None:
            return TileConfig(128, 128, 8, 3)
        # The load of a page id takes two stages of the pipeline from the load that depends on it.
        return TileConfig(128, 64 if page_size % 128 else 128, 8, 5)
    # sm_80 has 163 KB of shared memory a block; sm_86, sm_89 and sm_120 have 99 KB.
    if head_dim <= 64:
        return TileConfig(128, 64, 4, 3)
    if head_dim <= 128:
        return TileConfig(128, 64, 8, 3 if arch == 80 else 2)
    return TileConfig(64, 64, 4, 2) if arch == 80 else TileConfig(64, 32, 4, 2)


def smallest_block(mask: Mask) -> int:
    """The least block size among the layouts of a mask; 128 if it has none."""
    if isinstance(mask, BlockSparse):
        return mask.block
    if isinstance(mask, (And, Or)):
        return min(smallest_block(mask.left), smallest_block(mask.right))
    return 128


def sparse_config(dense: TileConfig, mask: Mask | None = None) -> TileConfig:
    """Configuration of the forward kernel with tile lists: tiles no larger than 64 where the mask's blocks are smaller
    than 128, so that fewer of them are partial. No mask: lists that the caller brings.

    A tile has 32 keys or more: the bits of a partial tile are words of 32 keys."""
    if dense.block_n < 32 and dense.num_stages > 1:  # of head dims above 256, where 64 queries leave room for 16 keys
        return TileConfig(32, 32, dense.num_warps, 1)
    dense = dense._replace(block_n=max(32, dense.block_n))
    small = dense.block_m <= 64 and dense.block_n <= 64
    if small or dense.num_stages == 1 or ((mask is None or smallest_block(mask) == 128) and dense.block_m >= 128):
        return dense
    return dense._replace(block_m=min(64, dense.block_m), block_n=min(64, dense.block_n), num_warps=4)


# Bytes that stay in the L2 cache (50 MB on sm_90) beside what else goes through it.
_CACHED_BYTES = 32 << 20


def cached_heads(bytes_of_a_head: int) -> int:
    """How many heads, of which so many bytes are read again and again, the L2 cache holds; at least one."""
    return max(1, _CACHED_BYTES // max(1, bytes_of_a_head))


def section_heads(heads: int, kv_heads: int, bytes_of_keys: int) -> int:
    """Query heads that go through all query tiles together: those of as many KV heads as the cache holds the keys and
    values of, at least one; ``bytes_of_keys`` are those of one."""
    fitting = cached_heads(2 * bytes_of_keys)
    return heads // kv_heads * max(n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and n <= fitting)


@lru_cache(maxsize=64)
def backward_configs(head_dim: int, dtype: torch.dtype, arch: int) -> tuple[TileConfig, TileConfig]:
    """Configurations of the dQ kernel, which holds a query tile, and of the dK/dV kernel, which holds a key tile."""
    if arch == 0:
        return TileConfig(32, 32, 4, 1), TileConfig(32, 32, 4, 1)
    if dtype == torch.float32:
        tile = 32 if head_dim <= 64 else 16
        return TileConfig(tile, 32, 8, 1), TileConfig(tile, 32, 8, 1)
    if arch >= 90 and arch < 120:
        if head_dim <= 64:
            return TileConfig(128, 128, 8, 2), TileConfig(64, 128, 8, 3)
        if head_dim <= 128:
            return TileConfig(128, 64, 8, 3), TileConfig(
                64, 128, 8, 3
            )  # with 2 stages the compiler spills ten times more
        return TileConfig(64, 64, 8, 2), TileConfig(32, 64, 8, 2)
    if head_dim <= 64:
        return TileConfig(64, 64, 4, 2), TileConfig(64, 64, 4, 2)
    if head_dim <= 128:
        return TileConfig(64, 64, 8, 1 if arch != 80 else 2), TileConfig(32, 64, 8, 1 if arch != 80 else 2)
    return TileConfig(32, 32, 8, 1), TileConfig(32, 32, 8, 1)


def sparse_backward_config(dense: TileConfig, mask: Mask) -> TileConfig:
    """Configuration of a backward kernel with tile lists: no tile wider than the blocks, down to 64."""
    limit = 128 if smallest_block(mask) == 128 else 64
    return dense._replace(block_m=min(dense.block_m, limit), block_n=max(32, min(dense.block_n, limit)))


# Keys of a split of the decode kernel. Splits lie at multiples of it, whatever the batch and the grid, so that the
# result for a sequence is the same bits alone and in any batch.
SPLIT_KEYS = 512


@lru_cache(maxsize=64)
def decode_config(head_dim: int, dtype: torch.dtype, arch: int) -> TileConfig:
    """Configuration of the split-KV decode kernel; ``block_m`` is the least number of query rows of a product."""
    if arch == 0:
        return TileConfig(16, 32, 4, 1)
    if dtype == torch.float32:
        return TileConfig(16, 32 if head_dim <= 256 else 16, 4, 2)
    if head_dim > 256:
        # Measured on an H200 at D=512, TB/s of one answer at 64K and of eight: 4 warps and 3 stages 2.6 and 3.7, 8
        # warps and 5 stages 2.1 and 3.6.
        return TileConfig(16, 32, 4, 3) if arch >= 90 and arch < 120 else TileConfig(16, 32, 8, 2)
    return TileConfig(16, 32 if head_dim > 128 else 64, 4, 5)
