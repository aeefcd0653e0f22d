"""Products of few rows with a weight of any format, for steps in which every sequence computes one token.

Such a product reads each weight once and computes next to nothing, so what counts is that memory is never idle. The
activation behind it and the sum with the residual stream are part of the same kernel, and sums are not split. The
activations stay in 16 bits whatever the format.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longreach_kernels.backends.triton.config import capability, cdiv, launch
from longreach_kernels.backends.triton.overlap import follow, let_follow, overlap_options
from longreach_kernels.linear import unpack
from longreach_kernels.linear.activation import After
from longreach_kernels.linear.activation_kernel import activate
from longreach_kernels.linear.formats import Fp8Channels, Int4Groups, Mxfp4, Weight
from longreach_kernels.linear.rows_config import MAX_ROWS, RowsConfig, configure
from longreach_kernels.linear.tiles import rows_product

# Rows up to which the kernel is as quick as the matrix library: with the library's products of FP8, where it has them,
# with weights of 16 bits, and with packed weights that are dequantised for it first.
FP8_ROWS, HALF_ROWS, PACKED_ROWS = 16, 32, 64
_ROWS = (8, 16, 32)  # of a tile; few, so that few forms are compiled
_INVARIANT_ROWS = 16


class KernelWeight(NamedTuple):
    """A weight as the kernels take it.

    Attributes:
        numbers: 16-bit floats, or words (int32) of four bytes of fp8 or eight four-bit numbers.
        scales: as in the formats; None where there are none. `stride_s` of them lie between outputs, or blocks of them.
        zeros: as in the formats; None where there are none.
        layout: FORMAT of `unpack`.
        group: inputs of a scale; 0 if one is for all inputs of an output.
        block_rows: outputs of a scale.
    """

    numbers: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    stride_s: int
    layout: int
    group: int = 0
    block_rows: int = 1


def kernel_weight(weight: Weight) -> KernelWeight | None:
    """A weight of any format, with or without experts, as views of its tensors; None where the kernels have no form of
    it: inputs that do not fill words, or groups that are no power of two."""
    if isinstance(weight, Tensor):
        return KernelWeight(weight, None, None, 0, unpack.HALF.value)
    if isinstance(weight, Mxfp4):
        words = _words(weight.packed)
        if words is None:
            return None
        return KernelWeight(words, weight.scales, None, weight.scales.stride(-2), unpack.MXFP4.value, weight.group)
    if isinstance(weight, Int4Groups):
        group = 0 if weight.scales.shape[-1] == 1 else weight.group
        if group & (group - 1) or (weight.zeros is not None and weight.zeros.stride() != weight.scales.stride()):
            return None
        layout = unpack.INT4 if weight.zeros is None else unpack.INT4_ZEROS
        return KernelWeight(weight.packed, weight.scales, weight.zeros, weight.scales.stride(-2), layout.value, group)
    words = _words(weight.values)
    if words is None:
        return None
    if isinstance(weight, Fp8Channels):
        return KernelWeight(words, weight.scales, None, weight.scales.stride(-1), unpack.FP8.value)
    if weight.block[1] & (weight.block[1] - 1):
        return None
    return KernelWeight(words, weight.scales, None, weight.scales.stride(-2), unpack.FP8.value, *reversed(weight.block))


def _words(numbers: Tensor) -> Tensor | None:
    """Rows of bytes as rows of words; None where they do not begin or end with one."""
    whole = numbers.stride(-1) == 1 and numbers.storage_offset() % 4 == 0 and numbers.shape[-1] % 4 == 0
    if not whole or any(stride % 4 for stride in numbers.stride()[:-1]):
        return None
    return numbers.view(torch.int32)


def divisor(inputs: int) -> int:
    """The greatest power of two, up to 512, that a number of inputs is a multiple of."""
    return min(inputs & -inputs, 512)


@triton.jit(do_not_specialize=["num_rows"])
def _rows_kernel(
    X,
    W,
    Scales,
    Zeros,
    Bias,
    Out,
    num_rows,
    N,
    K,
    stride_w,
    stride_s,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    DIVISOR: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (tiles of rows, blocks of outputs): Out (rows, N) of X (rows, K) and W (N, K), or if GATED W (2 N, K), gates
    first: then half of a tile are gates, and half are what they gate. Programs that follow one another share
    weights."""
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    first = tl.program_id(1) * OUTPUTS
    offs_n = first + tl.arange(0, OUTPUTS)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    has_row = rows < num_rows
    inside = offs_n < N
    tile = tl.arange(0, BLOCK_N)
    in_tile = first + tile % OUTPUTS
    rows_w = in_tile + tile // OUTPUTS * N if GATED else in_tile
    follow(OVERLAP)
    acc = rows_product(
        X,
        (W, Scales, Zeros, stride_w, stride_s),
        (rows.to(tl.int64) * K, has_row),
        (rows_w, in_tile < N),
        K,
        (FORMAT, GROUP, BLOCK_ROWS),
        (ROWS, BLOCK_N, BLOCK_K, SLICES),
        PRECISION,
        DIVISOR,
    )
    let_follow(OVERLAP)
    if GATED:
        acc, ups = tl.split(tl.reshape(acc, (2, OUTPUTS, ROWS)).permute(1, 2, 0))
        if BIAS:
            acc += tl.load(Bias + offs_n, mask=inside, other=0.0).to(tl.float32)[:, None]
            ups += tl.load(Bias + N + offs_n, mask=inside, other=0.0).to(tl.float32)[:, None]
        acc = activate(acc, ACTIVATION) * ups
    elif BIAS:
        acc += tl.load(Bias + offs_n, mask=inside, other=0.0).to(tl.float32)[:, None]
    places = Out + rows.to(tl.int64)[None, :] * N + offs_n[:, None]
    valid = inside[:, None] & has_row[None, :]
    if SCALE != 1.0:
        acc *= SCALE
    if ADD:
        acc += tl.load(places, mask=valid, other=0.0).to(tl.float32)
    tl.store(places, acc.to(Out.dtype.element_ty), mask=valid)


