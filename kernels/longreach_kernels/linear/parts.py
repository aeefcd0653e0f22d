"""Parts of weights of any format, and weights put together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from longreach_kernels.linear.formats import Fp8Blocks, Fp8Channels, Int4Groups, Mxfp4, Weight

_Kind = TypeVar("_Kind")
# The kernels find the scale of a block for 16 outputs at once.
_LEAST_BLOCK_ROWS = 16


def dequantize(weight: Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """A weight (.., N, K) of any format as a tensor of `dtype`."""
    return weight.to(dtype) if isinstance(weight, Tensor) else weight.dequantize(dtype)


def take_outputs(weight: Weight, start: int, stop: int) -> Weight:
    """The outputs [start, stop) of a weight of any format, as `Quantized.outputs`."""
    return weight[..., start:stop, :] if isinstance(weight, Tensor) else weight.outputs(start, stop)


def take_inputs(weight: Weight, start: int, stop: int) -> Weight:
    """The inputs [start, stop) of a weight of any format, as `Quantized.inputs`."""
    return weight[..., start:stop] if isinstance(weight, Tensor) else weight.inputs(start, stop)


def take_experts(weight: Weight, start: int, stop: int) -> Weight:
    """The experts [start, stop) of a weight (E, N, K) of any format."""
    return weight[start:stop] if isinstance(weight, Tensor) else weight.experts(start, stop)


def join_outputs(weights: Sequence[Weight]) -> Weight:
    """One weight (.., N1 + N2 + .., K) in the place of several with the same input. Each part keeps its scales.

    Blocks of fp8 that would not lie at multiples of 128 outputs become blocks of fewer outputs, with repeated scales,
    and the same numbers. The greatest static scale of activations serves all parts, so that none is cut off.

    Raises:
        ValueError: formats, groups or activation orders differ, or blocks would have fewer than 16 outputs.
    """
    first = _alike(weights, "joined")
    if len(weights) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(_all(Tensor, weights), -2)
    if isinstance(first, Fp8Channels):
        parts = _all(Fp8Channels, weights)
        static = None
        if first.input_scale is not None:
            static = torch.stack([part.input_scale for part in parts if part.input_scale is not None]).amax(0)
        return Fp8Channels(
            _cat([part.values for part in parts]),
            torch.cat([part.scales for part in parts], -1),
            static,
            first.input_bound,
        )
    if isinstance(first, Fp8Blocks):
        return _join_blocks(_all(Fp8Blocks, weights))
    if isinstance(first, Int4Groups):
        parts = _all(Int4Groups, weights)
        zeros = None
        if first.zeros is not None:
            zeros = torch.cat([part.zeros for part in parts if part.zeros is not None], -2)
        packed, scales = ([getattr(part, name) for part in parts] for name in ("packed", "scales"))
        return Int4Groups(torch.cat(packed, -2), torch.cat(scales, -2), zeros, first.permutation)
    parts = _all(Mxfp4, weights)
    return Mxfp4(torch.cat([part.packed for part in parts], -2), torch.cat([part.scales for part in parts], -2))


def stack_experts(weights: Sequence[Weight]) -> Weight:
    """One weight (E, N, K) of E weights (N, K).

    Raises:
        ValueError: formats, shapes or blocks differ, or inputs are in activation order.
    """
    first = _alike(weights, "stacked")
    if any(weight.shape != first.shape for weight in weights):
        raise ValueError(f"experts: shapes differ: {', '.join(sorted({str(tuple(w.shape)) for w in weights}))}")
    if isinstance(first, Tensor):
        return torch.stack(_all(Tensor, weights))
    if isinstance(first, Int4Groups) and first.permutation is not None:
        raise ValueError("int4 groups: experts have no inputs in activation order; use a checkpoint without desc_act")
    if isinstance(first, Fp8Blocks) and len({weight.block for weight in _all(Fp8Blocks, weights)}) > 1:
        raise ValueError("fp8 blocks: experts have blocks of different sizes")
    tensors = [weight.tensors() for weight in weights if not isinstance(weight, Tensor)]
    return replace(first, **{name: _stack([each[name] for each in tensors]) for name in tensors[0]})


def _alike(weights: Sequence[Weight], what: str) -> Weight:
    """The first of weights that can be put together."""
    if not weights:
        raise ValueError(f"no weights to be {what}")
    first = weights[0]
    kinds = {_kind(weight) for weight in weights}
    if len(kinds) > 1:
        raise ValueError(f"weights of different formats cannot be {what}: {'; '.join(sorted(map(str, kinds)))}")
    if isinstance(first, Int4Groups) and first.permutation is not None:
        for other in _all(Int4Groups, weights):
            if other.permutation is None or not torch.equal(first.permutation, other.permutation):
                raise ValueError(f"int4 groups: weights with different activation orders cannot be {what}")
    return first


def _kind(weight: Weight) -> tuple[object, ...]:
    """What must be equal of weights that are put together."""
    inputs = weight.shape[-1]
    if isinstance(weight, Tensor):
        return "16-bit", weight.dtype, inputs
    if isinstance(weight, Fp8Channels):
        return weight.name, inputs, "static" if weight.input_scale is not None else "dynamic", weight.input_bound
    if isinstance(weight, Fp8Blocks):
        return weight.name, inputs, weight.block[1]
    if isinstance(weight, Int4Groups):
        zeros = "no zeros" if weight.zeros is None else "zeros"
        ordered = "no order" if weight.permutation is None else "activation order"
        return weight.name, inputs, weight.group, weight.scales.dtype, zeros, ordered
    return weight.name, inputs


def _join_blocks(parts: list[Fp8Blocks]) -> Fp8Blocks:
    starts = [sum(part.shape[-2] for part in parts[:count]) for count in range(1, len(parts))]
    rows = math.gcd(*starts, *(part.block[0] for part in parts))
    if rows < _LEAST_BLOCK_ROWS:
        sizes = ", ".join(str(part.shape[-2]) for part in parts)
        raise ValueError(
            f"fp8 blocks: {sizes} outputs cannot be joined: blocks would have {rows} outputs, fewer than 16"
        )
    parts = [part.with_rows(rows) for part in parts]
    scales = torch.cat([part.scales for part in parts], -2)
    return Fp8Blocks(_cat([part.values for part in parts]), scales, (rows, parts[0].block[1]))


def _cat(values: list[Tensor]) -> Tensor:
    """Values of fp8 one after another: as bytes, since not every device can concatenate fp8."""
    return torch.cat([x.view(torch.uint8) for x in values], -2).view(values[0].dtype)


def _stack(tensors: list[Tensor]) -> Tensor:
    """As `torch.stack`; fp8 as bytes."""
    if tensors[0].itemsize > 1:
        return torch.stack(tensors)
    return torch.stack([x.view(torch.uint8) for x in tensors]).view(tensors[0].dtype)


def _all(kind: type[_Kind], weights: Sequence[Weight]) -> list[_Kind]:
    """The weights, which are all of one kind."""
    return [weight for weight in weights if isinstance(weight, kind)]
