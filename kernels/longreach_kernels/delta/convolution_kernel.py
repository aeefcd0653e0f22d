"""The short convolution in Triton: outputs of prompts, then outputs of single tokens and all new states."""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
# ruff: noqa: RUF005 (Triton knows no unpacking in tuples)
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from longreach_kernels.backends.triton.config import cdiv, launch
from longreach_kernels.backends.triton.primitives import find_sequence
from longreach_kernels.delta.batch import StateBatch


class ConvolutionTiles(NamedTuple):
    """How kernels are compiled. A program of prompts has `rows` tokens, of which it reads `ahead` at once, and
    `channels`; one of states has `state_channels`.

    Measured on an H200, microseconds for 8,192 tokens of 8,192 channels, as one prompt and as 16: rows, ahead, channels
    and warps 32, 8, 512, 4 take 78 and 79; 64, 8, 512, 4 take 82 and 82; 32, 8, 256, 1 take 101 and 103.
    """

    rows: int = 32
    ahead: int = 8
    channels: int = 512
    warps: int = 4
    state_channels: int = 256
    state_warps: int = 4


TILES = ConvolutionTiles()


@triton.jit
def _bias(Bias, channels, inside, BLOCK: tl.constexpr):
    """What a sum over taps starts from."""
    if Bias is None:
        start = tl.zeros((BLOCK,), tl.float32)
    else:
        start = tl.load(Bias + channels, mask=inside, other=0.0).to(tl.float32)
    return start


@triton.jit
def _activated(total, SILU: tl.constexpr):
    return total / (1.0 + tl.exp(-total)) if SILU else total


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=["CuQ", "Read"])
def _prompts_kernel(
    X,
    Weight,
    Bias,
    States,
    Out,
    CuQ,
    Read,
    num_seqs,
    stride_x,
    strides_weight,
    stride_states,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    SILU: tl.constexpr,
):
    """Grid (tiles of ROWS tokens of one sequence, blocks of channels): Out (T, C).

    A thread has some channels and goes through the tokens, of which it keeps the last WIDTH - 1: an input is read and
    converted once. AHEAD tokens are read before any of them is used, so that their reads wait together.
    """
    tile = tl.program_id(0)
    seq, first = find_sequence(CuQ, num_seqs, tile, ROWS)
    begin = tl.load(CuQ + seq)
    end = tl.load(CuQ + seq + 1)
    start = begin + (tile - first) * ROWS
    if start < end:
        channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = channels < CHANNELS
        slot = tl.load(Read + seq)
        bias = _bias(Bias, channels, inside, BLOCK)
        taps = ()
        for j in tl.static_range(WIDTH):
            tap = tl.load(Weight + channels * strides_weight[0] + j * strides_weight[1], mask=inside, other=0.0)
            taps = taps + (tap.to(tl.float32),)
        window = ()
        for j in tl.static_range(WIDTH - 1):
            source = start - (WIDTH - 1) + j
            is_old = source < begin  # an input of an earlier step
            x = tl.load(X + source.to(tl.int64) * stride_x + channels, mask=inside & (source >= begin), other=0.0)
            places = slot * stride_states + channels * (WIDTH - 1) + (source - begin + WIDTH - 1)
            old = tl.load(States + places, mask=inside & is_old & (slot >= 0), other=0.0)
            window = window + (tl.where(is_old, old, x).to(tl.float32),)
        for group in range(0, ROWS, AHEAD):
            rows = ()
            for t in tl.static_range(AHEAD):
                row = start + group + t
                x = tl.load(X + row.to(tl.int64) * stride_x + channels, mask=inside & (row < end), other=0.0)
                rows = rows + (x,)
            for t in tl.static_range(AHEAD):
                row = start + group + t
                window = window + (rows[t].to(tl.float32),)
                total = bias
                for j in tl.static_range(WIDTH):
                    total += window[j] * taps[j]
                window = window[1:]
                places = row.to(tl.int64) * CHANNELS + channels
                out = _activated(total, SILU).to(Out.dtype.element_ty)
                tl.store(Out + places, out, mask=inside & (row < end))


