"""Host side of the Hopper backward kernel: what it can compute, its buffers, and the launches."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from longreach_kernels.backends.hopper.backward import backward_kernel
from longreach_kernels.backends.hopper.backward_arguments import Form
from longreach_kernels.backends.hopper.backward_padding import grad_q_kernel, statistics_kernel
from longreach_kernels.backends.hopper.backward_workers import PART_COLUMNS, PART_ROWS
from longreach_kernels.backends.hopper.config import BACKWARD_HEAD_DIMS, backward_config
from longreach_kernels.backends.protocol import Saved
from longreach_kernels.backends.triton import backward_launch as portable
from longreach_kernels.backends.triton.config import cached_heads, cdiv, launch
from longreach_kernels.call import AttentionCall
from longreach_kernels.masks.mask import Mask

_GLUON_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_BLOCK_N = 128  # keys of a program
_KEYS = 64  # of them, of one consumer warpgroup


def supports(q: Tensor, mask: Mask, softcap: float | None) -> bool:
    """Whether the Hopper kernel computes these gradients; everything else is the portable kernels' work.

    It takes head dims 64 and 128 in fp16 or bf16, and causal, full and sliding-window masks without sinks.
    """
    band = mask.band
    return (
        q.shape[-1] in BACKWARD_HEAD_DIMS
        and q.dtype in _GLUON_TYPES
        and band is not None
        and not (band.window is not None and (band.sinks or not band.causal))
        and softcap is None
    )


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, saved: Saved, call: AttentionCall
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `triton.backward_launch.backward`, which computes what `supports` refuses."""
    q, k, v, out, lse, cu_seqlens = saved
    ragged = cu_seqlens is not None
    tokens, keys = (q.shape[0], k.shape[0]) if ragged else (q.shape[2], k.shape[2])
    if not supports(q, call.mask, call.softcap) or q.numel() == 0 or k.numel() == 0:
        return portable.backward(grad_out, grad_lse, saved, call)
    band, scale = call.mask.band, call.scale
    assert band is not None, call.mask
    head_dim = q.shape[-1]
    heads, kv_heads = q.shape[1], k.shape[1]
    config = backward_config(head_dim)
    block_m = config.block_m
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta = torch.empty_like(lse)
    if cu_seqlens is not None:
        num_seqs, batch = cu_seqlens.q.shape[0] - 1, 1
        tiles = tokens // block_m + num_seqs  # of a head: each sequence may end in a part of one
        slots = keys // _BLOCK_N + num_seqs
        rows = _token_rows
    else:
        num_seqs, batch = 1, q.shape[0]
        tiles = cdiv(tokens, block_m)
        slots = cdiv(keys, _BLOCK_N)
        rows = _head_rows
    if grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()
    padded = batch * heads * tiles
    statistics = torch.empty((2 * padded, block_m), dtype=torch.float32, device=q.device)
    sums = torch.empty((padded * block_m, head_dim), dtype=torch.float32, device=q.device)
    counters = torch.zeros(1 + padded, dtype=torch.int32, device=q.device)
    unused = counters  # stands where a kernel, compiled for another kind of batch, reads nothing
    cu_q, cu_k = cu_seqlens or (unused, unused)
    fixed: dict[str, Any] = {"HEAD_DIM": head_dim, "BLOCK_M": block_m, "RAGGED": ragged, "num_warps": 4}
    launch(
        statistics_kernel,
        (tiles, batch * heads),
        out,
        grad_out,
        lse,
        grad_lse,
        delta,
        statistics,
        cu_q,
        *_strides(out, ragged),
        *_strides(grad_out, ragged),
        *_strides(lse, ragged),
        *(_strides(grad_lse, ragged) if grad_lse is not None else (0, 0, 0)),
        num_seqs,
        heads,
        tokens,
        HAS_GRAD_LSE=grad_lse is not None,
        **fixed,
    )
    q_rows, k_rows, v_rows, g_rows, dk_rows, dv_rows = (rows(x) for x in (q, k, v, grad_out, dk, dv))
    num_heads = batch * kv_heads
    group = heads // kv_heads
    options: dict[str, Any] = {"num_warps": 4}
    launch(
        backward_kernel,
        (num_heads * slots,),
        q_rows.descriptor(block_m, head_dim),
        k_rows.descriptor(_KEYS, head_dim),
        v_rows.descriptor(_KEYS, head_dim),
        g_rows.descriptor(block_m, head_dim),
        TensorDescriptor.from_tensor(statistics, [2, block_m], _PLAIN),
        TensorDescriptor.from_tensor(sums.view(-1, PART_COLUMNS.value), [PART_ROWS.value, PART_COLUMNS.value], _PLAIN),
        dk_rows.descriptor(_KEYS, head_dim),
        dv_rows.descriptor(_KEYS, head_dim),
        dk_rows.matrix,
        dv_rows.matrix,
        counters,
        cu_q,
        cu_k,
        q_rows.head_row,
        q_rows.head_col,
        g_rows.head_row,
        g_rows.head_col,
        k_rows.head_row,
        k_rows.head_col,
        dk_rows.head_row,
        dk_rows.head_col,
        dk_rows.matrix.stride(0),
        tiles,
        num_seqs,
        num_heads,
        slots,
        section(group, tokens, head_dim, num_heads),
        tokens,
        keys,
        band.window or 0,
        scale,
        scale * math.log2(math.e),
        FORM=Form(
            group=group,
            head_dim=head_dim,
            block_m=block_m,
            ring=config.ring,
            parts=config.parts,
            registers=config.registers,
            worker_registers=config.worker_registers,
            ragged=ragged,
            causal=band.causal,
            windowed=band.window is not None,
        ),
        **options,
    )
    launch(
        grad_q_kernel,
        (tiles, batch * heads),
        sums,
        counters[1:],
        dq,
        cu_q,
        *_strides(dq, ragged),
        num_seqs,
        heads,
        tokens,
        scale,
        **fixed,
    )
    return dq, dk, dv, delta


