"""The two products of a mixture layer on a GPU, each in the form of its tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from longreach_kernels.backends.triton.config import capability, cdiv, launch, processors
from longreach_kernels.linear import Fp8Blocks, Fp8Channels, Int4Groups, Mxfp4, Weight
from longreach_kernels.linear.dequantize_kernel import dequantized
from longreach_kernels.linear.formats import FP8
from longreach_kernels.linear.rows_kernel import KernelWeight, kernel_weight
from longreach_kernels.linear.unpack import HALF
from longreach_kernels.moe.experts import Experts
from longreach_kernels.moe.few_kernel import few_kernel
from longreach_kernels.moe.fp8_blocks_kernel import fp8_blocks_kernel
from longreach_kernels.moe.fp8_kernel import fp8_kernel
from longreach_kernels.moe.many_kernel import many_kernel
from longreach_kernels.moe.packed_many_kernel import STEP, packed_many_kernel
from longreach_kernels.moe.sort_kernel import SortedPairs
from longreach_kernels.moe.tile_sizes import FewTile, ManyTile


@dataclass(frozen=True)
class Product:
    """One of the two products of a call.

    Attributes:
        x: (T, K), or (P, K) in sorted order if `by_row`; values of FP8 where products are made of these. In the
            order of planes where the tile unpacks weights.
        weight: (E, N, K), or (E, 2 N, K) if `gated`.
        out: (P, N), in sorted order, and in the order of planes if `planes`.
        x_scales: of values of FP8, (T, groups) with neighbouring tokens, or (P, groups) if `scales_by_row`.
        is_fp8: whether a product of few rows is made in FP8, of rows that are quantised on the way.
    """

    x: Tensor
    weight: Weight
    bias: Tensor | None
    out: Tensor
    by_row: bool
    gated: bool
    x_scales: Tensor | None = None
    scales_by_row: bool = False
    planes: bool = False
    is_fp8: bool = False


def multiply(
    product: Product, tile: FewTile | ManyTile, order: SortedPairs | None, layer: Experts, experts: Tensor
) -> None:
    """Compute one product of tokens with their experts (T, k)."""
    if isinstance(tile, FewTile):
        _multiply_few(product, tile, order, layer, experts)
        return
    assert order is not None
    if product.x.dtype == FP8 and tile.twice:
        _multiply_fp8_twice(product, tile, order, layer, experts)
    elif product.x.dtype == FP8:
        _multiply_fp8(product, tile, order, layer, experts)
    elif tile.unpacks:
        _multiply_packed(product, tile, order, layer, experts)
    else:
        _multiply_many(product, tile, order, layer, experts)


def _multiply_few(product: Product, tile: FewTile, order: SortedPairs | None, layer: Experts, experts: Tensor) -> None:
    pairs, outputs = product.out.shape
    most = pairs if order is None else order.tiles.shape[1]
    weight = packed_weight(product.weight, product.x.dtype)
    if product.is_fp8:
        assert isinstance(product.weight, Fp8Blocks | Fp8Channels)
        weight = weight._replace(numbers=product.weight.values)
    scales = weight.numbers if weight.scales is None else weight.scales
    launch(
        few_kernel,
        (cdiv(outputs, tile.block_n), most),
        product.x,
        weight.numbers,
        weight.scales,
        weight.zeros,
        product.bias,
        product.out,
        experts,
        None if order is None or product.by_row else order.order,
        None if order is None else order.tiles,
        None if order is None else order.num_tiles,
        most,
        N=outputs,
        K=product.x.shape[1],
        E=layer.count,
        FIRST=layer.first,
        TOP_K=experts.shape[1],
        STRIDES=(*weight.numbers.stride()[:2], scales.stride(0), weight.stride_s),
        FORMAT=weight.layout,
        GROUP=weight.group,
        BLOCK_ROWS=weight.block_rows,
        FP8_ROWS=product.is_fp8,
        ROWS=tile.rows,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        ONE_TOKEN=order is None and not product.by_row,
        PRECISION=_precision(product.x),
        **_options(product, tile, layer),
    )


def _multiply_many(product: Product, tile: ManyTile, order: SortedPairs, layer: Experts, experts: Tensor) -> None:
    outputs = product.out.shape[1]
    weight, x = unpacked_weight(product.weight, product.x.dtype), product.x
    tma = capability(x.device) >= 90 and _described(weight)
    launch(
        many_kernel,
        (_programs(order, outputs, tile, x),),
        _rows_descriptor(x, tile) if tma and product.by_row else x,
        _weight_descriptor(weight, outputs, product.gated, layer.interleaved, tile) if tma else weight,
        product.bias,
        product.out,
        None if product.by_row else order.order,
        order.tiles,
        order.num_tiles,
        order.tiles.shape[1],
        tile.group,
        N=outputs,
        K=x.shape[1],
        TOP_K=experts.shape[1],
        BLOCK_M=tile.rows,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        TMA=tma,
        PRECISION=_precision(x),
        **_options(product, tile, layer),
    )


def _multiply_packed(product: Product, tile: ManyTile, order: SortedPairs, layer: Experts, experts: Tensor) -> None:
    weight, x = kernel_weight(product.weight), product.x
    assert weight is not None
    assert weight.scales is not None
    outputs, width = product.weight.shape[1] // (2 if product.gated else 1), product.out.shape[1]
    tma = capability(x.device) >= 90
    launch(
        packed_many_kernel,
        (_programs(order, width, tile, x, 1 if product.gated else 2),),
        _rows_descriptor(x, tile) if tma else x,
        weight.numbers,
        weight.scales,
        weight.zeros,
        product.bias,
        product.out,
        order.tiles,
        order.num_tiles,
        order.tiles.shape[1],
        tile.group,
        N=outputs,
        K=product.weight.shape[2],
        WIDTH=width,
        PLANES=product.planes,
        STRIDES=(*weight.numbers.stride()[:2], weight.scales.stride(0), weight.stride_s),
        LAYOUT=(weight.layout, weight.group, weight.block_rows),
        BLOCK_M=tile.rows,
        BLOCK_N=tile.block_n,
        TMA=tma,
        FLATTEN=tile.programs > 0,
        PRECISION=_precision(x),
        **_options(product, tile, layer),
    )


def _multiply_fp8(product: Product, tile: ManyTile, order: SortedPairs, layer: Experts, experts: Tensor) -> None:
    outputs, x, weight = product.out.shape[1], product.x, product.weight
    assert isinstance(weight, Fp8Blocks | Fp8Channels)
    assert product.x_scales is not None
    by_group = isinstance(weight, Fp8Blocks)
    scales = weight.scales if by_group else weight.scales[..., None]
    tma = capability(x.device) >= 90 and _described(weight.values)
    values: Any = weight.values
    if tma:
        values = _weight_descriptor(values, outputs, product.gated, layer.interleaved, tile)
    launch(
        fp8_kernel,
        (_programs(order, outputs, tile, x),),
        _rows_descriptor(x, tile) if tma and product.by_row else x,
        product.x_scales,
        values,
        scales,
        product.bias,
        product.out,
        None if product.scales_by_row else order.order,
        order.tiles,
        order.num_tiles,
        product.x_scales.shape[0],
        order.tiles.shape[1],
        tile.group,
        N=outputs,
        K=x.shape[1],
        TOP_K=experts.shape[1],
        STRIDES=(*weight.values.stride()[:2], *scales.stride()[:2]),
        BY_GROUP=by_group,
        BLOCK_ROWS=weight.block[0] if by_group else 1,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        X_BY_ROW=product.by_row,
        TMA=tma,
        **_options(product, tile, layer),
    )


def _multiply_fp8_twice(product: Product, tile: ManyTile, order: SortedPairs, layer: Experts, experts: Tensor) -> None:
    outputs, x, weight = product.out.shape[1], product.x, product.weight
    assert isinstance(weight, Fp8Blocks)
    assert product.x_scales is not None
    assert product.by_row
    tma = capability(x.device) >= 90 and _described(weight.values)
    launch(
        fp8_blocks_kernel,
        (_programs(order, outputs, tile, x, 1 if product.gated else 2),),
        _rows_descriptor(x, tile) if tma else x,
        product.x_scales,
        _weight_descriptor(weight.values, outputs, False, False, tile) if tma else weight.values,
        weight.scales,
        product.bias,
        product.out,
        None if product.scales_by_row else order.order,
        order.tiles,
        order.num_tiles,
        product.x_scales.shape[0],
        order.tiles.shape[1],
        tile.group,
        N=outputs,
        K=x.shape[1],
        TOP_K=experts.shape[1],
        STRIDES=(*weight.values.stride()[:2], *weight.scales.stride()[:2]),
        BLOCK_ROWS=weight.block[0],
        BLOCK_M=tile.rows,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        TMA=tma,
        FLATTEN=tile.programs > 0,
        **_options(product, tile, layer),
    )


def _options(product: Product, tile: FewTile | ManyTile, layer: Experts) -> dict[str, Any]:
    """What all kernels are told of the layer, and how they are compiled."""
    return {
        "INTERLEAVED": product.gated and layer.interleaved,
        "ACTIVATION": layer.activation if product.gated else None,
        "ALPHA": layer.alpha,
        "LIMIT": layer.limit,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def packed_weight(weight: Weight, dtype: torch.dtype) -> KernelWeight:
    """A weight for products of few rows: as it is, or unpacked where the kernels cannot read it so."""
    packed = kernel_weight(weight)
    if packed is not None and packed.layout == HALF.value and not packed.numbers.is_contiguous():
        packed = None
    return packed or KernelWeight(unpacked_weight(weight, dtype), None, None, 0, HALF.value)


def unpacked_weight(weight: Weight, dtype: torch.dtype) -> Tensor:
    """A weight (E, N, K) for products of many rows, dense and of the rows' dtype."""
    if isinstance(weight, Tensor):
        return weight.contiguous()
    count, outputs, inputs = weight.shape
    packed = kernel_weight(weight)
    if packed is None:
        return weight.dequantize(dtype)
    numbers, scales = packed.numbers, packed.scales
    assert scales is not None
    # Experts one after another are one weight, if their outputs and scales lie evenly.
    if numbers.is_contiguous() and scales.is_contiguous() and outputs % packed.block_rows == 0:
        return dequantized(packed, count * outputs, inputs, dtype).view(count, outputs, inputs)
    each = (kernel_weight(weight.experts(expert, expert + 1).mapped(lambda x: x[0])) for expert in range(count))
    return torch.stack([dequantized(one, outputs, inputs, dtype) for one in each if one is not None])


