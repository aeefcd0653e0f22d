"""The gated delta rule on a GPU: single tokens in one kernel, prompts in two."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from longreach_kernels.backends.triton.config import capability, cdiv, launch
from longreach_kernels.delta.batch import StateBatch
from longreach_kernels.delta.decode_kernel import decode_kernel
from longreach_kernels.delta.scan_kernel import scan_kernel
from longreach_kernels.delta.solve_kernel import solve_kernel

_LEAST = 16  # rows and columns of a product


class Tiles(NamedTuple):
    """How kernels are compiled. A program of the decode and of the scan has `block_v` channels of values."""

    decode_block_v: int
    decode_warps: int
    solve_warps: int
    scan_block_v: int
    scan_warps: int
    scan_stages: int


@lru_cache(maxsize=64)
def tiles(key_dim: int, dtype: torch.dtype, arch: int) -> Tiles:
    """By the padded head dim of keys, the dtype, and the compute capability as one number, 0 for the interpreter.

    Measured on an H200, bf16, Qwen3-Next's heads, microseconds of the scan for one prompt of 8192 and for 16 of 512:

    | block_v, warps, stages | 8192 | 16 x 512 |
    |---|---|---|
    | 32, 4, 3 | 203 | 246 |
    | 32, 4, 2 | 291 | 198 |
    | 64, 4, 2 | 331 | 202 |
    | 32, 8, 3 | 312 | 357 |
    | 16, 4, 2 | 275 | 305 |

    The solve took 213 with four warps and 187 with two there.

    With one stage and 4 warps, programs of 16 or 32 channels end in an illegal access there (chunks of 64, triton 3.6).
    """
    if arch == 0:
        return Tiles(32, 4, 4, 32, 4, 1)
    large = key_dim > 128 or dtype == torch.float32
    # sm_86, sm_89 and sm_120 have 99 KB of shared memory a block.
    stages = 1 if large else 3 if 90 <= arch < 120 else 2
    return Tiles(32, 4, 4 if large else 2, 16 if key_dim > 128 and dtype == torch.float32 else 32, 4, stages)


def chunk_size(key_dim: int, dtype: torch.dtype) -> int:
    """Tokens of a chunk. It decides where sums are cut, so it does not depend on the GPU."""
    return 64 if key_dim <= 128 and dtype != torch.float32 else 32


class Chunks(NamedTuple):
    """What `solve_kernel` says of each chunk and value head."""

    inverse: Tensor  # (N, Hv, chunk, chunk)
    scores: Tensor  # (N, Hv, chunk, chunk)
    factors: Tensor  # (N, Hv, 4, chunk) fp32
    decays: Tensor  # (N, Hv) fp32


@dataclass(frozen=True)
class Call:
    """Checked arguments of `gated_delta_rule`."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor
    states: Tensor
    batch: StateBatch
    scale: float
    epsilon: float | None

    def sizes(self) -> dict[str, Any]:
        """What all kernels are compiled for."""
        key_dim = self.q.shape[2]
        return {
            "KEY_HEADS": self.q.shape[1],
            "HEADS": self.v.shape[1],
            "KEY_DIM": key_dim,
            "BLOCK_K": max(_LEAST, triton.next_power_of_2(key_dim)),
        }

    def block_v(self, most: int) -> int:
        """Channels of values of a program."""
        return min(most, max(_LEAST, int(triton.next_power_of_2(self.v.shape[2]))))

    @property
    def fold_keys(self) -> bool:
        """Whether factors of norms may be in values: that of a key of nearly nothing is large, and fp16 has no room."""
        return self.q.dtype != torch.float16

    def strides(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
        """Of tokens and heads of q, k and v, and of slots."""
        return self.q.stride()[:2], self.k.stride()[:2], self.v.stride()[:2], self.states.stride(0)

    def decode(self, out: Tensor, config: Tiles) -> None:
        """The leading sequences of one token."""
        heads, dim = self.v.shape[1:]
        block_v = self.block_v(config.decode_block_v)
        launch(
            decode_kernel,
            (cdiv(dim, block_v), heads, self.batch.decodes),
            self.q,
            self.k,
            self.v,
            self.log_decay,
            self.beta,
            self.states,
            out,
            self.batch.cu_seqlens_q,
            self.batch.read,
            self.batch.write,
            self.scale,
            self.epsilon or 0.0,
            *self.strides(),
            DIM=dim,
            BLOCK_V=block_v,
            NORMALISE=self.epsilon is not None,
            num_warps=config.decode_warps,
            **self.sizes(),
        )

    def solve(self, config: Tiles) -> Chunks:
        """What the chunks of all other sequences have in themselves."""
        sizes, (tokens, heads, _) = self.sizes(), self.v.shape
        chunk = chunk_size(sizes["BLOCK_K"], self.q.dtype)
        count = self.batch.size - self.batch.decodes
        number = (tokens - self.batch.decodes) // chunk + count  # as `find_sequence` numbers them
        inverse, scores = (self.v.new_empty(number, heads, chunk, chunk) for _ in range(2))
        factors = self.log_decay.new_empty(number, heads, 4, chunk)
        chunks = Chunks(inverse, scores, factors, self.log_decay.new_empty(number, heads))
        launch(
            solve_kernel,
            (number, heads),
            self.q,
            self.k,
            self.log_decay,
            self.beta,
            *chunks,
            self.batch.cu_seqlens_q[self.batch.decodes :],
            count,
            self.scale,
            self.epsilon or 0.0,
            *self.strides()[:2],
            CHUNK=chunk,
            NORMALISE=self.epsilon is not None,
            FOLD_KEYS=self.fold_keys,
            num_warps=config.solve_warps,
            num_stages=1,
            **sizes,
        )
        return chunks

    def scan(self, out: Tensor, chunks: Chunks, config: Tiles) -> None:
        """All other sequences, from chunk to chunk."""
        decodes, (_, heads, dim) = self.batch.decodes, self.v.shape
        block_v = self.block_v(config.scan_block_v)
        launch(
            scan_kernel,
            (cdiv(dim, block_v), heads, self.batch.size - decodes),
            self.q,
            self.k,
            self.v,
            self.states,
            out,
            *chunks,
            self.batch.cu_seqlens_q[decodes:],
            self.batch.read[decodes:],
            self.batch.write[decodes:],
            *self.strides(),
            DIM=dim,
            BLOCK_V=block_v,
            CHUNK=chunks.inverse.shape[2],
            FOLD_KEYS=self.fold_keys,
            num_warps=config.scan_warps,
            num_stages=config.scan_stages,
            **self.sizes(),
        )


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    states: Tensor,
    batch: StateBatch,
    scale: float,
    epsilon: float | None,
) -> Tensor:
    """As `longreach_kernels.delta.gated_delta_rule`."""
    out = v.new_empty(v.shape)
    call = Call(q, k, v, log_decay.contiguous(), beta.contiguous(), states, batch, scale, epsilon)
    config = tiles(call.sizes()["BLOCK_K"], q.dtype, capability(q.device))
    if batch.decodes:
        call.decode(out, config)
    if batch.size > batch.decodes:
        call.scan(out, call.solve(config), config)
    return out
