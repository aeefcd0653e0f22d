"""Host side of the Hopper forward kernel: what it can compute, how tensors become rows and columns, and the launch."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from longreach_kernels.batch import PagedBatch
from longreach_kernels.masks import Mask

from .forward import forward_kernel

_GLUON_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_ROWS = 64  # of queries, a consumer warpgroup
_PAGE_MULTIPLE = 128  # a key tile lies inside one page
_RING = 2  # tiles of K and of V in shared memory; three at D=128 need 230 KB


class Config(NamedTuple):
    """Keys in a tile, consumer warpgroups, and the registers of a consumer's and of the producer's threads."""

    block_n: int
    consumers: int
    registers: int
    producer_registers: int


HEAD_DIMS = (64, 128)


def configure(head_dim: int, causal: bool, windowed: bool) -> Config:
    """The configuration for a head dim and a kind of mask; each compiles for sm_90 without spills.

    At D=64 three consumers hide more of the softmax than two, but their 160 registers do not hold the positions that a
    window, or the last ragged tile of a full mask, is tested with.
    """
    if head_dim == 64 and causal and not windowed:
        return Config(128, 3, 160, 32)
    return Config(128, 2, 240, 24)


class _Rows(NamedTuple):
    """A tensor as a matrix: head h begins `head_row * h` rows down and `head_col * h` columns across."""

    matrix: Tensor
    head_row: int
    head_col: int


def supports(
    q: Tensor, mask: Mask, softcap: float | None, sink_logits: Tensor | None, page_size: int | None = None
) -> bool:
    """Whether the Hopper kernel computes this; everything else is the portable kernels' work.

    It takes head dims 64 and 128 in fp16 or bf16, causal, full and sliding-window masks without sinks, and pages that
    hold whole tiles of 128 keys.
    """
    band = mask.band
    return (
        q.shape[-1] in HEAD_DIMS
        and q.dtype in _GLUON_TYPES
        and band is not None
        and not (band.window is not None and (band.sinks or not band.causal))
        and softcap is None
        and sink_logits is None
        and (page_size is None or page_size % _PAGE_MULTIPLE == 0)
    )


def dense_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float) -> tuple[Tensor, Tensor]:
    """q (B, Hq, Nq, D), k, v (B, Hkv, Nk, D): out like q, lse (B, Hq, Nq) fp32."""
    batch, heads, length, head_dim = q.shape
    out = torch.empty((batch, heads, length, head_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, length), dtype=torch.float32, device=q.device)
    q_rows, k_rows, v_rows, out_rows = (_Rows(x.contiguous().view(-1, head_dim), x.shape[2], 0) for x in (q, k, v, out))
    _launch(
        q_rows,
        k_rows,
        v_rows,
        out_rows,
        lse,
        lse_strides=(lse.stride(0), lse.stride(1), 1),
        heads=(heads, k.shape[1]),
        tokens=length,
        num_seqs=batch,
        lengths=(length, k.shape[2]),
        mask=mask,
        scale=scale,
    )
    return out, lse


def ragged_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, mask: Mask, *, scale: float
) -> tuple[Tensor, Tensor]:
    """q (Tq, Hq, D), k, v (Tk, Hkv, D): out like q, lse (Tq, Hq) fp32."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    num_seqs = cu_seqlens_q.shape[0] - 1
    _launch(
        _token_rows(q),
        _token_rows(k),
        _token_rows(v),
        _token_rows(out),
        lse,
        lse_strides=(0, 1, lse.stride(0)),
        heads=(q.shape[1], k.shape[1]),
        tokens=q.shape[0],
        num_seqs=num_seqs,
        mask=mask,
        scale=scale,
        cu_q=cu_seqlens_q,
        cu_k=cu_seqlens_k,
    )
    return out, lse