def format_name(weight: Weight) -> str:
    """A weight's format as the tables of tiles have it."""
    if isinstance(weight, Tensor):
        return "half"
    if isinstance(weight, Fp8Blocks | Fp8Channels):
        return "fp8"
    return "int4" if isinstance(weight, Int4Groups) else "mxfp4"


def unpacks(tile: FewTile | ManyTile) -> bool:
    """Whether a product with this tile reads packed weights itself."""
    return isinstance(tile, ManyTile) and tile.unpacks


def unpacks_in_registers(weight: Weight, dtype: torch.dtype) -> bool:
    """Whether `packed_many_kernel` has a form of a weight: of four bits, with scales by which numbers of `dtype` are
    multiplied exactly."""
    if not isinstance(weight, Int4Groups | Mxfp4) or weight.shape[-1] % 8:
        return False
    packed = kernel_weight(weight)
    if packed is None or (packed.group not in (0, 8, 16, 32, 64) and packed.group % STEP):
        return False
    return isinstance(weight, Mxfp4) or (weight.scales.dtype == dtype and weight.permutation is None)


def _programs(order: SortedPairs, outputs: int, tile: ManyTile, x: Tensor, blocks: int = 1) -> int:
    programs = order.tiles.shape[1] * cdiv(outputs, blocks * tile.block_n)
    return min(programs, tile.programs * processors(x.device)) if tile.programs else programs


def _described(weight: Tensor) -> bool:
    """Whether the tensor memory accelerator can read a weight as it lies."""
    pitches = (stride * weight.itemsize % 16 for stride in weight.stride()[:2])
    return weight.data_ptr() % 16 == 0 and weight.stride(2) == 1 and not any(pitches)


def _rows_descriptor(x: Tensor, tile: ManyTile) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), [x.shape[1], 1], [tile.rows, tile.block_k])


def _weight_descriptor(weight: Tensor, outputs: int, gated: bool, interleaved: bool, tile: ManyTile) -> Any:
    """For tiles of a weight's outputs; of gates and what they gate, if `gated`, as many of each."""
    experts, _, inputs = weight.shape
    of_expert, pitch, _ = weight.stride()
    if gated and not interleaved:
        shape, block = [experts, 2, outputs, inputs], [1, 2, tile.block_n, tile.block_k]
        return TensorDescriptor(weight, shape, [of_expert, outputs * pitch, pitch, 1], block)
    block = [1, (2 if gated else 1) * tile.block_n, tile.block_k]
    return TensorDescriptor(weight, list(weight.shape), [of_expert, pitch, 1], block)
