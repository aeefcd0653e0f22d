"""A layer's projections, joined where they share an input, and the part that one of several ranks computes with.

Ranks that have the same weights use them in two ways (`RankLayout.token_sizes`): whole, on their own tokens, or each
its share, on all tokens. So that a share is one run of rows, joined projections lie rank by rank: the queries, keys and
values of the first rank's heads, then those of the second's.

A weight is a tensor of 16 or 32 bits, or of a format (`longreach_kernels.linear`). Tensors belong to the model's
modules as parameters; a module of a format has it as `weight_value`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from longreach_kernels.linear import Weight, join_outputs, take_inputs, take_outputs
from longreach_kernels.moe import Experts
from torch import Tensor
from torch.distributed import ProcessGroup

from longreach_patches.errors import UnsupportedModelError
from longreach_patches.families.layers import LLAMA
from longreach_patches.families.parts import LayerParts
from longreach_patches.fused.experts import share_of_experts
from longreach_patches.layout import RankLayout
from longreach_patches.mixer_split import Sizes, runs_of


class Projection(NamedTuple):
    """A weight (outputs, inputs) and a bias (outputs,); rows of a tensor are contiguous.

    Attributes:
        others: projections of the same input whose outputs follow these, where formats cannot be joined.
        sizes: of each of the joined, outputs of its segments, see `joined`.
    """

    weight: Weight
    bias: Tensor | None
    others: tuple[Projection, ...] = ()
    sizes: tuple[Sizes, ...] = ()

    @property
    def outputs(self) -> int:
        """Outputs of all of them together."""
        return self.weight.shape[0] + sum(other.outputs for other in self.others)


@dataclass(frozen=True)
class LayerWeights:
    """What a step computes one layer with.

    Attributes:
        qkv: joined projections to queries, keys and values.
        output: the projection of attention back to the residual stream.
        gate: the projection to the gate of attention's result, if there is one.
        gate_up: joined projections to gates and to what they gate, or the one to inner channels, of the MLP or of what
            is beside experts; None where nothing is.
        down: the projection of these back; None where `gate_up` is.
        experts: those of a mixture, or this rank's; None where the MLP is none.
        blocks: ranks whose rows these have, each a block in which the joined follow one another.
        sum_over: the ranks whose products with `output`, and with `down`, add up; None if this rank's are all.
        adds_stream: whether this rank's sum has the residual stream in it, which must be there once.
    """

    qkv: Projection
    output: Projection
    gate: Projection | None
    gate_up: Projection | None
    down: Projection | None
    experts: Experts | None
    blocks: int
    sum_over: ProcessGroup | None
    adds_stream: bool


def whole_weights(
    attention: Any, mlp: Any | None, layout: RankLayout, parts: LayerParts = LLAMA, experts: Experts | None = None
) -> LayerWeights:
    """The weights of a layer as they were loaded; joins them in place. `mlp` is None where there are experts alone.

    Raises:
        UnsupportedModelError: a format's blocks cannot be shared by so many ranks.
    """
    return LayerWeights(
        qkv=joined(layout.context_size, *(getattr(attention, name) for name in parts.qkv)),
        output=projection_of(getattr(attention, parts.output)),
        gate=parts.output_gate and projection_of(getattr(attention, parts.output_gate.projection)),
        gate_up=mlp and joined(layout.context_size, *(getattr(mlp, name) for name in parts.gate_up)),
        down=mlp and projection_of(getattr(mlp, parts.down)),
        experts=experts,
        blocks=layout.context_size,
        sum_over=layout.tensor_group if layout.tensor_size > 1 else None,
        adds_stream=layout.tensor_rank == 0,
    )


def share_of(whole: LayerWeights, layout: RankLayout) -> LayerWeights:
    """This rank's share of weights that all ranks of its context group have, as views."""
    if layout.context_size == 1:
        return whole
    return LayerWeights(
        qkv=in_blocks(whole.qkv, layout.context_size)[layout.context_rank],
        output=some_inputs(whole.output, layout),
        gate=whole.gate and in_blocks(whole.gate, layout.context_size)[layout.context_rank],
        gate_up=whole.gate_up and in_blocks(whole.gate_up, layout.context_size)[layout.context_rank],
        down=whole.down and some_inputs(whole.down, layout),
        experts=whole.experts and share_of_experts(whole.experts, layout),
        blocks=1,
        sum_over=layout.group,
        adds_stream=layout.rank == 0,
    )


def weight_of(module: Any) -> Weight:
    """A linear module's weight, in its format."""
    value = getattr(module, "weight_value", None)
    return module.weight if value is None else value


def projection_of(module: Any) -> Projection:
    """A linear module's weight and bias."""
    return Projection(weight_of(module), module.bias)


def in_blocks(projection: Projection, count: int) -> list[Projection]:
    """A joined projection, rank by rank."""
    assert not projection.others, "joined rank by rank; see joined"
    weight, rows = projection.weight, projection.weight.shape[0] // count
    biases = [None] * count if projection.bias is None else projection.bias.chunk(count)
    with _refused(count):
        weights = [take_outputs(weight, rank * rows, (rank + 1) * rows) for rank in range(count)]
    return [Projection(of_rank, bias) for of_rank, bias in zip(weights, biases, strict=True)]


