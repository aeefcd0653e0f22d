"""Products with a weight matrix in which a row's result does not depend on how many rows there are, or which.

A matrix library picks its kernel, and with it the order in which a sum is made, by the number of rows: the same token
gets other bits in a crowd than alone. Here every result is one chain of sums in fp32, over the inputs in ascending
order, on the same instruction: tiles differ in size with the number of rows, and that changes nothing but the time.
Nothing is split over the inputs (split-K), for that would have to be done alike for one row and for thousands.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from longreach_kernels.backends.triton.config import capability, launch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from longreach_patches.fused.activation import Activation
from longreach_patches.fused.activation_kernel import activate
from longreach_patches.fused.invariant_tiles import Tile, choose, tiles_of

_GROUP = 8  # tiles of rows that share the weights in the L2 cache


@triton.jit
def _rows(X, first, k, num_rows, inputs, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr):
    """A tile (ROWS, BLOCK_K) of X; beyond its ends zeros."""
    if TMA:
        tile = X.load([first, k])
    else:
        rows = first + tl.arange(0, ROWS)
        columns = k + tl.arange(0, BLOCK_K)
        inside = (rows < num_rows)[:, None] & (columns < inputs)[None, :]
        tile = tl.load(X + rows.to(tl.int64)[:, None] * inputs + columns[None, :], mask=inside, other=0.0)
    return tile


@triton.jit
def _weights(
    W,
    first,
    k,
    outputs,
    inputs,
    stride,
    PARTS: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
):
    """A tile (PARTS * COUNT, BLOCK_K) of W, whose rows are PARTS times `outputs`: the same rows of each part, one part
    after the other. Beyond its ends zeros, or what nobody stores."""
    if TMA:
        tile = tl.reshape(W.load([0, first, k]), (PARTS * COUNT, BLOCK_K))
    else:
        place = tl.arange(0, PARTS * COUNT)
        rows = first + place % COUNT
        columns = k + tl.arange(0, BLOCK_K)
        inside = (rows < outputs)[:, None] & (columns < inputs)[None, :]
        rows += place // COUNT * outputs
        tile = tl.load(W + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=inside, other=0.0)
    return tile


@triton.jit
def _place(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """The row tile and the column tile of a number: groups of row tiles go through all columns together."""
    in_group = GROUP * tiles_n
    first = tile // in_group * GROUP
    size = tl.minimum(tiles_m - first, GROUP)
    within = tile % in_group
    return first + within % size, within // size


@triton.jit
def _halves(acc):
    """The left and the right half of the columns."""
    return tl.split(tl.permute(tl.reshape(acc, (acc.shape[0], 2, acc.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _finish(
    acc,
    acc_up,
    Bias,
    Out,
    first_row,
    first,
    num_rows,
    outputs,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Store sums (BLOCK_M, columns) with what belongs to the product, rounded once."""
    rows = first_row + tl.arange(0, acc.shape[0])
    columns = first + tl.arange(0, acc.shape[1])
    inside = columns < outputs
    if Bias is not None:
        acc += tl.load(Bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            acc_up += tl.load(Bias + outputs + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED:
        acc = activate(acc, ACTIVATION) * acc_up
    places = Out + rows.to(tl.int64)[:, None] * outputs + columns[None, :]
    valid = (rows < num_rows)[:, None] & inside[None, :]
    if SCALE != 1.0:
        acc *= SCALE
    if ADD:
        acc += tl.load(places, mask=valid, other=0.0).to(tl.float32)
    tl.store(places, acc.to(Out.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    X,
    W,
    Bias,
    Out,
    num_rows,
    outputs,
    inputs,
    stride_w,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    SCALE: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Any number of programs: Out (rows, outputs) of X (rows, inputs) and W (outputs, inputs), or of twice as many
    outputs, gates first, if GATED. X and W are tensor descriptors if TMA; X's and Out's rows are dense, W's are
    stride_w apart."""
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    tiles_n = tl.cdiv(outputs, BLOCK_N)
    PARTS: tl.constexpr = 2 if GATED else 1
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        tile_m, tile_n = _place(tile, tiles_m, tiles_n, GROUP)
        first_row = tile_m * BLOCK_M
        first = tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, PARTS * BLOCK_N), tl.float32)
        for step in range(tl.cdiv(inputs, BLOCK_K)):
            k = step * BLOCK_K
            x = _rows(X, first_row, k, num_rows, inputs, BLOCK_M, BLOCK_K, TMA)
            w = _weights(W, first, k, outputs, inputs, stride_w, PARTS, BLOCK_N, BLOCK_K, TMA)
            acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
        if GATED:
            gate, up = _halves(acc)
            _finish(gate, up, Bias, Out, first_row, first, num_rows, outputs, True, ACTIVATION, ADD, SCALE)
        elif BLOCK_N == 256:  # in halves: what a whole tile takes on its way out would take a stage from the pipeline
            low, high = _halves(acc)
            _finish(low, low, Bias, Out, first_row, first, num_rows, outputs, False, ACTIVATION, ADD, SCALE)
            _finish(
                high, high, Bias, Out, first_row, first + BLOCK_N // 2, num_rows, outputs, False, ACTIVATION, ADD, SCALE
            )
        else:
            _finish(acc, acc, Bias, Out, first_row, first, num_rows, outputs, False, ACTIVATION, ADD, SCALE)


def invariant_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    activation: Activation = "silu",
    add_to: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """x W^T for x (T, K) and W (N, K), summed in fp32 and rounded once: (T, N). The bits of a row depend on that row of
    x, and on nothing else of it. All are contiguous, but W may be some columns of a wider one.

    Args:
        bias: (N,), added to the product.
        gated: the first half of the outputs are gates: activation(gate) * up of them, (T, N / 2).
        activation: that of gates.
        scale: what the product, with its bias, is multiplied by.
        add_to: (T, N), to which the product is added in place and which is returned.
    """
    rows = x.shape[0]
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = x.new_empty(rows, outputs) if add_to is None else add_to
    if rows == 0:
        return out
    processors = _processors(x.device)
    tile = choose(rows, outputs, x.dtype, capability(x.device), processors, gated)
    _launch(tile, x, weight, bias, out, outputs, gated, add_to is not None, processors, activation, scale)
    return out


def _launch(
    tile: Tile,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    outputs: int,
    gated: bool,
    add: bool,
    processors: int,
    activation: Activation = "silu",
    scale: float = 1.0,
) -> None:
    rows, inputs = x.shape
    a: Any = x
    w: Any = weight
    tma = capability(x.device) >= 90 and _described(weight) and inputs * x.itemsize % 16 == 0
    if tma:
        if x.data_ptr() % 16:
            x = x.clone()
        a = TensorDescriptor(x, [rows, inputs], [inputs, 1], [tile.block_m, tile.block_k])
        parts, stride = weight.shape[0] // outputs, weight.stride(0)
        shape, block = [parts, outputs, inputs], [parts, tile.block_n, tile.block_k]
        w = TensorDescriptor(weight, shape, [outputs * stride, stride, 1], block)
    launch(
        product_kernel,
        (min(tiles_of(tile, rows, outputs), processors * tile.programs),),
        a,
        w,
        bias,
        out,
        rows,
        outputs,
        inputs,
        weight.stride(0),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP=_GROUP,
        GATED=gated,
        ACTIVATION=activation,
        ADD=add,
        SCALE=scale,
        TMA=tma,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _described(weight: Tensor) -> bool:
    """Whether the tensor memory accelerator can read a weight as it lies. A weight always lies alike."""
    return weight.data_ptr() % 16 == 0 and weight.stride(0) * weight.itemsize % 16 == 0 and weight.stride(1) == 1


@lru_cache(maxsize=8)
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # in the interpreter programs run one after another; with a few of them each computes several tiles
    return torch.cuda.get_device_properties(device).multi_processor_count