@triton.jit(do_not_specialize=["decodes"], do_not_specialize_on_alignment=["CuQ", "Read", "Write"])
def _states_kernel(
    X,
    Weight,
    Bias,
    States,
    Out,
    CuQ,
    Read,
    Write,
    decodes,
    stride_x,
    strides_weight,
    stride_states,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SILU: tl.constexpr,
):
    """Grid (B, blocks of channels): new states, and rows of Out (T, C) for the leading sequences of one token."""
    seq = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < CHANNELS
    begin = tl.load(CuQ + seq).to(tl.int64)
    end = tl.load(CuQ + seq + 1).to(tl.int64)
    read = tl.load(Read + seq)
    write = tl.load(Write + seq)
    old = States + read * stride_states + channels * (WIDTH - 1)
    new = States + write * stride_states + channels * (WIDTH - 1)
    has_old = inside & (read >= 0)
    if seq < decodes:
        total = _bias(Bias, channels, inside, BLOCK)
        for j in tl.static_range(WIDTH):
            if j < WIDTH - 1:
                x = tl.load(old + j, mask=has_old, other=0.0)
            else:
                x = tl.load(X + begin * stride_x + channels, mask=inside, other=0.0)
            tap = tl.load(Weight + channels * strides_weight[0] + j * strides_weight[1], mask=inside, other=0.0)
            total += x.to(tl.float32) * tap.to(tl.float32)
        tl.store(Out + begin * CHANNELS + channels, _activated(total, SILU).to(Out.dtype.element_ty), mask=inside)
    for j in tl.static_range(WIDTH - 1):
        source = end - (WIDTH - 1) + j
        is_old = source < begin
        x = tl.load(X + source * stride_x + channels, mask=inside & (source >= begin), other=0.0)
        kept = tl.load(old + (source - begin + WIDTH - 1), mask=has_old & is_old, other=0.0)
        x = tl.where(is_old, kept, x)
        # Both may be one slot: no thread may write an input that another has not read.
        tl.debug_barrier()
        tl.store(new + j, x, mask=inside & (write >= 0))


def short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, batch: StateBatch, silu: bool
) -> Tensor:
    """As `longreach_kernels.delta.short_convolution`. States are written by a launch after all outputs of prompts, for
    these read them."""
    call = ConvolutionCall(x, weight, bias, states, batch, silu)
    out = x.new_empty(x.shape)
    if batch.size > batch.decodes:
        call.prompts(out, TILES)
    if batch.size:
        call.states_and_decodes(out, TILES)
    return out


class ConvolutionCall(NamedTuple):
    """Checked arguments of `short_convolution`."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    states: Tensor
    batch: StateBatch
    silu: bool

    def sizes(self, channels: int) -> dict[str, Any]:
        """What both kernels are compiled for; `channels` is the most of a program."""
        block = min(channels, int(triton.next_power_of_2(self.x.shape[1])))
        return {"CHANNELS": self.x.shape[1], "WIDTH": self.weight.shape[1], "BLOCK": block, "SILU": self.silu}

    def prompts(self, out: Tensor, tiles: ConvolutionTiles) -> None:
        """Outputs of all sequences but the leading ones of one token."""
        decodes, (tokens, channels) = self.batch.decodes, self.x.shape
        count, sizes = self.batch.size - decodes, self.sizes(tiles.channels)
        launch(
            _prompts_kernel,
            ((tokens - decodes) // tiles.rows + count, cdiv(channels, sizes["BLOCK"])),
            self.x,
            self.weight,
            self.bias,
            self.states,
            out,
            self.batch.cu_seqlens_q[decodes:],
            self.batch.read[decodes:],
            count,
            self.x.stride(0),
            self.weight.stride(),
            self.states.stride(0),
            ROWS=tiles.rows,
            AHEAD=tiles.ahead,
            num_warps=tiles.warps,
            **sizes,
        )

    def states_and_decodes(self, out: Tensor, tiles: ConvolutionTiles) -> None:
        """All new states, and outputs of the leading sequences of one token."""
        sizes = self.sizes(tiles.state_channels)
        launch(
            _states_kernel,
            (self.batch.size, cdiv(self.x.shape[1], sizes["BLOCK"])),
            self.x,
            self.weight,
            self.bias,
            self.states,
            out,
            self.batch.cu_seqlens_q,
            self.batch.read,
            self.batch.write,
            self.batch.decodes,
            self.x.stride(0),
            self.weight.stride(),
            self.states.stride(0),
            num_warps=tiles.state_warps,
            **sizes,
        )
