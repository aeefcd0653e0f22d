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
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longreach_kernels.backends.reference.forward import quantized
from longreach_kernels.batch import PagedBatch
from longreach_kernels.masks.listed_mask import listed_masks
from longreach_kernels.masks.mask import Mask
from longreach_kernels.masks.tile_lists import TileLists
from longreach_kernels.masks.tile_ranges import TileRange, key_ranges
from longreach_kernels.merging import merge
from longreach_kernels.needs import DecodeNeeds
from longreach_kernels.sizes import TILE

# Rows of one call, a group's queries together. The kernel takes its widest query block from 768 rows on.
_ROWS = 1024
# A window tile of BQ queries reads BQ + window keys: small tiles waste fewer of them, large ones amortise the call.
_MIN_WINDOW_TILE = 256
# Runs of consecutive pages are read in place, one call each; beyond this many the pages are copied together first.
_MAX_RUNS = 8

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class _Keys:
    """The keys and values of one sequence inside tensors of rows (rows, Hkv, D), in runs of consecutive rows."""

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        length: int,
        starts: Sequence[int] = (0,),
        rows: Sequence[int] = (0,),
        scales: tuple[Tensor, Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.k, self.v, self.length = k, v, length
        self.scales = scales  # (Hkv,) factors of 8-bit keys and values, which `slices` gives in ``dtype``
        self.dtype = dtype
        self.starts = starts  # position of the first key of each run, ascending
        self.rows = rows  # the row where it lies

    def slices(self, start: int, end: int) -> list[tuple[int, int, Tensor, Tensor]]:
        """Cover the keys ``start <= key < end`` by (start, end, k, v), with k and v views (Hkv, n, D)."""
        first = bisect_right(self.starts, start) - 1
        last = bisect_left(self.starts, end)
        if last - first > _MAX_RUNS:
            stops = [*self.starts[first + 1 : last], end]
            spans = [
                torch.arange(row, row + stop - position)
                for position, row, stop in zip(self.starts[first:last], self.rows[first:last], stops, strict=True)
            ]
            index = torch.cat(spans)[start - self.starts[first] :]
            pieces = [(start, end, self.k.index_select(0, index), self.v.index_select(0, index))]
        else:
            pieces = []
            for run in range(first, last):
                a, b = max(start, self.starts[run]), end if run + 1 == len(self.starts) else self.starts[run + 1]
                b = min(b, end)
                row = self.rows[run] + a - self.starts[run]
                pieces.append((a, b, self.k[row : row + b - a], self.v[row : row + b - a]))
        if self.scales is not None:
            k_scale, v_scale = (x.to(self.dtype)[:, None] for x in self.scales)
            pieces = [(a, b, k.to(self.dtype) * k_scale, v.to(self.dtype) * v_scale) for a, b, k, v in pieces]
        return [(a, b, k.transpose(0, 1), v.transpose(0, 1)) for a, b, k, v in pieces]


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


@dataclass(frozen=True)
class OneHead(Mask):
    """One head of a mask that tells heads apart."""

    mask: Mask
    head: int

    def sees(self, q: Tensor, k: Tensor, head: Tensor | int = 0) -> Tensor:
        """See `Mask.sees`."""
        return self.mask.sees(q, k, self.head)

    def tile_state(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """See `Mask.tile_state`."""
        some, every = self.mask.tile_state(q, k)
        return some[self.head : self.head + 1], every[self.head : self.head + 1]


def visible_ranges(mask: Mask, q_start: int, q_end: int, num_keys: int) -> Sequence[TileRange]:
    """Ranges of keys that the queries at positions ``q_start <= q < q_end`` visit."""
    if mask.band is not None:
        return key_ranges(mask, q_start, q_end, num_keys, 1)
    if num_keys == 0:
        return ()
    edges = torch.arange(0, num_keys, TILE)
    edges = torch.stack([edges, (edges + TILE).clamp(max=num_keys) - 1], dim=1)
    some, every = mask.tile_state(torch.tensor([[q_start, q_end - 1]]), edges)
    state = (some[0, 0].int() + (some & every)[0, 0].int()).tolist()  # 0 none, 1 partial, 2 full
    ranges: list[TileRange] = []
    for i, kind in enumerate(state):
        start, end = i * TILE, min((i + 1) * TILE, num_keys)
        if kind and ranges and ranges[-1].end == start and ranges[-1].partial == (kind == 1):
            ranges[-1] = TileRange(ranges[-1].start, end, kind == 1)
        elif kind:
            ranges.append(TileRange(start, end, kind == 1))
    return ranges


def _together(keys: _Keys, ranges: Sequence[TileRange]) -> Iterator[tuple[int, int, Tensor, Tensor, bool]]:
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


def _sequence(
    q: Tensor,
    keys: _Keys,
    mask: Mask,
    out: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float | None,
    sink_logits: Tensor | None,
) -> None:
    """Attention of one sequence, written to ``out``; q and out (Hq, Nq, D), lse (Hq, Nq) fp32."""
    heads, num_queries, head_dim = q.shape
    if num_queries == 0:
        return
    kv_heads = keys.k.shape[1]
    group = heads // kv_heads
    if mask.heads > 1:
        # Heads that share the mask go together if they are whole groups: their keys are then read once.
        sharing = heads // mask.heads
        step = sharing if sharing % group == 0 else 1
        for head in range(0, heads, step):
            own, kv = slice(head, head + step), slice(head // group, (head + step - 1) // group + 1)
            scales = None if keys.scales is None else (keys.scales[0][kv], keys.scales[1][kv])
            k, v = keys.k[:, kv], keys.v[:, kv]
            head_keys = _Keys(k, v, keys.length, keys.starts, keys.rows, scales, keys.dtype)
            sinks = None if sink_logits is None else sink_logits[own]
            _sequence(
                q[own],
                head_keys,
                OneHead(mask, head // sharing),
                out[own],
                lse[own],
                scale,
                softcap,
                sinks,
            )
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
            piece = _piece(rows, k, v, scale, softcap, seen)
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


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of a dense batch; q (B, Hq, Nq, D), k, v (B, Hkv, Nk, D): out like q, lse (B, Hq, Nq) fp32."""
    out = torch.empty(q.shape, dtype=q.dtype)
    lse = torch.empty(q.shape[:3], dtype=_lse_dtype(q))
    for b in range(q.shape[0]):
        keys = _Keys(_by_head(k[b]), _by_head(v[b]), k.shape[2])
        _sequence(q[b], keys, mask, out[b], lse[b], scale, softcap, sink_logits)
    return out, lse


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
) -> tuple[Tensor, Tensor]:
    """Attention of sequences laid end to end; q (Tq, Hq, D), k, v (Tk, Hkv, D): out like q, lse (Tq, Hq) fp32."""
    out = torch.empty(q.shape, dtype=q.dtype)
    lse = torch.empty(q.shape[:2], dtype=_lse_dtype(q))
    cu_q, cu_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(cu_q) - 1):
        rows = slice(cu_q[b], cu_q[b + 1])
        span = slice(cu_k[b], cu_k[b + 1])
        keys = _Keys(k[span], v[span], cu_k[b + 1] - cu_k[b])
        _sequence(_by_head(q[rows]), keys, mask, _by_head(out[rows]), lse[rows].T, scale, softcap, sink_logits)
    return out, lse


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
) -> tuple[Tensor, Tensor]:
    """Attention over pages; q (T, Hq, D), k_pages, v_pages (P, page_size, Hkv, D): out like q, lse (T, Hq) fp32.

    With ``lists``, what they let through, and the mask is not looked at."""
    out = torch.empty(q.shape, dtype=q.dtype)
    lse = torch.empty(q.shape[:2], dtype=_lse_dtype(q))
    k, v = k_pages.flatten(0, 1), v_pages.flatten(0, 1)
    masks: Sequence[Mask] = [mask] * batch.size if lists is None else listed_masks(lists, *batch.host_lengths)
    for sequence, own_mask in zip(batch.host_sequences(k_pages.shape[1]), masks, strict=True):
        rows = slice(sequence.q_start, sequence.q_end)
        keys = _Keys(k, v, sequence.context_len, sequence.run_starts, sequence.run_rows, kv_scales, q.dtype)
        _sequence(_by_head(q[rows]), keys, own_mask, _by_head(out[rows]), lse[rows].T, scale, softcap, sink_logits)
    return out, lse


def decode_needs(q: Tensor, k_pages: Tensor, num_seqs: int, max_context_len: int) -> DecodeNeeds:
    """Nothing that is worth counting: one sequence after the other."""
    return DecodeNeeds(0, by_length=True)


def list_tiles(q: Tensor, k_pages: Tensor) -> tuple[int, int]:
    """Queries and keys of a tile of the lists that suit `paged_attention`; it takes others too."""
    return TILE, TILE


def write_pages(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    kv_scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write the rows of k and v (T, Hkv, D) to their slots; a slot of -1 is skipped."""
    if bool((slots < 0).any()):
        kept = slots >= 0
        k, v, slots = k[kept], v[kept], slots[kept]
    k, v = quantized(k, v, k_pages.dtype, kv_scales)
    k_pages.view(-1, *k_pages.shape[2:])[slots] = k
    v_pages.view(-1, *v_pages.shape[2:])[slots] = v
