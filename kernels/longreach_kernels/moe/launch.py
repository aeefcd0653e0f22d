"""Mixture layers on a GPU: pairs are sorted by expert, multiplied upwards and downwards, and summed by token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longreach_kernels.backends.triton.config import capability, cdiv
from longreach_kernels.linear import Fp8Blocks, Fp8Channels, Mxfp4, Weight
from longreach_kernels.linear.fp8_products import experts_take_fp8
from longreach_kernels.linear.quantize_kernel import rows_by_group, rows_by_token
from longreach_kernels.moe.experts import Experts
from longreach_kernels.moe.one import down_one, up_one
from longreach_kernels.moe.packed_many_kernel import STEP
from longreach_kernels.moe.products import Product, format_name, multiply, packed_weight, unpacks, unpacks_in_registers
from longreach_kernels.moe.sort_kernel import SortedPairs, sort_pairs
from longreach_kernels.moe.sum_kernel import gather_planes, gather_rows, sum_rows
from longreach_kernels.moe.tile_sizes import (
    FewTile,
    ManyTile,
    OneTile,
    few_tile,
    fp8_tile,
    invariant_packed_tile,
    invariant_tile,
    is_gathered_first,
    many_tile,
    one_tile,
    unpacking_tile,
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
        ones = None if batch_invariant else call.one_tiles()
        if ones is not None:
            call.add_one(out[some], *ones, add=add_to is not None, scale=scale)
        else:
            call.add(out[some], *call.tiles(batch_invariant), add=add_to is not None, scale=scale)
    return out


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
            kind_of_weight = {
                "is_packed": is_packed and not is_fp8,
                "is_fp8": is_fp8,
                "is_mxfp4": isinstance(weight, Mxfp4),
            }
            few = few_tile(*size, is_one=len(self.x) == 1, **kind_of_weight)
            unpacking = None
            if unpacks_in_registers(weight, self.x.dtype) and not batch_invariant:
                unpacking = unpacking_tile(pairs, layer.count, format_name(weight), *kind)
            if unpacking is not None:
                found.append(unpacking)
            elif few is not None and not batch_invariant:
                found.append(few)
            elif is_fp8:
                found.append(fp8_tile(*size, by_group=isinstance(weight, Fp8Blocks)))
            elif batch_invariant:
                found.append(invariant_packed_tile(gated, *kind) if is_packed else invariant_tile(*size))
            else:
                found.append(many_tile(*size))
        rows = min(tile.rows for tile in found)
        return found[0]._replace(rows=rows), found[1]._replace(rows=rows)

    def one_tiles(self) -> tuple[OneTile, OneTile] | None:
        """The tiles of both products of one token; None where there are more, or where other forms are quicker."""
        layer, kind = self.layer, (self.x.dtype, capability(self.x.device))
        if len(self.x) > 1:
            return None
        up = one_tile(format_name(layer.gate_up), None, *kind)
        down = one_tile(format_name(layer.down), self.experts.shape[1], *kind)
        return None if up is None or down is None else (up, down)

    def add_one(self, out: Tensor, up: OneTile, down: OneTile, *, add: bool, scale: float) -> None:
        """As `add`, of one token."""
        layer, dtype = self.layer, self.x.dtype
        inner = up_one(self.x, self.experts, layer, packed_weight(layer.gate_up, dtype), up)
        if callable(layer.activation):
            inner = layer.activation(inner).contiguous()
        weight = packed_weight(layer.down, dtype)
        down_one(inner, self.experts, self.weights, layer, weight, down, out, add=add, scale=scale)

    def is_fp8(self, weight: Weight) -> bool:
        """Whether products with a weight are made in FP8."""
        return experts_take_fp8(weight, self.x.dtype, capability(self.x.device))

    def add(self, out: Tensor, up: FewTile | ManyTile, down: FewTile | ManyTile, *, add: bool, scale: float) -> None:
        """out (T, C) = scale * the weighted sum of each token's results, or plus that if `add`."""
        layer, pairs = self.layer, self.experts.numel()
        is_one = len(self.x) == 1 and isinstance(up, FewTile) and isinstance(down, FewTile)
        order = None if is_one else sort_pairs(self.experts, layer.count, layer.first, up.rows)
        width = layer.gate_up.shape[1] // (2 if layer.is_gated else 1)
        planes = layer.is_gated and unpacks(up) and unpacks(down)
        inner = self.x.new_empty(pairs, cdiv(width, STEP) * STEP if planes else width)
        self.multiply(self.product(self.x, True, inner, up, order, planes=planes), up, order)
        if callable(layer.activation):
            inner = layer.activation(inner).contiguous()
        rows = inner.new_empty(pairs, layer.channels)
        self.multiply(self.product(inner, False, rows, down, order, planes=planes), down, order)
        sum_rows(rows, order, self.experts, self.weights, out, layer.count, layer.first, add=add, scale=scale)

    def product(
        self,
        x: Tensor,
        is_up: bool,
        out: Tensor,
        tile: FewTile | ManyTile,
        order: SortedPairs | None,
        *,
        planes: bool = False,
    ) -> Product:
        """The product upwards of tokens x (T, C), or downwards of rows x (P, I), in the form that a tile takes. What
        lies between both is in the order of planes if `planes`."""
        layer = self.layer
        weight, bias = (layer.gate_up, layer.gate_up_bias) if is_up else (layer.down, layer.down_bias)
        gated = is_up and layer.is_gated
        if isinstance(tile, FewTile):
            return Product(x, weight, bias, out, not is_up, gated, is_fp8=self.is_fp8(weight))
        assert order is not None
        if tile.unpacks:
            if is_up or not planes:
                x = gather_planes(x, order, self.experts.shape[1] if is_up else None)
            return Product(x, weight, bias, out, True, gated, planes=is_up and planes)
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
        multiply(product, tile, order, self.layer, self.experts)