def rows_linear(
    x: Tensor,
    packed: KernelWeight,
    out: Tensor,
    after: After,
    *,
    invariant: bool = False,
    config: RowsConfig | None = None,
) -> Tensor:
    """`linear` by the kernel, written to `out`, which is `add_to` if there is one.

    Any number of rows is computed, in tiles of at most 32 that each read the weight. If `invariant`, all tiles have 16
    rows, and the bits of a row depend on nothing but the row. `config` None: as measured.
    """
    rows, inputs = x.shape
    outputs = out.shape[1]
    weight_rows = 2 * outputs if after.gated else outputs
    least = _INVARIANT_ROWS if invariant or packed.layout == unpack.HALF.value else 1
    tile = next((size for size in _ROWS if size >= max(rows, least)), MAX_ROWS)
    if invariant:
        tile = _INVARIANT_ROWS
    if config is None:
        config = configure(weight_rows, packed.layout, x.dtype, tile, capability(x.device), gated=after.gated)
    launch(
        _rows_kernel,
        (cdiv(rows, tile), cdiv(weight_rows, config.block_n)),
        x,
        packed.numbers,
        packed.scales,
        packed.zeros,
        after.bias,
        out,
        rows,
        outputs,
        inputs,
        packed.numbers.stride(-2),
        packed.stride_s,
        FORMAT=packed.layout,
        GROUP=packed.group,
        BLOCK_ROWS=packed.block_rows,
        ROWS=tile,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SLICES=config.slices(packed.layout),
        GATED=after.gated,
        ACTIVATION=after.activation,
        BIAS=after.bias is not None,
        ADD=after.add_to is not None,
        SCALE=after.scale,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        DIVISOR=divisor(inputs),
        **overlap_options(x.device),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out
