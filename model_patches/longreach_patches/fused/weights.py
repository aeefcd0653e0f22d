"""A layer's projections, joined where they share an input, and the part that one of several ranks computes with.

Ranks that have the same weights use them in two ways (`RankLayout.token_sizes`): whole, on their own tokens, or each
its share, on all tokens. So that a share is one run of rows, joined projections lie rank by rank: the queries, keys and
values of the first rank's heads, then those of the second's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from longreach_patches.families.parts import LLAMA, LayerParts
from longreach_patches.layout import RankLayout


class Projection(NamedTuple):
    """A weight (outputs, inputs), its rows contiguous, and a bias (outputs,)."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class LayerWeights:
    """What a step computes one layer with.

    Attributes:
        qkv: joined projections to queries, keys and values.
        gate_up: those to gates and to what they gate; None where a module of the model's own computes the MLP.
        blocks: ranks whose rows these have, each a block in which the joined follow one another.
        output: the projection of attention back to the residual stream.
        down: that of the MLP; None where `gate_up` is.
        sum_over: the ranks whose products with `output`, and with `down`, add up; None if this rank's are all.
        adds_stream: whether this rank's sum has the residual stream in it, which must be there once.
    """

    qkv: Projection
    output: Projection
    gate_up: Projection | None
    down: Projection | None
    blocks: int
    sum_over: ProcessGroup | None
    adds_stream: bool


def whole_weights(attention: Any, mlp: Any | None, layout: RankLayout, parts: LayerParts = LLAMA) -> LayerWeights:
    """The weights of a layer as they were loaded; joins them in place. `mlp` is None where its weights are not used."""
    return LayerWeights(
        qkv=_joined(layout.context_size, *(getattr(attention, name) for name in parts.qkv)),
        output=Projection(attention.o_proj.weight, attention.o_proj.bias),
        gate_up=mlp and _joined(layout.context_size, *(getattr(mlp, name) for name in parts.gate_up)),
        down=mlp and Projection(mlp.down_proj.weight, mlp.down_proj.bias),
        blocks=layout.context_size,
        sum_over=layout.tensor_group if layout.tensor_size > 1 else None,
        adds_stream=layout.tensor_rank == 0,
    )


def share_of(whole: LayerWeights, layout: RankLayout) -> LayerWeights:
    """This rank's share of weights that all ranks of its context group have, as views."""
    if layout.context_size == 1:
        return whole
    assert whole.gate_up is not None
    assert whole.down is not None
    return LayerWeights(
        qkv=_some_outputs(whole.qkv, layout),
        output=_some_inputs(whole.output, layout),
        gate_up=_some_outputs(whole.gate_up, layout),
        down=_some_inputs(whole.down, layout),
        blocks=1,
        sum_over=layout.group,
        adds_stream=layout.rank == 0,
    )


def in_blocks(projection: Projection, count: int) -> list[Projection]:
    """A joined projection, rank by rank."""
    weights = projection.weight.chunk(count)
    biases = [None] * count if projection.bias is None else projection.bias.chunk(count)
    return [Projection(weight, bias) for weight, bias in zip(weights, biases, strict=True)]


@contextmanager
def separated(whole: Projection, ranks: int, *projections: nn.Linear) -> Iterator[None]:
    """Give projections that were joined rank by rank their own weights for a while, as copies."""
    sizes = [projection.out_features // ranks for projection in projections]
    joined = [(name, x) for name, x in zip(("weight", "bias"), whole, strict=True) if x is not None]
    for name, x in joined:
        for projection, own in zip(projections, x.unflatten(0, (ranks, -1)).split(sizes, 1), strict=True):
            getattr(projection, name).data = own.flatten(0, 1)
    try:
        yield
    finally:
        for name, x in joined:
            for projection in projections:
                getattr(projection, name).data = x[:0]


def _some_outputs(projection: Projection, layout: RankLayout) -> Projection:
    return in_blocks(projection, layout.context_size)[layout.context_rank]


def _some_inputs(projection: Projection, layout: RankLayout) -> Projection:
    weight = projection.weight.chunk(layout.context_size, dim=1)[layout.context_rank]
    return Projection(weight, projection.bias if layout.context_rank == 0 else None)  # once in the sum


def _joined(ranks: int, *projections: nn.Linear) -> Projection:
    """One projection in place of several of the same input, rank by rank. Nothing is held twice: with one rank their
    own parameters become views of it, with several, where their rows do not follow each other, they become empty. What
    is joined on the disk is used as it is."""
    if len(projections) == 1:
        assert ranks == 1, "joined rows do not lie rank by rank; see LayerParts.whole"
        return Projection(projections[0].weight, projections[0].bias)
    weight = _interleaved(ranks, [projection.weight.detach() for projection in projections])
    bias = None
    if projections[0].bias is not None:
        bias = _interleaved(ranks, [projection.bias.detach() for projection in projections])
    start = 0
    for projection in projections:
        end = start + projection.out_features if ranks == 1 else start
        projection.weight.data = weight[start:end]
        if bias is not None:
            projection.bias.data = bias[start:end]
        start = end
    return Projection(weight, bias)


def _interleaved(ranks: int, rows: list[Tensor]) -> Tensor:
    return torch.cat([x.unflatten(0, (ranks, -1)) for x in rows], dim=1).flatten(0, 1)
