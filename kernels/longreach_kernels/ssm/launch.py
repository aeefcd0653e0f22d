"""Mamba-2's recurrence on a GPU: single tokens in one kernel, prompts in two."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from longreach_kernels.backends.triton.config import capability, cdiv, launch
from longreach_kernels.ssm.decode_kernel import decode_kernel
from longreach_kernels.ssm.scan import ScanInputs
from longreach_kernels.ssm.scan_kernel import scan_kernel
from longreach_kernels.ssm.steps_kernel import steps_kernel

_LEAST = 16  # rows and columns of a product
_STEPS_HEADS = 16  # heads of a program of `steps_kernel`


class Tiles(NamedTuple):
    """How kernels are compiled. A program of the decode and of the scan has `block_p` channels of a head."""

    decode_block_p: int
    decode_warps: int
    scan_block_p: int
    scan_warps: int
    scan_stages: int


@lru_cache(maxsize=64)
def tiles(state_size: int, dim: int, dtype: torch.dtype, arch: int) -> Tiles:
    """By the padded state size, the channels of a head, the dtype, and the compute capability as one number, 0 for the
    interpreter.

    Measured on an H200, bf16, 128 heads of 64 channels, states of 128, microseconds of the scan for one prompt of 8192:

    | block_p, warps | stages 1 | 2 | 3 |
    |---|---|---|---|
    | 64, 4 | 423 | 471 | 473 |
    | 64, 8 | 528 | 543 | |

    With one stage and 4 warps, programs of 32 channels end in an illegal access there (chunks of 64, triton 3.6).
    """
    if arch == 0:
        return Tiles(32, 4, 32, 4, 1)
    if state_size > 128 or dtype == torch.float32:  # sm_86, sm_89 and sm_120 have 99 KB of shared memory a block
        return Tiles(32, 4, 16 if dtype == torch.float32 and state_size > 128 else 32, 4, 1)
    return Tiles(32, 4, 64, 4, 1 if 90 <= arch < 100 and dim > 32 else 2)


def chunk_size(state_size: int, dtype: torch.dtype) -> int:
    """Tokens of a chunk. It decides where sums are cut, so it does not depend on the GPU."""
    return 64 if state_size <= 128 and dtype != torch.float32 else 32


class Chunks(NamedTuple):
    """What `steps_kernel` says of each chunk and head, in fp32."""

    factors: Tensor  # (chunks, H, 4, chunk)
    decays: Tensor  # (chunks, H)


def ssd_scan(given: ScanInputs) -> Tensor:
    """As `longreach_kernels.ssm.ssd_scan`."""
    out = given.x.new_empty(given.x.shape)
    config = tiles(_sizes(given)["BLOCK_N"], given.x.shape[2], given.x.dtype, capability(given.x.device))
    if given.batch.decodes:
        decode(given, out, config)
    if given.batch.size > given.batch.decodes:
        scan(given, out, steps(given), config)
    return out


def decode(given: ScanInputs, out: Tensor, config: Tiles) -> None:
    """The leading sequences of one token."""
    heads, dim = given.x.shape[1:]
    block_p = _block_p(dim, config.decode_block_p)
    launch(
        decode_kernel,
        (cdiv(dim, block_p), heads, given.batch.decodes),
        given.x,
        given.b,
        given.c,
        given.dt,
        given.dt_bias,
        given.a_log,
        given.skip,
        given.states,
        out,
        given.batch.cu_seqlens_q,
        given.batch.read,
        given.batch.write,
        *given.limits,
        *_strides(given),
        given.dt.stride(),
        given.states.stride(0),
        DIM=dim,
        BLOCK_P=block_p,
        num_warps=config.decode_warps,
        **_sizes(given),
    )


def steps(given: ScanInputs) -> Chunks:
    """Sizes of steps and decays in the chunks of all other sequences."""
    (tokens, heads), decodes = given.dt.shape, given.batch.decodes
    size = chunk_size(_sizes(given)["BLOCK_N"], given.x.dtype)
    count = given.batch.size - decodes
    number = (tokens - decodes) // size + count  # as `find_sequence` numbers them
    options = {"dtype": torch.float32, "device": given.x.device}
    made = Chunks(torch.empty(number, heads, 4, size, **options), torch.empty(number, heads, **options))
    launch(
        steps_kernel,
        (number, cdiv(heads, _STEPS_HEADS)),
        given.dt,
        given.dt_bias,
        given.a_log,
        *made,
        given.batch.cu_seqlens_q[decodes:],
        count,
        *given.limits,
        given.dt.stride(),
        HEADS=heads,
        BLOCK_H=_STEPS_HEADS,
        CHUNK=size,
        num_warps=4,
    )
    return made


def scan(given: ScanInputs, out: Tensor, made: Chunks, config: Tiles) -> None:
    """All other sequences, from chunk to chunk."""
    decodes, (_, heads, dim) = given.batch.decodes, given.x.shape
    block_p = _block_p(dim, config.scan_block_p)
    launch(
        scan_kernel,
        (cdiv(dim, block_p), heads, given.batch.size - decodes),
        given.x,
        given.b,
        given.c,
        given.skip,
        given.states,
        out,
        *made,
        given.batch.cu_seqlens_q[decodes:],
        given.batch.read[decodes:],
        given.batch.write[decodes:],
        *_strides(given),
        given.states.stride(0),
        DIM=dim,
        BLOCK_P=block_p,
        CHUNK=made.factors.shape[3],
        num_warps=config.scan_warps,
        num_stages=config.scan_stages,
        **_sizes(given),
    )


def _sizes(given: ScanInputs) -> dict[str, Any]:
    """What all kernels are compiled for."""
    groups, size = given.b.shape[1:]
    return {
        "GROUPS": groups,
        "HEADS": given.x.shape[1],
        "STATE": size,
        "BLOCK_N": max(_LEAST, triton.next_power_of_2(size)),
    }


def _block_p(dim: int, most: int) -> int:
    """Channels of a head that a program has."""
    return min(most, max(_LEAST, int(triton.next_power_of_2(dim))))


def _strides(given: ScanInputs) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Of tokens, and heads or groups, of x, b and c."""
    return given.x.stride()[:2], given.b.stride()[:2], given.c.stride()[:2]
