"""A packed weight as 16-bit numbers, at the speed of memory, for products that a matrix library computes."""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longreach_kernels.backends.triton.config import cdiv, launch
from longreach_kernels.linear.rows_kernel import KernelWeight
from longreach_kernels.linear.tiles import load_scales, spread
from longreach_kernels.linear.unpack import FP8, MXFP4, e8m0_scales, int4_shifts, sum_factor, word_numbers

_BLOCK_N, _BLOCK_K = 8, 512


@triton.jit
def _together(numbers, FORMAT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Planes (BLOCK_N, words) as (BLOCK_N, BLOCK_K), in the order of the inputs: the dim that comes last joins
    neighbours."""
    if FORMAT == FP8:
        tile = tl.join(tl.join(numbers[0], numbers[2]), tl.join(numbers[1], numbers[3]))
    else:
        even = tl.join(tl.join(numbers[0], numbers[4]), tl.join(numbers[2], numbers[6]))
        odd = tl.join(tl.join(numbers[1], numbers[5]), tl.join(numbers[3], numbers[7]))
        tile = tl.join(even, odd)
    return tl.reshape(tile, (BLOCK_N, BLOCK_K))


@triton.jit
def _dequantize_kernel(
    W,
    Scales,
    Zeros,
    Out,
    N,
    K,
    stride_w,
    stride_s,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (blocks,), those of the same outputs one after another: Out (N, K)."""
    PER_WORD: tl.constexpr = 4 if FORMAT == FP8 else 8
    WORDS: tl.constexpr = BLOCK_K // PER_WORD
    GROUPS: tl.constexpr = BLOCK_K // GROUP if GROUP > 0 and GROUP < BLOCK_K else 1
    dtype: tl.constexpr = Out.dtype.element_ty
    across = tl.cdiv(K, BLOCK_K)
    first = tl.program_id(0) % across * BLOCK_K
    place = first // PER_WORD + tl.arange(0, WORDS)
    columns = 1 if GROUP == 0 else tl.cdiv(K, GROUP)
    rows = tl.program_id(0) // across * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < N
    valid = inside[:, None] & (place < K // PER_WORD)[None, :]
    words = tl.load(W + rows.to(tl.int64)[:, None] * stride_w + place[None, :], mask=valid, other=0)
    scales, zeros = load_scales(
        Scales,
        Zeros,
        rows // BLOCK_ROWS,
        inside,
        first + tl.zeros((1,), tl.int32),
        columns,
        stride_s,
        FORMAT,
        GROUP,
        GROUPS,
    )
    shifts = tl.reshape(spread(int4_shifts(zeros, FORMAT, dtype), WORDS), (BLOCK_N, WORDS))
    if FORMAT == MXFP4:
        ready = e8m0_scales(scales, dtype)
    else:
        ready = scales
    ready = tl.reshape(spread(ready.to(tl.float32) * sum_factor(FORMAT, dtype), BLOCK_K), (BLOCK_N, BLOCK_K))
    tile = _together(word_numbers(words, shifts, FORMAT, dtype), FORMAT, BLOCK_N, BLOCK_K)
    offs = first + tl.arange(0, BLOCK_K)
    weights = (tile.to(tl.float32) * ready).to(dtype)
    there = inside[:, None] & (offs < K)[None, :]
    tl.store(Out + rows.to(tl.int64)[:, None] * K + offs[None, :], weights, mask=there)


def dequantized(weight: KernelWeight, outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """A weight (N, K) of any format but 16 bits, rounded once to `dtype`."""
    out = torch.empty(outputs, inputs, dtype=dtype, device=weight.numbers.device)
    launch(
        _dequantize_kernel,
        # One dim, for another than the first holds 65,535 at most: outputs of many experts are more blocks than that.
        (cdiv(inputs, _BLOCK_K) * cdiv(outputs, _BLOCK_N),),
        weight.numbers,
        weight.scales,
        weight.zeros,
        out,
        outputs,
        inputs,
        weight.numbers.stride(-2),
        weight.stride_s,
        FORMAT=weight.layout,
        GROUP=weight.group,
        BLOCK_ROWS=weight.block_rows,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K,
        num_warps=4,
    )
    return out
