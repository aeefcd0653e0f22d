"""How tensors are described to the tensor memory accelerator (TMA)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from longreach_kernels.checks import FP8

_GLUON_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, FP8: gl.float8e4nv}


def padded(head_dim: int) -> int:
    """Head dim of the kernel: the power of two from `head_dim` on. What lies between reads as zeros."""
    return max(64, 1 << (head_dim - 1).bit_length())


@lru_cache(maxsize=64)
def shared_layout(*block: int, dtype: torch.dtype) -> Any:
    """How TMA lays a block out in shared memory. Kept, for it is asked for several times a layer."""
    return gl.NVMMASharedLayout.get_default_for(list(block), _GLUON_TYPES[dtype])


class HeadRows(NamedTuple):
    """A tensor as (heads, rows, D), by the strides of the first two."""

    tensor: Tensor
    heads: int
    rows: int
    head_stride: int
    row_stride: int

    def descriptor(self, block_rows: int, parts: int = 1) -> TensorDescriptor:
        """For boxes of `block_rows` rows of one head, in so many parts of its channels."""
        head_dim = self.tensor.shape[-1]
        block = [1, block_rows, padded(head_dim) // parts]
        layout = shared_layout(*block, dtype=self.tensor.dtype)
        shape, strides = [self.heads, self.rows, head_dim], [self.head_stride, self.row_stride, 1]
        return TensorDescriptor(self.tensor, shape, strides, block, layout)


def dense_rows(x: Tensor) -> HeadRows:
    """Of x (B, H, N, D): heads are numbered through the batch."""
    batch, heads, length, _ = x.shape
    if not _aligned(x) or (batch > 1 and x.stride(0) != heads * x.stride(1)):
        x = x.contiguous()
    return HeadRows(x, batch * heads, length, x.stride(1) if heads > 1 else x.stride(0), x.stride(2))


def token_rows(x: Tensor) -> HeadRows:
    """Of x (T, H, D)."""
    if not _aligned(x):
        x = x.contiguous()
    return HeadRows(x, x.shape[1], x.shape[0], x.stride(1), x.stride(0))


def _aligned(x: Tensor) -> bool:
    """Whether the tensor memory accelerator can read x as it lies: last dimension dense, the rest on 16 bytes."""
    elements = 16 // x.itemsize
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(s % elements == 0 and s > 0 for s in x.stride()[:-1])
