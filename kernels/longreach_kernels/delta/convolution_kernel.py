"""The short convolution in Triton: outputs of prompts, then outputs of single tokens and all new states."""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from longreach_kernels.backends.triton.config import cdiv, launch
from longreach_kernels.backends.triton.primitives import find_sequence
from longreach_kernels.delta.batch import StateBatch

_ROWS = 16  # tokens of a program
_CHANNELS = 256


@triton.jit
def _finished(total, Bias, channels, inside, SILU: tl.constexpr):
    """What follows the sum over taps."""
    if Bias is not None:
        total += tl.load(Bias + channels, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    return total


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
    stride_states,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SILU: tl.constexpr,
):
    """Grid (tiles of tokens of one sequence, blocks of channels): Out (T, C)."""
    tile = tl.program_id(0)
    seq, first = find_sequence(CuQ, num_seqs, tile, ROWS)
    begin = tl.load(CuQ + seq)
    end = tl.load(CuQ + seq + 1)
    start = begin + (tile - first) * ROWS
    if start < end:
        channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = channels < CHANNELS
        rows = start + tl.arange(0, ROWS)
        slot = tl.load(Read + seq)
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for j in tl.static_range(WIDTH):
            source = rows - (WIDTH - 1) + j
            here = (source >= begin) & (rows < end)
            places = source.to(tl.int64)[:, None] * stride_x + channels[None, :]
            x = tl.load(X + places, mask=here[:, None] & inside[None, :], other=0.0)
            if start == begin:  # inputs of earlier steps
                before = (source < begin) & (slot >= 0)
                places = slot * stride_states + channels[None, :] * (WIDTH - 1) + (source - begin + WIDTH - 1)[:, None]
                old = tl.load(States + places, mask=before[:, None] & inside[None, :], other=0.0)
                x = tl.where((source < begin)[:, None], old, x)
            tap = tl.load(Weight + channels * WIDTH + j, mask=inside, other=0.0).to(tl.float32)
            total += x.to(tl.float32) * tap[None, :]
        total = _finished(total, Bias, channels[None, :], inside[None, :], SILU)
        places = rows.to(tl.int64)[:, None] * CHANNELS + channels[None, :]
        tl.store(Out + places, total.to(Out.dtype.element_ty), mask=(rows < end)[:, None] & inside[None, :])


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
        total = tl.zeros((BLOCK,), tl.float32)
        for j in tl.static_range(WIDTH):
            if j < WIDTH - 1:
                x = tl.load(old + j, mask=has_old, other=0.0)
            else:
                x = tl.load(X + begin * stride_x + channels, mask=inside, other=0.0)
            total += x.to(tl.float32) * tl.load(Weight + channels * WIDTH + j, mask=inside, other=0.0).to(tl.float32)
        total = _finished(total, Bias, channels, inside, SILU)
        tl.store(Out + begin * CHANNELS + channels, total.to(Out.dtype.element_ty), mask=inside)
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
    tokens, channels = x.shape
    out = x.new_empty(x.shape)
    block = min(_CHANNELS, triton.next_power_of_2(channels))
    blocks, decodes = cdiv(channels, block), batch.decodes
    prompts = batch.size - decodes
    options = {"CHANNELS": channels, "WIDTH": weight.shape[1], "BLOCK": block, "SILU": silu}
    if prompts:
        launch(
            _prompts_kernel,
            ((tokens - decodes) // _ROWS + prompts, blocks),
            x,
            weight,
            bias,
            states,
            out,
            batch.cu_seqlens_q[decodes:],
            batch.read[decodes:],
            prompts,
            x.stride(0),
            states.stride(0),
            ROWS=_ROWS,
            num_warps=8,
            **options,
        )
    if batch.size:
        launch(
            _states_kernel,
            (batch.size, blocks),
            x,
            weight,
            bias,
            states,
            out,
            batch.cu_seqlens_q,
            batch.read,
            batch.write,
            decodes,
            x.stride(0),
            states.stride(0),
            num_warps=4,
            **options,
        )
    return out
