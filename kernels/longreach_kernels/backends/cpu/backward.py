"""The backward pass of the CPU backend: tiles of eager products, in memory linear in the length.

Torch's own flash backward takes neither a softcap nor a gradient of the log-sum-exp, so the five products of
FlashAttention-2 (Dao 2023, algorithm 2) are written out here, with the weights of a tile computed again from the
saved log-sum-exp. See `longreach_kernels.backends.triton.backward_launch` for the equations.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from longreach_kernels.backends.cpu.ranges import OneHead, visible_ranges
from longreach_kernels.backends.protocol import Saved
from longreach_kernels.call import AttentionCall
from longreach_kernels.sizes import TILE

# Queries (of a group together) and keys of a tile.
_ROWS = 512
_KEYS = 1024


def _sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    lse: Tensor,
    delta: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    call: AttentionCall,
) -> None:
    """Add one sequence's gradients to ``grads``; q, grad (Hq, Nq, D), k, v (Hkv, Nk, D), lse, delta (Hq, Nq)."""
    heads, num_queries, head_dim = q.shape
    kv_heads, num_keys = k.shape[:2]
    group = heads // kv_heads
    mask, scale, softcap = call.mask, call.scale, call.softcap
    if mask.heads > 1:
        for head in range(heads):
            own, kv = slice(head, head + 1), slice(head // group, head // group + 1)
            one_grads = (grads[0][own], grads[1][kv], grads[2][kv])
            one = replace(call, mask=OneHead(mask, head // (heads // mask.heads)))
            _sequence(q[own], k[kv], v[kv], grad[own], lse[own], delta[own], one_grads, one)
        return
    dq, dk, dv = grads
    tile = max(1, _ROWS // group) if mask.band is not None else TILE
    offset = num_keys - num_queries
    for start in range(0, num_queries, tile):
        end = min(start + tile, num_queries)
        shape = (kv_heads, group * (end - start))
        rows, row_grad = (x[:, start:end].reshape(*shape, head_dim).to(dq.dtype) for x in (q, grad))
        row_lse, row_delta = (x[:, start:end].reshape(*shape, 1).to(dq.dtype) for x in (lse, delta))
        row_lse = row_lse.masked_fill(row_lse == -math.inf, math.inf)  # a row that saw nothing has weights 0
        row_dq = torch.zeros_like(rows)
        for r in visible_ranges(mask, offset + start, offset + end, num_keys):
            for a in range(r.start, r.end, _KEYS):
                b = min(a + _KEYS, r.end)
                keys, values = k[:, a:b].to(dq.dtype), v[:, a:b].to(dq.dtype)
                logits = rows @ keys.mT * scale
                slope = None
                if softcap is not None:
                    tanh = torch.tanh(logits / softcap)
                    logits, slope = softcap * tanh, 1 - tanh * tanh
                p = torch.exp(logits - row_lse)
                if r.partial:
                    seen = mask.allowed(torch.arange(offset + start, offset + end), torch.arange(a, b))
                    p = p.masked_fill(~seen.repeat(group, 1), 0.0)
                dv[:, a:b] += p.mT @ row_grad
                ds = p * (row_grad @ values.mT - row_delta) * scale
                if slope is not None:
                    ds = ds * slope
                row_dq += ds @ keys
                dk[:, a:b] += ds.mT @ rows
        dq[:, start:end] = row_dq.reshape(heads, end - start, head_dim)


def _by_head(x: Tensor, rows: slice) -> Tensor:
    return x[rows].transpose(0, 1)


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, saved: Saved, call: AttentionCall
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of a dense or ragged batch; shapes as in the forward pass.

    Returns:
        dq, dk, dv like q, k, v (contiguous), and delta like lse, from which the gradient of sink logits follows.
    """
    q, k, v, out, lse, cu_seqlens = saved
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    delta = (out.to(dtype) * grad_out.to(dtype)).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    grads = tuple(torch.zeros(x.shape, dtype=dtype) for x in (q, k, v))
    if cu_seqlens is None:
        for b in range(q.shape[0]):
            own = (grads[0][b], grads[1][b], grads[2][b])
            _sequence(q[b], k[b], v[b], grad_out[b], lse[b], delta[b], own, call)
    else:
        cu_q, cu_k = cu_seqlens.q.tolist(), cu_seqlens.k.tolist()
        for b in range(len(cu_q) - 1):
            rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
            own = (_by_head(grads[0], rows), _by_head(grads[1], keys), _by_head(grads[2], keys))
            _sequence(
                _by_head(q, rows),
                _by_head(k, keys),
                _by_head(v, keys),
                _by_head(grad_out, rows),
                lse[rows].T,
                delta[rows].T,
                own,
                call,
            )
    dq, dk, dv = (x.to(q.dtype) for x in grads)
    return dq, dk, dv, delta.to(lse.dtype)
