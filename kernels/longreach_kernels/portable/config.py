"""Tile sizes, by head dim, dtype and architecture: fixed, so that results and compile times never depend on a tuner."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from longreach_kernels.backends import interpreting


class Config(NamedTuple):
    """Launch configuration of a kernel: tile sizes, warps, and stages of the software pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, int]:
        """The options that Triton's launcher takes."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a kernel. Untyped on purpose: a kernel's annotations describe the device side."""
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


@lru_cache(maxsize=64)
def forward_config(head_dim: int, dtype: torch.dtype, arch: int, page_size: int | None) -> Config:
    """Configuration of the forward kernel; ``page_size`` is None where keys are contiguous.

    Measured on an H200 at D=128, causal, 16K: 128x128 with 8 warps and 3 stages 498 TFLOP/s, 128x64 480 to 488,
    2 stages 437. Three stages of 128x128 fill the shared memory of sm_90 (224 KB), which leaves no room for the page
    ids of a gather: pages smaller than a tile take 128x64.
    """
    if arch == 0:
        return Config(32, 32, 4, 1)
    if dtype == torch.float32:
        return Config(64, 32, 4, 2) if head_dim <= 128 else Config(32, 32, 4, 1)
    if arch >= 90 and arch < 120:
        if head_dim > 128:
            return Config(128, 64, 8, 2)
        gather = page_size is not None and page_size % 128 != 0
        return Config(128, 64 if gather else 128, 8, 3)
    # sm_80 has 163 KB of shared memory a block; sm_86, sm_89 and sm_120 have 99 KB.
    if head_dim <= 64:
        return Config(128, 64, 4, 3)
    if head_dim <= 128:
        return Config(128, 64, 8, 3 if arch == 80 else 2)
    return Config(64, 64, 4, 2) if arch == 80 else Config(64, 32, 4, 2)


# Keys of a split of the decode kernel. Splits lie at multiples of it, whatever the batch and the grid, so that the
# result for a sequence is the same bits alone and in any batch.
SPLIT_KEYS = 512


@lru_cache(maxsize=64)
def decode_config(head_dim: int, dtype: torch.dtype, arch: int) -> Config:
    """Configuration of the split-KV decode kernel; ``block_m`` is the least number of query rows of a product."""
    if arch == 0:
        return Config(16, 32, 4, 1)
    if dtype == torch.float32:
        return Config(16, 32, 4, 2)
    if head_dim > 128:
        return Config(16, 32, 4, 3)
    return Config(16, 64, 4, 3)
