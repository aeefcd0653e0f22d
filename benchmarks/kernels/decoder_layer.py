"""A decoder layer of Llama-8B in a step in which every sequence computes one token, as a chain of the server's kernels.

It is there to be timed: a kernel alone hides what lies between kernels.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from longreach_kernels import Causal, PagedBatch, paged_attention
from longreach_kernels.backends.triton import overlap
from longreach_kernels.linear import Weight, linear, rows_kernel
from longreach_kernels.linear.rows_config import RowsConfig
from longreach_patches.fused.norm import Norm, normalize
from longreach_patches.fused.rotary import rotate_and_write
from torch import Tensor

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 8, 128, 32
_PAGE = 128
_DEVICE = torch.device("cuda", 0)
_HALF = torch.bfloat16
# What a configuration is chosen by: outputs of the weight, format of `unpack`, and rows of a tile.
Choice = dict[tuple[int, int, int], RowsConfig]


@contextmanager
def overlapping(enabled: bool) -> Iterator[None]:
    """Let kernels overlap, or not."""
    before, overlap.OVERLAPS = overlap.OVERLAPS, enabled
    try:
        yield
    finally:
        overlap.OVERLAPS = before


@contextmanager
def choosing(choice: Choice) -> Iterator[None]:
    """Let products take these tiles, and others their own."""
    own = rows_kernel.configure

    def configure(
        outputs: int, layout: int, dtype: torch.dtype, tile_rows: int, arch: int, *, gated: bool = False
    ) -> RowsConfig:
        chosen = choice.get((outputs, layout, tile_rows))
        return own(outputs, layout, dtype, tile_rows, arch, gated=gated) if chosen is None else chosen

    rows_kernel.configure = configure
    try:
        yield
    finally:
        rows_kernel.configure = own


class Weights(NamedTuple):
    """The matrices of a layer."""

    qkv: Weight
    o: Weight
    gate_up: Weight
    down: Weight


class Step:
    """What the layers of a step share: the sequences, each with `context` keys before its token."""

    def __init__(self, rows: int, context: int) -> None:
        pages = -(-(context + 1) // _PAGE)
        self.rows = rows
        self.stream = torch.randn(rows, HEADS * HEAD_DIM, device=_DEVICE, dtype=_HALF)
        self.other = torch.zeros_like(self.stream)
        self.norm = Norm(torch.ones(HEADS * HEAD_DIM, device=_DEVICE, dtype=_HALF), 1e-5)
        angles = torch.rand(rows, HEAD_DIM, device=_DEVICE)
        self.rope = angles.cos().to(_HALF), angles.sin().to(_HALF)
        table = torch.arange(rows * pages, device=_DEVICE, dtype=torch.int32).view(rows, pages)
        self.slots = table[:, -1].long() * _PAGE + context % _PAGE
        lengths = torch.full((rows,), context + 1, device=_DEVICE, dtype=torch.int32)
        starts = torch.arange(rows + 1, device=_DEVICE, dtype=torch.int32)
        self.batch = PagedBatch(starts, lengths, table, 1, context + 1, rows)
        self.pages = rows * pages

    def keys(self) -> tuple[Tensor, Tensor]:
        """Pages of keys and of values for one layer."""
        shape = self.pages, _PAGE, KV_HEADS, HEAD_DIM
        keys, values = (torch.randn(shape, device=_DEVICE, dtype=_HALF) for _ in range(2))
        return keys, values


def products(step: Step, weights: Weights) -> None:
    """The four products of a layer alone."""
    linear(step.stream, weights.qkv)
    linear(step.stream, weights.o, add_to=step.other)
    linear(linear(step.stream, weights.gate_up, gated=True), weights.down, add_to=step.other)


def layer(step: Step, weights: Weights, keys: tuple[Tensor, Tensor]) -> None:
    """A whole layer, added to the stream."""
    qkv = linear(normalize(step.stream, step.norm), weights.qkv)
    q = rotate_and_write(qkv, step.rope, *keys, step.slots, heads=HEADS)
    out = paged_attention(q, *keys, step.batch, Causal())
    linear(out.flatten(1), weights.o, add_to=step.stream)
    x = normalize(step.stream, step.norm)
    linear(linear(x, weights.gate_up, gated=True), weights.down, add_to=step.stream)


def graph_of(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """`run`, captured after it has run once."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, turns: int = 7) -> float:
    """Median microseconds of a replay."""
    times = []
    for _ in range(turns):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[1:])


def all_layers(step: Step, sets: list[Weights], pages: list[tuple[Tensor, Tensor]], whole: bool) -> None:
    """All layers of a step, which take turns with sets of weights; `whole`, or their products alone."""
    for weights, keys in itertools.islice(zip(itertools.cycle(sets), itertools.cycle(pages), strict=False), LAYERS):
        if whole:
            layer(step, weights, keys)
        else:
            products(step, weights)


def step_us(step: Step, sets: list[Weights], pages: list[tuple[Tensor, Tensor]], whole: bool) -> float:
    """Microseconds of `all_layers` in a CUDA graph."""
    return replay_us(graph_of(lambda: all_layers(step, sets, pages, whole)))