def paged_forward(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    out: Tensor,
    lse: Tensor,
    batch: PagedBatch,
    mask: Mask,
    *,
    scale: float,
) -> None:
    """The sequences of `batch` that are not decodes; writes their rows of out (T, Hq, D) and lse (T, Hq)."""
    skip = batch.decodes
    num_seqs = batch.size - skip
    keys, values = (_Rows(x.view(-1, x.shape[2] * x.shape[3]), 0, x.shape[3]) for x in (k_pages, v_pages))
    _launch(
        _token_rows(q),
        keys,
        values,
        _token_rows(out),
        lse,
        lse_strides=(0, 1, lse.stride(0)),
        heads=(q.shape[1], k_pages.shape[2]),
        tokens=q.shape[0] - skip,
        num_seqs=num_seqs,
        mask=mask,
        scale=scale,
        cu_q=batch.cu_seqlens_q[skip:],
        context_lens=batch.context_lens[skip:],
        page_table=batch.page_table[skip:],
        page_size=k_pages.shape[1],
    )


def _token_rows(x: Tensor) -> _Rows:
    """x (T, H, D), laid out by token or by head, as a matrix; another layout is copied first."""
    tokens, heads, head_dim = x.shape
    if x.stride() == (head_dim, tokens * head_dim, 1):  # as transformers' attention modules make q
        return _Rows(x.transpose(0, 1).view(heads * tokens, head_dim), tokens, 0)
    return _Rows(x.contiguous().view(tokens, heads * head_dim), 0, head_dim)


def _descriptor(matrix: Tensor, rows: int, head_dim: int) -> TensorDescriptor:
    layout: Any = gl.NVMMASharedLayout.get_default_for([rows, head_dim], _GLUON_TYPES[matrix.dtype])
    return TensorDescriptor.from_tensor(matrix, [rows, head_dim], layout)


def _launch(
    q: _Rows,
    k: _Rows,
    v: _Rows,
    out: _Rows,
    lse: Tensor,
    *,
    lse_strides: tuple[int, int, int],
    heads: tuple[int, int],
    tokens: int,
    num_seqs: int,
    mask: Mask,
    scale: float,
    lengths: tuple[int, int] = (0, 0),
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    context_lens: Tensor | None = None,
    page_table: Tensor | None = None,
    page_size: int = 0,
) -> None:
    if tokens == 0 or num_seqs == 0:
        return
    band = mask.band
    assert band is not None, mask
    assert (k.head_row, k.head_col) == (v.head_row, v.head_col), "k and v must be laid out alike"
    head_dim = q.head_col or q.matrix.shape[1]
    config = configure(head_dim, band.causal, band.window is not None)
    tiles = -(
        -tokens // (_ROWS * config.consumers)
    )  # of one sequence, or of all, each of which may end in a part of one
    tiles = tiles + num_seqs if cu_q is not None else tiles * num_seqs
    unused = lse  # stands where the kernel, compiled for another kind of batch, reads nothing
    options: dict[str, Any] = {"num_warps": 4}
    forward_kernel[(heads[0], tiles)](
        _descriptor(q.matrix, _ROWS, head_dim),
        _descriptor(k.matrix, config.block_n, head_dim),
        _descriptor(v.matrix, config.block_n, head_dim),
        _descriptor(out.matrix, _ROWS, head_dim),
        out.matrix,
        lse,
        unused if cu_q is None else cu_q,
        unused if cu_k is None else cu_k,
        unused if context_lens is None else context_lens,
        unused if page_table is None else page_table,
        0 if page_table is None else page_table.stride(0),
        q.head_row,
        q.head_col,
        k.head_row,
        k.head_col,
        out.head_row,
        out.head_col,
        out.matrix.stride(0),
        *lse_strides,
        num_seqs,
        *lengths,
        band.window or 0,
        scale * math.log2(math.e),
        GROUP=heads[0] // heads[1],
        D=head_dim,
        BN=config.block_n,
        RING=_RING,
        CONSUMERS=config.consumers,
        REGISTERS=config.registers,
        PRODUCER_REGISTERS=config.producer_registers,
        RAGGED=cu_q is not None,
        PAGE_SIZE=page_size,
        CAUSAL=band.causal,
        WINDOWED=band.window is not None,
        **options,
    )