def some_inputs(projection: Projection, layout: RankLayout) -> Projection:
    """The part of a projection whose products add up over the ranks with the same weights."""
    ranks, rank = layout.context_size, layout.context_rank
    columns = projection.weight.shape[1] // ranks
    with _refused(ranks):
        part = take_inputs(projection.weight, rank * columns, (rank + 1) * columns)
    return Projection(part, projection.bias if rank == 0 else None)  # once in the sum


@contextmanager
def separated(whole: Projection, ranks: int, *projections: Any) -> Iterator[None]:
    """Give projections that were joined rank by rank their own weights for a while, as copies."""
    _set_weights(projections, _by_projection(whole.weight, ranks, whole.sizes))
    if whole.bias is not None:
        for projection, own in zip(projections, _by_projection(whole.bias, ranks, whole.sizes), strict=True):
            projection.bias.data = own
    try:
        yield
    finally:
        _set_weights(projections, [_empty(whole.weight)] * len(projections))
        if whole.bias is not None:
            for projection in projections:
                projection.bias.data = whole.bias[:0]


def joined(ranks: int, *projections: Any, segments: Sequence[Sizes] | None = None) -> Projection:
    """One projection in place of several of the same input, rank by rank. Nothing is held twice: with one rank their
    own weights become views of it, with several, where their rows do not follow each other, they become empty. One
    alone is used as it is, as are projections whose formats cannot be joined. What is joined in it on the disk is told
    by `segments`, sizes that add up to the outputs of each; one alone has what belongs to a rank together."""
    if len(projections) == 1:
        return projection_of(projections[0])
    segments = segments or [(projection.out_features,) for projection in projections]
    weights = [weight_of(projection) for projection in projections]
    with _refused(ranks):
        try:
            own = [x.detach() if isinstance(x, Tensor) else x for x in weights]
            weight = interleaved(ranks, own if ranks == 1 else in_segments(own, segments))
        except ValueError:
            if ranks > 1:
                raise
            first, *others = (projection_of(projection) for projection in projections)
            return first._replace(others=tuple(others))
    bias = None
    if projections[0].bias is not None:
        bias = interleaved(ranks, in_segments([projection.bias.detach() for projection in projections], segments))
        assert isinstance(bias, Tensor)
    start = 0
    for projection, sizes in zip(projections, segments, strict=True):
        end = start + sum(sizes)
        _set_weights([projection], [take_outputs(weight, start, end) if ranks == 1 else _empty(weight)])
        if bias is not None:
            projection.bias.data = bias[start : end if ranks == 1 else start]
        start = end
    return Projection(weight, bias, sizes=tuple(segments))


def _set_weights(projections: Sequence[Any], weights: Sequence[Weight]) -> None:
    for projection, weight in zip(projections, weights, strict=True):
        if hasattr(projection, "weight_value"):
            projection.weight_value = weight
        else:
            projection.weight.data = weight


def _empty(weight: Weight) -> Tensor:
    """What a module has of a weight that lies elsewhere: no outputs."""
    return weight[:0] if isinstance(weight, Tensor) else torch.empty(0, weight.shape[1], device=weight.device)


def interleaved(ranks: int, weights: Sequence[Weight]) -> Weight:
    """The rows of several weights, the first rank's of all of them first.

    Raises:
        ValueError: they are of different formats, or a format cannot be joined or cut so.
    """
    tensors = [x for x in weights if isinstance(x, Tensor)]
    if len(tensors) == len(weights):
        return torch.cat([x.unflatten(0, (ranks, -1)) for x in tensors], dim=1).flatten(0, 1)
    if ranks == 1:
        return join_outputs(weights)
    sizes = [weight.shape[0] // ranks for weight in weights]
    return join_outputs(
        [
            take_outputs(weight, rank * rows, (rank + 1) * rows)
            for rank in range(ranks)
            for weight, rows in zip(weights, sizes, strict=True)
        ]
    )


def in_segments(weights: Sequence[Weight], segments: Sequence[Sizes]) -> list[Weight]:
    """Runs of outputs of each weight, of these sizes.

    Raises:
        ValueError: a segment's border cuts a block.
    """
    found: list[Weight] = []
    for weight, sizes in zip(weights, segments, strict=True):
        found += [_run(weight, *run) for run in runs_of(sizes, 1, 0)]
    return found


def _run(weight: Weight, start: int, stop: int) -> Weight:
    """Outputs of a weight, or of a bias."""
    return weight[start:stop] if isinstance(weight, Tensor) else take_outputs(weight, start, stop)


def _by_projection(whole: Weight, ranks: int, segments: Sequence[Sizes]) -> list[Any]:
    """What `joined` was given, from what it gave."""
    widths = [sum(sizes) // ranks for sizes in segments]  # of one rank
    found, first = [], 0
    for sizes, width in zip(segments, widths, strict=True):
        pieces = []
        for start, stop in runs_of(sizes, ranks, 0):
            share, begin = stop - start, first + start // ranks
            starts = [rank * sum(widths) + begin for rank in range(ranks)]
            pieces += [_run(whole, row, row + share) for row in starts]
        found.append(torch.cat(pieces) if isinstance(whole, Tensor) else join_outputs(pieces))
        first += width
    return found


@contextmanager
def _refused(ranks: int) -> Iterator[None]:
    """Say of a format's blocks what a user can do about them."""
    try:
        yield
    except ValueError as error:
        raise UnsupportedModelError(f"--context-parallel-size {ranks}: {error}") from error
