"""How much of the attention of a few queries went to keys that were kept: exactly, from log-sum-exps."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from longreach_kernels.batch import PagedBatch
from longreach_kernels.masks.tile_lists import TileLists
from longreach_kernels.paged_api import list_tiles, paged_attention
from longreach_kernels.sparse.select.lists import cut_frame, lists_of_choice
from longreach_kernels.sparse.select.query_tiles import query_tiles


@torch.no_grad()
def kept_mass(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: PagedBatch,
    lse: Tensor,
    rows: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """The share of dense attention's weight that lies on what sparse attention saw: ``exp(lse - dense lse)``.

    The sampled rows of a sequence are attended to its keys together, as if they were one short chunk, so that its keys
    are read once for each 128 of them or so. Does not wait for the device, except on a CPU.

    Args:
        q, k_pages, v_pages, batch, scale, softcap, sink_logits, k_scale, v_scale, backend: as given to
            `paged_attention` when it computed ``lse``. A learned sink's weight counts as kept.
        lse: (T, Hq), the log-sum-exp that it returned.
        rows: (R,) int64 on the device of q, ascending: which of the T queries to look at.
        window: keys that dense attention sees, the query itself counted; None for all before it.

    Returns:
        (R, Hq) fp32, between 0 and 1.

    Raises:
        ValueError: an argument does not fit; the message begins with its name.
    """
    if rows.dtype != torch.int64 or rows.dim() != 1 or rows.device != q.device:
        raise ValueError(f"rows: needs int64 (R,) on {q.device}, got {rows.dtype} {tuple(rows.shape)} on {rows.device}")
    if lse.shape != q.shape[:2] or lse.device != q.device:
        raise ValueError(f"lse: needs {tuple(q.shape[:2])} on {q.device}, got {tuple(lse.shape)} on {lse.device}")
    if window is not None and window < 1:
        raise ValueError(f"window: must be at least 1, the query itself, or None, got {window}")
    if rows.numel() == 0:
        return lse.new_empty((0, q.shape[1]))
    starts = batch.cu_seqlens_q.long()
    seq = torch.searchsorted(starts, rows, right=True) - 1
    position = batch.context_lens.long()[seq] - starts[seq + 1] + rows
    sampled = replace(
        batch,
        cu_seqlens_q=torch.searchsorted(rows, starts).int(),
        max_seqlen_q=rows.numel(),
        num_decodes=0,
    )
    sizes = list_tiles(q, k_pages, backend=backend)
    _, dense = paged_attention(
        q[rows],
        k_pages,
        v_pages,
        sampled,
        scale=scale,
        softcap=softcap,
        sink_logits=sink_logits,
        k_scale=k_scale,
        v_scale=v_scale,
        lists=_dense_lists(sampled, position, *sizes, window),
        backend=backend,
        return_lse=True,
    )
    return kept_share(lse[rows], dense)


def kept_share(lse: Tensor, dense_lse: Tensor) -> Tensor:
    """The share of dense attention's weight that sparse attention saw, between 0 and 1: ``exp(lse - dense lse)``.

    Args:
        lse, dense_lse: log-sum-exps of the same queries, of one shape, over the keys that were seen and over all.
    """
    share = torch.exp(lse - dense_lse).clamp(max=1.0)  # two kernels may round the same sum differently, to just above 1
    return torch.where(dense_lse == float("-inf"), 1.0, share)  # a query that sees nothing has lost nothing


def _dense_lists(batch: PagedBatch, position: Tensor, tile_q: int, tile_k: int, window: int | None) -> TileLists:
    """Lists in which each row sees all keys up to its own ``position`` (R,), or those of its window."""
    tiles = query_tiles(batch, len(position), tile_q, tile_k, None)
    row = batch.cu_seqlens_q.long()[tiles.seq] + tiles.tile * tile_q
    row = row[:, None] + torch.arange(tile_q, device=row.device)
    real = tiles.exists[:, None] & (row < batch.cu_seqlens_q.long()[tiles.seq + 1][:, None])
    at = torch.where(real, position[row.clamp(max=len(position) - 1)], -1)  # (Q, tile_q)
    words = tiles.key_starts[:, None] + torch.arange(tile_k // 32, device=row.device) * 32  # (K, words)
    bits = _first_bits(at[:, None, :, None] + 1 - words[:, None])
    if window is not None:
        bits &= ~_first_bits(at[:, None, :, None] + 1 - window - words[:, None])
    seen = (bits != 0).flatten(2).any(-1)
    bit_tile = torch.arange(seen.numel(), device=row.device).view(seen.shape)
    frame = cut_frame(tiles, 1, bit_tile.int(), bits.flatten(0, 1).contiguous())
    return lists_of_choice(seen[None], frame, kernels=seen.is_cuda)


def _first_bits(count: Tensor) -> Tensor:
    """Words of 32 bits of which the first ``count`` are set, clamped to 0 to 32; int32."""
    word = (torch.ones_like(count) << count.clamp(0, 32)) - 1
    return torch.where(word >= 1 << 31, word - (1 << 32), word).int()