def section(group: int, tokens: int, head_dim: int, num_heads: int) -> int:
    """How many KV heads to go through at a time: as many as the L2 cache holds Q and dO of (16 bits) and sums of dQ
    (32 bits), those of all query heads of a group."""
    return min(num_heads, cached_heads(group * tokens * head_dim * 8))


_PLAIN: Any = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


class _HeadMatrix(NamedTuple):
    """A tensor as a matrix: head h begins `head_row * h` rows down and `head_col * h` columns across."""

    matrix: Tensor
    head_row: int
    head_col: int

    def descriptor(self, rows: int, head_dim: int) -> TensorDescriptor:
        layout: Any = gl.NVMMASharedLayout.get_default_for([rows, head_dim], _GLUON_TYPES[self.matrix.dtype])
        return TensorDescriptor.from_tensor(self.matrix, [rows, head_dim], layout)


def _head_rows(x: Tensor) -> _HeadMatrix:
    """x (B, H, N, D): heads lie one below another."""
    return _HeadMatrix(_aligned(x.contiguous()).view(-1, x.shape[3]), x.shape[2], 0)


def _token_rows(x: Tensor) -> _HeadMatrix:
    """x (T, H, D): heads lie side by side."""
    return _HeadMatrix(_aligned(x.contiguous()).view(x.shape[0], -1), 0, x.shape[2])


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy where it does not begin on 16 bytes, as the tensor memory accelerator needs it."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _strides(x: Tensor, ragged: bool) -> tuple[int, int, int]:
    """(batch, head, token) strides of x (B, H, N, ...) or, ragged, (T, H, ...)."""
    return (0, x.stride(1), x.stride(0)) if ragged else (x.stride(0), x.stride(1), x.stride(2))
