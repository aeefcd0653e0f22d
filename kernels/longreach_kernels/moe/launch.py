"""Mixture layers on a GPU: pairs are sorted by expert, multiplied upwards and downwards, and summed by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from longreach_kernels.backends.triton.config import capability, cdiv, launch, processors
from longreach_kernels.moe.experts import Experts
from longreach_kernels.moe.few_kernel import few_kernel
from longreach_kernels.moe.many_kernel import many_kernel
from longreach_kernels.moe.sort_kernel import SortedPairs, sort_pairs
from longreach_kernels.moe.sum_kernel import gather_rows, sum_rows
from longreach_kernels.moe.tile_sizes import FewTile, ManyTile, few_tile, invariant_tile, is_gathered_first, many_tile

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
        x: (T, K), or (P, K) in sorted order if `by_row`.
        weight: (E, N, K), or (E, 2 N, K) if `gated`.
        out: (P, N), in sorted order.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    out: Tensor
    by_row: bool
    gated: bool


@dataclass(frozen=True)
class Call:
    """Tokens x (T, C), their experts (T, k) and weights (T, k), and the layer."""

    x: Tensor
    experts: Tensor
    weights: Tensor
    layer: Experts

    def tiles(self, batch_invariant: bool) -> tuple[FewTile | ManyTile, FewTile | ManyTile]:
        """The tiles of both products, which have as many rows."""
        size = (self.experts.numel(), self.layer.count)
        kind = (self.x.dtype, capability(self.x.device))
        found: list[FewTile | ManyTile] = []
        for gated in (self.layer.is_gated, False):
            few = None if batch_invariant else few_tile(*size, gated, *kind)
            found.append(few or (invariant_tile if batch_invariant else many_tile)(*size, gated, *kind))
        rows = min(tile.rows for tile in found)
        return found[0]._replace(rows=rows), found[1]._replace(rows=rows)

    def add(self, out: Tensor, up: FewTile | ManyTile, down: FewTile | ManyTile, *, add: bool, scale: float) -> None:
        """out (T, C) = scale * the weighted sum of each token's results, or plus that if `add`."""
        layer, pairs = self.layer, self.experts.numel()
        is_one = self.x.shape[0] == 1 and isinstance(up, FewTile)
        order = None if is_one else sort_pairs(self.experts, layer.count, layer.first, up.rows)
        width = layer.gate_up.shape[1] // (2 if layer.is_gated else 1)
        x = self.x
        by_row = order is not None and isinstance(up, ManyTile) and is_gathered_first(width)
        if by_row:
            assert order is not None
            x = gather_rows(x, order, self.experts.shape[1])
        inner = x.new_empty(pairs, width)
        self.multiply(Product(x, layer.gate_up, layer.gate_up_bias, inner, by_row, layer.is_gated), up, order)
        del x
        if callable(layer.activation):
            inner = layer.activation(inner).contiguous()
        rows = inner.new_empty(pairs, layer.channels)
        self.multiply(Product(inner, layer.down, layer.down_bias, rows, True, False), down, order)
        sum_rows(rows, order, self.experts, self.weights, out, layer.count, layer.first, add=add, scale=scale)

    def multiply(self, product: Product, tile: FewTile | ManyTile, order: SortedPairs | None) -> None:
        """Compute one product."""
        if isinstance(tile, FewTile):
            self._multiply_few(product, tile, order)
        else:
            assert order is not None
            self._multiply_many(product, tile, order)

    def _multiply_few(self, product: Product, tile: FewTile, order: SortedPairs | None) -> None:
        layer, (pairs, outputs) = self.layer, product.out.shape
        most = pairs if order is None else order.tiles.shape[1]
        launch(
            few_kernel,
            (cdiv(outputs, tile.block_n), most),
            product.x,
            product.weight,
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
            ROWS=tile.rows,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            ONE_TOKEN=order is None and not product.by_row,
            **self._options(product, tile),
        )

    def _multiply_many(self, product: Product, tile: ManyTile, order: SortedPairs) -> None:
        outputs, inputs = product.out.shape[1], product.x.shape[1]
        weight: Any = product.weight
        x: Any = product.x
        tma = capability(x.device) >= 90 and _described(weight)
        if tma:
            weight = _weight_descriptor(weight, outputs, product.gated, self.layer.interleaved, tile)
        if tma and product.by_row:
            x = TensorDescriptor(x, list(x.shape), [inputs, 1], [tile.rows, tile.block_k])
        programs = order.tiles.shape[1] * cdiv(outputs, tile.block_n)
        if tile.programs:
            programs = min(programs, tile.programs * processors(product.out.device))
        launch(
            many_kernel,
            (programs,),
            x,
            weight,
            product.bias,
            product.out,
            None if product.by_row else order.order,
            order.tiles,
            order.num_tiles,
            order.tiles.shape[1],
            N=outputs,
            K=inputs,
            TOP_K=self.experts.shape[1],
            BLOCK_M=tile.rows,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            GROUP=tile.group,
            TMA=tma,
            **self._options(product, tile),
        )

    def _options(self, product: Product, tile: FewTile | ManyTile) -> dict[str, Any]:
        """What both kernels are told of the layer, and how they are compiled."""
        layer = self.layer
        return {
            "INTERLEAVED": product.gated and layer.interleaved,
            "ACTIVATION": layer.activation if product.gated else None,
            "ALPHA": layer.alpha,
            "LIMIT": layer.limit,
            "PRECISION": "ieee" if product.out.dtype == torch.float32 else "tf32",
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }


def _described(weight: Tensor) -> bool:
    """Whether the tensor memory accelerator can read a weight."""
    return weight.data_ptr() % 16 == 0 and weight.shape[2] * weight.itemsize % 16 == 0


def _weight_descriptor(weight: Tensor, outputs: int, gated: bool, interleaved: bool, tile: ManyTile) -> Any:
    experts, rows, inputs = weight.shape
    if gated and not interleaved:
        shape, block = [experts, 2, outputs, inputs], [1, 2, tile.block_n, tile.block_k]
        return TensorDescriptor(weight, shape, [rows * inputs, outputs * inputs, inputs, 1], block)
    block = [1, (2 if gated else 1) * tile.block_n, tile.block_k]
    return TensorDescriptor(weight, [experts, rows, inputs], [rows * inputs, inputs, 1], block)
