"""Mixture layers on a GPU: pairs are sorted by expert, multiplied upwards and downwards, and summed by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from longreach_kernels.backends.triton.config import capability, cdiv, launch, processors
from longreach_kernels.linear import Fp8Blocks, Fp8Channels, Weight
from longreach_kernels.linear.dequantize_kernel import dequantized
from longreach_kernels.linear.formats import FP8
from longreach_kernels.linear.fp8_products import experts_take_fp8
from longreach_kernels.linear.quantize_kernel import rows_by_group, rows_by_token
from longreach_kernels.linear.rows_kernel import KernelWeight, kernel_weight
from longreach_kernels.linear.unpack import HALF
from longreach_kernels.moe.experts import Experts
from longreach_kernels.moe.few_kernel import few_kernel
from longreach_kernels.moe.fp8_kernel import fp8_kernel
from longreach_kernels.moe.many_kernel import many_kernel
from longreach_kernels.moe.sort_kernel import SortedPairs, sort_pairs
from longreach_kernels.moe.sum_kernel import gather_rows, sum_rows
from longreach_kernels.moe.tile_sizes import (
    FewTile,
    ManyTile,
    few_tile,
    fp8_tile,
    invariant_packed_tile,
    invariant_tile,
    is_gathered_first,
    many_tile,
)

# Tokens that are computed together, for their k results each take memory.
MAX_TOKENS = 16384


def experts_product(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    layer: Experts,
    add_to: Tensor | None,
    scale: float,
    batch_invariant: bool,
) -> Tensor:
    """As `longreach_kernels.moe.experts_product`."""
    x, experts, weights = x.contiguous(), experts.contiguous(), weights.contiguous()
    out = torch.empty_like(x) if add_to is None else add_to
    assert out.is_contiguous(), "the residual stream is dense"
    for start in range(0, x.shape[0], MAX_TOKENS):
        some = slice(start, start + MAX_TOKENS)
        call = Call(x[some], experts[some], weights[some], layer)
        call.add(out[some], *call.tiles(batch_invariant), add=add_to is not None, scale=scale)
    return out


@dataclass(frozen=True)
class Product:
    """One of the two products of a call.

    Attributes:
        x: (T, K), or (P, K) in sorted order if `by_row`; values of FP8 where products are made of these.
        weight: (E, N, K), or (E, 2 N, K) if `gated`.
        out: (P, N), in sorted order.
        x_scales: of values of FP8, (T, groups) with neighbouring tokens, or (P, groups) if `scales_by_row`.
    """

    x: Tensor
    weight: Weight
    bias: Tensor | None
    out: Tensor
    by_row: bool
    gated: bool
    x_scales: Tensor | None = None
    scales_by_row: bool = False


@dataclass(frozen=True)
class Call:
    """Tokens x (T, C), their experts (T, k) and weights (T, k), and the layer."""

    x: Tensor
    experts: Tensor
    weights: Tensor
    layer: Experts

    def tiles(self, batch_invariant: bool) -> tuple[FewTile | ManyTile, FewTile | ManyTile]:
        """The tiles of both products, which have as many rows."""
        layer, pairs = self.layer, self.experts.numel()
        kind = (self.x.dtype, capability(self.x.device))
        found: list[FewTile | ManyTile] = []
        for gated, weight in ((layer.is_gated, layer.gate_up), (False, layer.down)):
            size = (pairs, layer.count, gated, *kind)
            is_packed, is_fp8 = not isinstance(weight, Tensor), self.is_fp8(weight)
            few = few_tile(*size, is_one=len(self.x) == 1, is_packed=is_packed and not is_fp8, is_fp8=is_fp8)
            if few is not None and not batch_invariant:
                found.append(few)
            elif is_fp8:
                found.append(fp8_tile(*size, by_group=isinstance(weight, Fp8Blocks)))
            elif batch_invariant:
                found.append(invariant_packed_tile(gated, *kind) if is_packed else invariant_tile(*size))
            else:
                found.append(many_tile(*size))
        rows = min(tile.rows for tile in found)
        return found[0]._replace(rows=rows), found[1]._replace(rows=rows)

    def is_fp8(self, weight: Weight) -> bool:
        """Whether products with a weight are made in FP8."""
        return experts_take_fp8(weight, self.x.dtype, capability(self.x.device))

    def add(self, out: Tensor, up: FewTile | ManyTile, down: FewTile | ManyTile, *, add: bool, scale: float) -> None:
        """out (T, C) = scale * the weighted sum of each token's results, or plus that if `add`."""
        layer, pairs = self.layer, self.experts.numel()
        is_one = len(self.x) == 1 and isinstance(up, FewTile) and isinstance(down, FewTile)
        order = None if is_one else sort_pairs(self.experts, layer.count, layer.first, up.rows)
        inner = self.x.new_empty(pairs, layer.gate_up.shape[1] // (2 if layer.is_gated else 1))
        self.multiply(self.product(self.x, True, inner, up, order), up, order)
        if callable(layer.activation):
            inner = layer.activation(inner).contiguous()
        rows = inner.new_empty(pairs, layer.channels)
        self.multiply(self.product(inner, False, rows, down, order), down, order)
        sum_rows(rows, order, self.experts, self.weights, out, layer.count, layer.first, add=add, scale=scale)

    def product(
        self, x: Tensor, is_up: bool, out: Tensor, tile: FewTile | ManyTile, order: SortedPairs | None
    ) -> Product:
        """The product upwards of tokens x (T, C), or downwards of rows x (P, I), in the form that a tile takes."""
        layer = self.layer
        weight, bias = (layer.gate_up, layer.gate_up_bias) if is_up else (layer.down, layer.down_bias)
        gated = is_up and layer.is_gated
        if isinstance(tile, FewTile):
            return Product(x, weight, bias, out, not is_up, gated)
        assert order is not None
        scales = None
        if self.is_fp8(weight):
            if isinstance(weight, Fp8Channels):
                x, scales = rows_by_token(x, bound=weight.input_bound)
            else:
                x, scales = rows_by_group(x)
        gathers = is_up and (scales is not None or is_gathered_first(out.shape[1]))
        if gathers:
            x = gather_rows(x, order, self.experts.shape[1])
        return Product(x, weight, bias, out, gathers or not is_up, gated, scales, not is_up)

    def multiply(self, product: Product, tile: FewTile | ManyTile, order: SortedPairs | None) -> None:
        """Compute one product."""
        if isinstance(tile, FewTile):
            self._multiply_few(product, tile, order)
            return
        assert order is not None
        if product.x.dtype == FP8:
            self._multiply_fp8(product, tile, order)
        else:
            self._multiply_many(product, tile, order)

    def _multiply_few(self, product: Product, tile: FewTile, order: SortedPairs | None) -> None:
        layer, (pairs, outputs) = self.layer, product.out.shape
        most = pairs if order is None else order.tiles.shape[1]
        weight = _packed(product.weight, product.x.dtype)
        fp8_rows = self.is_fp8(product.weight)
        if fp8_rows:
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
            self.experts,
            None if order is None or product.by_row else order.order,
            None if order is None else order.tiles,
            None if order is None else order.num_tiles,
            most,
            N=outputs,
            K=product.x.shape[1],
            E=layer.count,
            FIRST=layer.first,
            TOP_K=self.experts.shape[1],
            STRIDES=(*weight.numbers.stride()[:2], scales.stride(0), weight.stride_s),
            FORMAT=weight.layout,
            GROUP=weight.group,
            BLOCK_ROWS=weight.block_rows,
            FP8_ROWS=fp8_rows,
            ROWS=tile.rows,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            ONE_TOKEN=order is None and not product.by_row,
            PRECISION=_precision(product.x),
            **self._options(product, tile),
        )

    def _multiply_many(self, product: Product, tile: ManyTile, order: SortedPairs) -> None:
        outputs = product.out.shape[1]
        weight, x = _numbers(product.weight, product.x.dtype), product.x
        tma = capability(x.device) >= 90 and _described(weight)
        launch(
            many_kernel,
            (_programs(order, outputs, tile, x),),
            _rows_descriptor(x, tile) if tma and product.by_row else x,
            _weight_descriptor(weight, outputs, product.gated, self.layer.interleaved, tile) if tma else weight,
            product.bias,
            product.out,
            None if product.by_row else order.order,
            order.tiles,
            order.num_tiles,
            order.tiles.shape[1],
            tile.group,
            N=outputs,
            K=x.shape[1],
            TOP_K=self.experts.shape[1],
            BLOCK_M=tile.rows,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            TMA=tma,
            PRECISION=_precision(x),
            **self._options(product, tile),
        )

    def _multiply_fp8(self, product: Product, tile: ManyTile, order: SortedPairs) -> None:
        outputs, x, weight = product.out.shape[1], product.x, product.weight
        assert isinstance(weight, Fp8Blocks | Fp8Channels)
        assert product.x_scales is not None
        by_group = isinstance(weight, Fp8Blocks)
        scales = weight.scales if by_group else weight.scales[..., None]
        tma = capability(x.device) >= 90 and _described(weight.values)
        values: Any = weight.values
        if tma:
            values = _weight_descriptor(values, outputs, product.gated, self.layer.interleaved, tile)
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
            TOP_K=self.experts.shape[1],
            STRIDES=(*weight.values.stride()[:2], *scales.stride()[:2]),
            BY_GROUP=by_group,
            BLOCK_ROWS=weight.block[0] if by_group else 1,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            X_BY_ROW=product.by_row,
            TMA=tma,
            **self._options(product, tile),
        )

    def _options(self, product: Product, tile: FewTile | ManyTile) -> dict[str, Any]:
        """What all kernels are told of the layer, and how they are compiled."""
        layer = self.layer
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


def _packed(weight: Weight, dtype: torch.dtype) -> KernelWeight:
    """A weight for products of few rows: as it is, or unpacked where the kernels cannot read it so."""
    packed = kernel_weight(weight)
    if packed is not None and packed.layout == HALF.value and not packed.numbers.is_contiguous():
        packed = None
    return packed or KernelWeight(_numbers(weight, dtype), None, None, 0, HALF.value)


def _numbers(weight: Weight, dtype: torch.dtype) -> Tensor:
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


def _programs(order: SortedPairs, outputs: int, tile: ManyTile, x: Tensor) -> int:
    programs = order.tiles.shape[1] * cdiv(outputs, tile.block_n)
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
