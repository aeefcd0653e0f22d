"""The backward pass in plain Triton: dQ by query tiles, dK and dV by key tiles; deterministic, no atomics.

FlashAttention-2 (Dao 2023, algorithm 2), split in two: with the saved log-sum-exp L and
``delta = rowsum(dO * O) - dL``,

    P = exp(S - L)    dV = P^T dO    dS = P * (dO V^T - delta)    dQ = scale * dS K    dK = scale * dS^T Q

each tile of P is computed again where it is needed. Rows that saw nothing have L = -inf, read here as +inf: P is then
0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longreach_kernels.backends.protocol import Saved
from longreach_kernels.backends.triton.arguments import form, lists_of, logit_scales, padded, strides
from longreach_kernels.backends.triton.backward_delta import delta_kernel
from longreach_kernels.backends.triton.backward_dkdv import dkdv_kernel
from longreach_kernels.backends.triton.backward_dq import dq_kernel
from longreach_kernels.backends.triton.config import (
    TileConfig,
    backward_configs,
    capability,
    cdiv,
    launch,
    sparse_backward_config,
)
from longreach_kernels.backends.triton.forward_launch import pair_lengths
from longreach_kernels.call import AttentionCall
from longreach_kernels.masks.tile_lists import TileLists, ragged_tile_lists


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, saved: Saved, call: AttentionCall
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of a dense or ragged batch; shapes as in the forward pass.

    Returns:
        dq, dk, dv like q, k, v (contiguous), and delta like lse, from which the gradient of sink logits follows.
    """
    q, k, v, out, lse, cu_seqlens = saved
    mask, ragged = call.mask, cu_seqlens is not None
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta = torch.empty_like(lse)
    heads, head_dim = q.shape[1], q.shape[-1]
    tokens, keys = (q.shape[0], k.shape[0]) if ragged else (q.shape[2], k.shape[2])
    if grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()
    if tokens == 0 or keys == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), delta.zero_()
    launch(
        delta_kernel,
        (cdiv(tokens, 64), heads, 1 if ragged else q.shape[0]),
        out,
        grad_out,
        grad_lse,
        delta,
        *(strides(x, token_major=ragged) for x in (out, grad_out, delta)),
        strides(grad_lse, token_major=ragged) if grad_lse is not None else (0, 0, 0),
        tokens,
        HEAD_DIM=head_dim,
        BLOCK_D=padded(head_dim),
        BLOCK_M=64,
    )
    dq_config, dkdv_config = backward_configs(head_dim, q.dtype, capability(q.device))
    dq_lists = dkdv_lists = None
    band = mask.band
    if band is None:
        dq_config, dkdv_config = (sparse_backward_config(c, mask) for c in (dq_config, dkdv_config))
        lengths = ((tokens,), (keys,)) if cu_seqlens is None else pair_lengths(cu_seqlens)
        dq_lists = ragged_tile_lists(mask, *lengths, dq_config.block_m, dq_config.block_n, q.device)
        tile_q, tile_k = dkdv_config.block_m, dkdv_config.block_n
        dkdv_lists = ragged_tile_lists(mask, *lengths, tile_q, tile_k, q.device, by_keys=True)
    num_seqs = q.shape[0] if cu_seqlens is None else cu_seqlens.q.shape[0] - 1
    inputs = (q, k, v, grad_out, lse, delta)
    numbers = (num_seqs, tokens, keys, (band.window or 0) if band else 0, band.sinks if band else 0)

    def run(
        kernel: object, config: TileConfig, lists: TileLists | None, length: int, block: int, *grads: Tensor
    ) -> None:
        num_heads = grads[0].shape[1]
        launch(
            kernel,
            (num_heads, cdiv(length, block) + num_seqs if ragged else cdiv(length, block) * num_seqs),
            *inputs,
            *grads,
            *(cu_seqlens or (None, None)),
            lists_of(lists, heads),
            *(strides(x, token_major=ragged) for x in (q, k, v, grad_out, lse, grads[0])),
            *numbers,
            call.scale,
            *logit_scales(call.scale, call.softcap),
            num_heads,
            FORM=form(q, k.shape[1], config, band, call, ragged=ragged),
            **config.options(),
        )

    run(dkdv_kernel, dkdv_config, dkdv_lists, keys, dkdv_config.block_n, dk, dv)
    run(dq_kernel, dq_config, dq_lists, tokens, dq_config.block_m, dq)
    return dq, dk, dv, delta
