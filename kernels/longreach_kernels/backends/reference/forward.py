"""Eager attention, the specification of every kernel here: it builds the whole score matrix, on any device.

    out = softmax(softcap(scale * Q K^T) + mask) V        lse = log sum exp(softcap(scale * Q K^T) + mask)

with ``softcap(x) = c * tanh(x / c)``, and, with sink logits ``s`` (one a head, as in gpt-oss), one more column
``s`` in the softmax that has no value. A row that sees nothing gives out 0 and lse -inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from longreach_kernels.backends.protocol import CuSeqlens
from longreach_kernels.batch import PagedBatch
from longreach_kernels.call import AttentionCall
from longreach_kernels.masks.listed_mask import listed_masks
from longreach_kernels.masks.mask import Mask


def attention(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, *, compute_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of a dense batch; q (B, Hq, Nq, D), k and v (B, Hkv, Nk, D).

    Computes and returns in ``compute_dtype`` (fp64 for fp64 inputs, else fp32, unless given):
    out (B, Hq, Nq, D), lse (B, Hq, Nq). Differentiable by autograd.
    """
    if compute_dtype is None:
        compute_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // k.shape[1]
    num_queries, num_keys = q.shape[2], k.shape[2]
    q, k, v = q.to(compute_dtype), k.to(compute_dtype), v.to(compute_dtype)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.mT * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    q_positions = torch.arange(num_keys - num_queries, num_keys, device=q.device)
    allowed = call.mask.allowed(q_positions, torch.arange(num_keys, device=q.device))
    if allowed.dim() == 3:
        allowed = allowed.repeat_interleave(q.shape[1] // call.mask.heads, dim=0)
    scores = scores.masked_fill(~allowed, float("-inf"))
    columns = scores
    if call.sink_logits is not None:
        sinks = call.sink_logits.to(compute_dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        columns = torch.cat([scores, sinks], dim=-1)
    empty = ~allowed.any(-1)  # with a sink logit such a row is still 0, and its lse is the sink's
    lse = torch.logsumexp(columns, dim=-1)
    # exp(-inf - -inf) would be NaN for rows that see nothing; no row that sees something has lse -inf.
    weights = torch.exp(scores - lse.masked_fill(empty, 0.0)[..., None])
    return weights @ v, lse


def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: CuSeqlens,
    call: AttentionCall,
    *,
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of sequences laid end to end, one after the other: out (Tq, Hq, D), lse (Tq, Hq)."""
    cu_q, cu_k = cu_seqlens.q.tolist(), cu_seqlens.k.tolist()
    return _ragged(q, k, v, cu_q, cu_k, [call.mask] * (len(cu_q) - 1), call, compute_dtype)


def _ragged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Sequence[int],
    cu_k: Sequence[int],
    masks: Sequence[Mask],
    call: AttentionCall,
    compute_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """As `ragged_attention`, with a mask for each sequence in place of the call's."""
    outs, lses = [], []
    for b in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        out, lse = attention(
            q[None, rows].transpose(1, 2),
            k[None, keys].transpose(1, 2),
            v[None, keys].transpose(1, 2),
            replace(call, mask=masks[b]),
            compute_dtype=compute_dtype,
        )
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0].transpose(0, 1))
    return torch.cat(outs), torch.cat(lses)


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: PagedBatch,
    call: AttentionCall,
    *,
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over pages, by gathering each sequence's keys: out (T, Hq, D), lse (T, Hq)."""
    if call.kv_scales is not None:
        wide = torch.float64 if compute_dtype == torch.float64 else torch.float32
        k_pages, v_pages = (
            x.to(wide) * s.to(wide)[:, None] for x, s in zip((k_pages, v_pages), call.kv_scales, strict=True)
        )
    page_size = k_pages.shape[1]
    keys, values, cu_k = [], [], [0]
    for b, length in enumerate(batch.context_lens.tolist()):
        pages = batch.page_table[b, : -(-length // page_size)].long()
        keys.append(k_pages[pages].flatten(0, 1)[:length])
        values.append(v_pages[pages].flatten(0, 1)[:length])
        cu_k.append(cu_k[-1] + length)
    masks = [call.mask] * batch.size if call.lists is None else listed_masks(call.lists, *batch.host_lengths)
    return _ragged(q, torch.cat(keys), torch.cat(values), batch.cu_seqlens_q.tolist(), cu_k, masks, call, compute_dtype)
