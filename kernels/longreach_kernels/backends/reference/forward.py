"""Eager attention, the specification of every kernel here: it builds the whole score matrix, on any device.

    out = softmax(softcap(scale * Q K^T) + mask) V        lse = log sum exp(softcap(scale * Q K^T) + mask)

with ``softcap(x) = c * tanh(x / c)``, and, with sink logits ``s`` (one a head, as in gpt-oss), one more column
``s`` in the softmax that has no value. A row that sees nothing gives out 0 and lse -inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longreach_kernels.batch import PagedBatch
from longreach_kernels.masks.listed_mask import listed_masks
from longreach_kernels.masks.mask import Mask
from longreach_kernels.masks.tile_lists import TileLists
from longreach_kernels.needs import DecodeNeeds


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
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
    scores = q @ k.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    q_positions = torch.arange(num_keys - num_queries, num_keys, device=q.device)
    allowed = mask.allowed(q_positions, torch.arange(num_keys, device=q.device))
    if allowed.dim() == 3:
        allowed = allowed.repeat_interleave(q.shape[1] // mask.heads, dim=0)
    scores = scores.masked_fill(~allowed, float("-inf"))
    columns = scores
    if sink_logits is not None:
        sinks = sink_logits.to(compute_dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
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
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    mask: Mask,
    *,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of sequences laid end to end, one after the other: out (Tq, Hq, D), lse (Tq, Hq)."""
    return _ragged(
        q,
        k,
        v,
        cu_seqlens_q.tolist(),
        cu_seqlens_k.tolist(),
        mask,
        scale=scale,
        softcap=softcap,
        sink_logits=sink_logits,
        compute_dtype=compute_dtype,
    )


def _ragged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Sequence[int],
    cu_k: Sequence[int],
    masks: Mask | Sequence[Mask],
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """As `ragged_attention`, with one mask for all sequences or one for each."""
    outs, lses = [], []
    for b in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        out, lse = attention(
            q[None, rows].transpose(1, 2),
            k[None, keys].transpose(1, 2),
            v[None, keys].transpose(1, 2),
            masks if isinstance(masks, Mask) else masks[b],
            **options,
        )
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0].transpose(0, 1))
    return torch.cat(outs), torch.cat(lses)


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: PagedBatch,
    mask: Mask,
    *,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    kv_scales: tuple[Tensor, Tensor] | None = None,
    lists: TileLists | None = None,
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over pages, by gathering each sequence's keys: out (T, Hq, D), lse (T, Hq).

    ``kv_scales``: (Hkv,) factors of the heads of k_pages and of v_pages. With ``lists``, what they let through, and the
    mask is not looked at.
    """
    if kv_scales is not None:
        wide = torch.float64 if compute_dtype == torch.float64 else torch.float32
        k_pages, v_pages = (
            x.to(wide) * s.to(wide)[:, None] for x, s in zip((k_pages, v_pages), kv_scales, strict=True)
        )
    page_size = k_pages.shape[1]
    keys, values, cu_k = [], [], [0]
    for b, length in enumerate(batch.context_lens.tolist()):
        pages = batch.page_table[b, : -(-length // page_size)].long()
        keys.append(k_pages[pages].flatten(0, 1)[:length])
        values.append(v_pages[pages].flatten(0, 1)[:length])
        cu_k.append(cu_k[-1] + length)
    masks = mask if lists is None else listed_masks(lists, *batch.host_lengths)
    return _ragged(
        q,
        torch.cat(keys),
        torch.cat(values),
        batch.cu_seqlens_q.tolist(),
        cu_k,
        masks,
        scale=scale,
        softcap=softcap,
        sink_logits=sink_logits,
        compute_dtype=compute_dtype,
    )


def decode_needs(q: Tensor, k_pages: Tensor, num_seqs: int, max_context_len: int) -> DecodeNeeds:
    """Nothing that is worth counting: one sequence after the other."""
    return DecodeNeeds(0, by_length=True)


def list_tiles(q: Tensor, k_pages: Tensor) -> tuple[int, int]:
    """Queries and keys of a tile of the lists that `paged_attention` takes; any others serve as well."""
    return 128, 128


def write_pages(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    kv_scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write the rows of k and v (T, Hkv, D) to their slots; a slot of -1 is skipped."""
    kept = slots >= 0
    index = slots[kept]
    k, v = quantized(k[kept], v[kept], k_pages.dtype, kv_scales)
    k_pages.view(-1, *k_pages.shape[2:])[index] = k
    v_pages.view(-1, *v_pages.shape[2:])[index] = v


def quantized(
    k: Tensor, v: Tensor, dtype: torch.dtype, kv_scales: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """k and v (T, Hkv, D) in the dtype of pages: divided by their heads' scales, and clamped to what fp8 holds."""
    if kv_scales is None:
        return k.to(dtype), v.to(dtype)
    limit = torch.finfo(dtype).max
    k, v = ((x.float() / s[:, None]).clamp(-limit, limit).to(dtype) for x, s in zip((k, v), kv_scales, strict=True))
    return k, v
