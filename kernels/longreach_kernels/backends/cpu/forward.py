"""The CPU backend: attention tile by tile through torch's own flash kernel, in memory linear in the length.

Why ``aten::_scaled_dot_product_flash_attention_for_cpu`` and not the public function: it returns the log-sum-exp, so
that pieces of a row computed apart (unmasked keys in one call without a mask, boundary keys in a call with a small one)
merge exactly. It takes fp64, fp32, bf16 and fp16 and any strides whose last is 1, wants the mask in the dtype of q or
fp32, and gives rows that see nothing an lse of 0, which is corrected here to -inf.

The queries of a KV head's group are laid one after the other as rows of one matrix, so that K and V are read once a
group and never expanded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from longreach_kernels.backends.cpu.keys import SequenceKeys
from longreach_kernels.backends.cpu.ranges import OneHead, visible_ranges
from longreach_kernels.backends.merge_lse import merge
from longreach_kernels.backends.protocol import CuSeqlens
from longreach_kernels.batch import PagedBatch
from longreach_kernels.call import AttentionCall
from longreach_kernels.masks.listed_mask import listed_masks
from longreach_kernels.masks.tile_ranges import TileRange
from longreach_kernels.sizes import TILE

# Rows of one call, a group's queries together. The kernel takes its widest query block from 768 rows on.
_ROWS = 1024
# A window tile of BQ queries reads BQ + window keys: small tiles waste fewer of them, large ones amortise the call.
_MIN_WINDOW_TILE = 256

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def _softcapped(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, seen: Tensor | None):
    """One piece with capped logits, which torch's kernel does not have: (out fp32, lse fp32)."""
    dtype = _lse_dtype(q)
    scores = softcap * torch.tanh(torch.matmul(q.to(dtype), k.to(dtype).mT) * (scale / softcap))
    if seen is not None:
        scores.masked_fill_(~seen, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = scores.sub_(lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp_()
    return torch.matmul(weights, v.to(dtype)), lse


def _piece(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, seen: Tensor | None):
    """Attention of rows q (Hkv, R, D) to keys (Hkv, n, D): out (Hkv, R, D), lse (Hkv, R)."""
    if softcap is not None:
        return _softcapped(q, k, v, scale, softcap, seen)
    if seen is None:
        out, lse = _flash(q[None], k[None], v[None], scale=scale)
        return out[0], lse[0]
    bias = torch.zeros(seen.shape, dtype=q.dtype).masked_fill_(~seen, -math.inf)
    out, lse = _flash(q[None], k[None], v[None], attn_mask=bias, scale=scale)
    return out[0], lse[0].masked_fill(~seen.any(-1), -math.inf)


def _together(keys: SequenceKeys, ranges: Sequence[TileRange]) -> Iterator[tuple[int, int, Tensor, Tensor, bool]]:
    """Cover ranges by (start, end, k, v, partial): those that need no mask in one piece, whose start and end mean
    nothing. Where tiles lie scattered, a call for each costs more than to copy their keys together."""
    full = [piece for r in ranges if not r.partial for piece in keys.slices(r.start, r.end)]
    if full:
        k, v = (torch.cat(x, 1) for x in ([piece[2] for piece in full], [piece[3] for piece in full]))
        yield 0, 0, k, v, False
    for r in ranges:
        if r.partial:
            for piece in keys.slices(r.start, r.end):
                yield *piece, True


def _sequence(q: Tensor, keys: SequenceKeys, out: Tensor, lse: Tensor, call: AttentionCall) -> None:
    """Attention of one sequence, written to ``out``; q and out (Hq, Nq, D), lse (Hq, Nq) fp32."""
    heads, num_queries, head_dim = q.shape
    if num_queries == 0:
        return
    kv_heads = keys.k.shape[1]
    group = heads // kv_heads
    mask, sink_logits = call.mask, call.sink_logits
    if mask.heads > 1:
        # Heads that share the mask go together if they are whole groups: their keys are then read once.
        sharing = heads // mask.heads
        step = sharing if sharing % group == 0 else 1
        for head in range(0, heads, step):
            own, kv = slice(head, head + step), slice(head // group, (head + step - 1) // group + 1)
            scales = None if keys.scales is None else (keys.scales[0][kv], keys.scales[1][kv])
            k, v = keys.k[:, kv], keys.v[:, kv]
            head_keys = SequenceKeys(k, v, keys.length, keys.starts, keys.rows, scales, keys.dtype)
            sinks = None if sink_logits is None else sink_logits[own]
            own_call = replace(call, mask=OneHead(mask, head // sharing), sink_logits=sinks)
            _sequence(q[own], head_keys, out[own], lse[own], own_call)
        return
    tile = max(1, _ROWS // group)
    band = mask.band
    if band is None:
        tile = min(tile, TILE)
    elif band.window is not None:
        tile = min(tile, max(_MIN_WINDOW_TILE, band.window))
    offset = keys.length - num_queries
    for start in range(0, num_queries, tile):
        end = min(start + tile, num_queries)
        rows = q[:, start:end].reshape(kv_heads, group * (end - start), head_dim)
        tile_out = tile_lse = None
        ranges = visible_ranges(mask, offset + start, offset + end, keys.length)
        if band is None:
            pieces = _together(keys, ranges)
        else:
            pieces = ((*piece, r.partial) for r in ranges for piece in keys.slices(r.start, r.end))
        for a, b, k, v, partial in pieces:
            seen = None
            if partial:
                seen = mask.allowed(torch.arange(offset + start, offset + end), torch.arange(a, b))
                seen = seen.repeat(group, 1)
            piece = _piece(rows, k, v, call.scale, call.softcap, seen)
            if tile_out is None or tile_lse is None:
                tile_out, tile_lse = piece
            else:
                tile_out, tile_lse = merge(tile_out.to(tile_lse.dtype), tile_lse, *piece)
        if tile_out is None or tile_lse is None:
            out[:, start:end] = 0
            tile_lse = torch.full((heads, end - start), -math.inf, dtype=lse.dtype)
            tile_out = None
        if sink_logits is not None:
            logits = sink_logits.to(tile_lse.dtype).view(heads, 1)
            unsunk = tile_lse.reshape(heads, end - start)
            tile_lse = torch.logaddexp(unsunk, logits)
            if tile_out is not None:
                tile_out = tile_out * torch.exp(unsunk - tile_lse).view(kv_heads, -1, 1)
        if tile_out is not None:
            out[:, start:end] = tile_out.reshape(heads, end - start, head_dim)
        lse[:, start:end] = tile_lse.reshape(heads, end - start)


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _by_head(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


def attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Attention of a dense batch; q (B, Hq, Nq, D), k, v (B, Hkv, Nk, D): out like q, lse (B, Hq, Nq) fp32."""
    out = torch.empty(q.shape, dtype=q.dtype)
    lse = torch.empty(q.shape[:3], dtype=_lse_dtype(q))
    for b in range(q.shape[0]):
        keys = SequenceKeys(_by_head(k[b]), _by_head(v[b]), k.shape[2])
        _sequence(q[b], keys, out[b], lse[b], call)
    return out, lse


def ragged_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: CuSeqlens, call: AttentionCall
) -> tuple[Tensor, Tensor]:
    """Attention of sequences laid end to end; q (Tq, Hq, D), k, v (Tk, Hkv, D): out like q, lse (Tq, Hq) fp32."""
    out = torch.empty(q.shape, dtype=q.dtype)
    lse = torch.empty(q.shape[:2], dtype=_lse_dtype(q))
    cu_q, cu_k = cu_seqlens.q.tolist(), cu_seqlens.k.tolist()
    for b in range(len(cu_q) - 1):
        rows = slice(cu_q[b], cu_q[b + 1])
        span = slice(cu_k[b], cu_k[b + 1])
        keys = SequenceKeys(k[span], v[span], cu_k[b + 1] - cu_k[b])
        _sequence(_by_head(q[rows]), keys, _by_head(out[rows]), lse[rows].T, call)
    return out, lse


def paged_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: PagedBatch, call: AttentionCall
) -> tuple[Tensor, Tensor]:
    """Attention over pages; q (T, Hq, D), k_pages, v_pages (P, page_size, Hkv, D): out like q, lse (T, Hq) fp32."""
    out = torch.empty(q.shape, dtype=q.dtype)
    lse = torch.empty(q.shape[:2], dtype=_lse_dtype(q))
    k, v = k_pages.flatten(0, 1), v_pages.flatten(0, 1)
    calls = [call] * batch.size
    if call.lists is not None:
        calls = [replace(call, mask=mask) for mask in listed_masks(call.lists, *batch.host_lengths)]
    for sequence, own in zip(batch.host_sequences(k_pages.shape[1]), calls, strict=True):
        rows = slice(sequence.q_start, sequence.q_end)
        keys = SequenceKeys(k, v, sequence.context_len, sequence.run_starts, sequence.run_rows, call.kv_scales, q.dtype)
        _sequence(_by_head(q[rows]), keys, _by_head(out[rows]), lse[rows].T, own)
    return out, lse
