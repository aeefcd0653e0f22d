"""Launches of the forward kernel: dense, ragged and paged batches."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from longreach_kernels.backends.protocol import CuSeqlens
from longreach_kernels.backends.triton.arguments import (
    Sequences,
    form,
    lists_of,
    logit_scales,
    page_strides,
    strides,
)
from longreach_kernels.backends.triton.config import (
    TileConfig,
    capability,
    cdiv,
    forward_config,
    launch,
    section_heads,
    sparse_config,
)
from longreach_kernels.backends.triton.forward import forward_kernel
from longreach_kernels.batch import PagedBatch
from longreach_kernels.call import AttentionCall
from longreach_kernels.masks.mask import Full, Mask
from longreach_kernels.masks.tile_lists import TileLists, ragged_tile_lists, tile_lists


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: AttentionCall,
    config: TileConfig,
    lists: TileLists | None,
    sequences: Sequences,
) -> None:
    """``lists``: those of the call, or made of its mask; None where the mask has a closed form."""
    if sequences.tiles == 0:
        return
    ragged, heads, table = sequences.cu_q is not None, q.shape[1], sequences.page_table
    if table is not None:
        page_size, kv_heads = k.shape[1], k.shape[2]
        key_strides = page_strides(k), page_strides(v)
    else:
        page_size, kv_heads = 0, k.shape[1]
        key_strides = strides(k, token_major=ragged), strides(v, token_major=ragged)
    band = call.mask.band if lists is None else None
    launch(
        forward_kernel,
        (heads, sequences.tiles),
        q,
        k,
        v,
        out,
        lse,
        call.sink_logits,
        *(call.kv_scales or (None, None)),
        sequences.cu_q,
        sequences.cu_k,
        sequences.context_lens,
        table if table is not None else q,
        lists_of(lists, heads),
        strides(q, token_major=ragged),
        *key_strides,
        strides(out, token_major=ragged),
        strides(lse, token_major=ragged),
        table.stride(0) if table is not None else 0,
        sequences.num_seqs,
        *sequences.lengths,
        (band.window or 0) if band is not None else 0,
        band.sinks if band is not None else 0,
        *logit_scales(call.scale, call.softcap),
        section_heads(heads, kv_heads, sequences.num_keys * k.shape[-1] * k.element_size()),
        FORM=form(q, kv_heads, config, band, call, ragged=ragged, page_size=page_size),
        **config.options(),
    )


def dense_forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """q (B, Hq, Nq, D), k, v (B, Hkv, Nk, D): out like q, lse (B, Hq, Nq) fp32."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    num_seqs, queries, keys = q.shape[0], q.shape[2], k.shape[2]
    config = forward_config(q.shape[-1], q.dtype, capability(q.device), None)
    lists = None
    if call.mask.band is None and queries and keys:
        config = sparse_config(config, call.mask)
        lists = tile_lists(call.mask, queries, keys, config.block_m, config.block_n, q.device)
    elif call.mask.band is None:
        call = replace(call, mask=Full())  # no pairs at all: the kernel writes the empty rows
    tiles = cdiv(queries, config.block_m) * num_seqs
    sequences = Sequences(tiles, num_seqs, num_keys=num_seqs * keys, lengths=(queries, keys))
    _launch(q, k, v, out, lse, call, config, lists, sequences)
    return out, lse


def ragged_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: CuSeqlens, call: AttentionCall
) -> tuple[Tensor, Tensor]:
    """q (Tq, Hq, D), k, v (Tk, Hkv, D): out like q, lse (Tq, Hq) fp32. Waits for the lengths if the mask has no closed
    form."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    config = forward_config(q.shape[-1], q.dtype, capability(q.device), None)
    num_seqs = cu_seqlens.q.shape[0] - 1
    if num_seqs == 0 or q.shape[0] == 0:
        return out, lse
    lists = None
    if call.mask.band is None:
        config = sparse_config(config, call.mask)
        refuse_capture(call.mask, q.device)
        lists = ragged_tile_lists(call.mask, *pair_lengths(cu_seqlens), config.block_m, config.block_n, q.device)
    tiles = cdiv(q.shape[0], config.block_m) + num_seqs
    sequences = Sequences(tiles, num_seqs, num_keys=k.shape[0], cu_q=cu_seqlens.q, cu_k=cu_seqlens.k)
    _launch(q, k, v, out, lse, call, config, lists, sequences)
    return out, lse


def paged_forward(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    out: Tensor,
    lse: Tensor,
    batch: PagedBatch,
    call: AttentionCall,
    *,
    decodes: bool = False,
) -> None:
    """The sequences of ``batch`` that are not decodes, or those that are; writes their rows of out (T, Hq, D) and lse
    (T, Hq). Waits for the lengths, once a batch, if the mask has no closed form.

    Lists of the call, of tiles as `list_tiles` says, are of all sequences of the batch."""
    config = forward_config(q.shape[-1], q.dtype, capability(q.device), k_pages.shape[1])
    these = slice(batch.decodes) if decodes else slice(batch.decodes, None)
    num_seqs = batch.decodes if decodes else batch.size - batch.decodes
    lists = call.lists
    if lists is not None:
        these, num_seqs, decodes = slice(None), batch.size, False
        config = sparse_config(config)
    elif call.mask.band is None:
        config = sparse_config(config, call.mask)
        refuse_capture(call.mask, q.device)
        queries, keys = batch.host_lengths
        lists = ragged_tile_lists(call.mask, queries[these], keys[these], config.block_m, config.block_n, q.device)
    sequences = Sequences(
        tiles=cdiv(num_seqs if decodes else q.shape[0] - (these.start or 0), config.block_m) + num_seqs,
        num_seqs=num_seqs,
        num_keys=num_seqs * batch.max_context_len,
        cu_q=batch.cu_seqlens_q[these.start or 0 :],
        context_lens=batch.context_lens[these],
        page_table=batch.page_table[these],
    )
    _launch(q, k_pages, v_pages, out, lse, call, config, lists, sequences)


def list_tiles(q: Tensor, k_pages: Tensor) -> tuple[int, int]:
    """Queries and keys of a tile of the lists that `paged_forward` takes."""
    config = sparse_config(forward_config(q.shape[-1], q.dtype, capability(q.device), k_pages.shape[1]))
    return config.block_m, config.block_n


def refuse_capture(mask: Mask, device: torch.device) -> None:
    """Raises a ValueError while a CUDA graph is captured: tile lists of ragged batches need lengths on the host."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"mask: {mask!r} is described by tile lists, which wait for the lengths of a ragged or paged batch; "
            "a CUDA graph cannot capture that, so run it outside one"
        )


def pair_lengths(cu_seqlens: CuSeqlens) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Queries and keys of each sequence as host integers (copies from the device)."""
    return tuple(cu_seqlens.q.diff().tolist()), tuple(cu_seqlens.k.diff().tolist())
