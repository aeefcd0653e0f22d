"""Launches of the forward kernel: dense, ragged and paged batches."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach_kernels.backends.triton.arguments import form, lists_of, logit_scales, page_strides, strides
from longreach_kernels.backends.triton.config import (
    Config,
    capability,
    cdiv,
    forward_config,
    launch,
    section_heads,
    sparse_config,
)
from longreach_kernels.backends.triton.forward import forward_kernel
from longreach_kernels.batch import PagedBatch
from longreach_kernels.masks.mask import Full, Mask
from longreach_kernels.masks.tile_lists import TileLists, ragged_tile_lists, tile_lists


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Mask,
    config: Config,
    lists: TileLists | None,
    *,
    tiles: int,
    num_seqs: int,
    num_keys: int,
    lengths: tuple[int, int] = (0, 0),
    scale: float,
    softcap: float | None,
    sink_logits: Tensor | None,
    kv_scales: tuple[Tensor, Tensor] | None = None,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    context_lens: Tensor | None = None,
    page_table: Tensor | None = None,
) -> None:
    """``tiles``: query tiles of all sequences; ``num_keys``: of all sequences, at most; ``lengths``: queries and keys
    of each sequence of a dense batch."""
    if tiles == 0:
        return
    ragged, heads = cu_q is not None, q.shape[1]
    if page_table is not None:
        page_size, kv_heads = k.shape[1], k.shape[2]
        key_strides = page_strides(k), page_strides(v)
    else:
        page_size, kv_heads = 0, k.shape[1]
        key_strides = strides(k, token_major=ragged), strides(v, token_major=ragged)
    band = mask.band if lists is None else None
    compiled = form(
        q,
        kv_heads,
        config,
        band,
        ragged=ragged,
        page_size=page_size,
        softcap=softcap,
        sink_logits=sink_logits,
        kv_scales=kv_scales,
    )
    launch(
        forward_kernel,
        (heads, tiles),
        q,
        k,
        v,
        out,
        lse,
        sink_logits,
        *(kv_scales or (None, None)),
        cu_q,
        cu_k,
        context_lens,
        page_table if page_table is not None else q,
        lists_of(lists, heads),
        strides(q, token_major=ragged),
        *key_strides,
        strides(out, token_major=ragged),
        strides(lse, token_major=ragged),
        page_table.stride(0) if page_table is not None else 0,
        num_seqs,
        *lengths,
        (band.window or 0) if band is not None else 0,
        band.sinks if band is not None else 0,
        *logit_scales(scale, softcap),
        section_heads(heads, kv_heads, num_keys * k.shape[-1] * k.element_size()),
        FORM=compiled,
        **config.options(),
    )


def dense_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q (B, Hq, Nq, D), k, v (B, Hkv, Nk, D): out like q, lse (B, Hq, Nq) fp32."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    num_seqs, queries, keys = q.shape[0], q.shape[2], k.shape[2]
    config = forward_config(q.shape[-1], q.dtype, capability(q.device), None)
    lists = None
    if mask.band is None and queries and keys:
        config = sparse_config(config, mask)
        lists = tile_lists(mask, queries, keys, config.block_m, config.block_n, q.device)
    elif mask.band is None:
        mask = Full()  # no pairs at all: the kernel writes the empty rows
    _launch(
        q,
        k,
        v,
        out,
        lse,
        mask,
        config,
        lists,
        tiles=cdiv(queries, config.block_m) * num_seqs,
        num_seqs=num_seqs,
        num_keys=num_seqs * keys,
        lengths=(queries, keys),
        scale=scale,
        softcap=softcap,
        sink_logits=sink_logits,
    )
    return out, lse


def ragged_forward(
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
    """q (Tq, Hq, D), k, v (Tk, Hkv, D): out like q, lse (Tq, Hq) fp32. Waits for the lengths if the mask has no closed
    form."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    config = forward_config(q.shape[-1], q.dtype, capability(q.device), None)
    num_seqs = cu_seqlens_q.shape[0] - 1
    if num_seqs == 0 or q.shape[0] == 0:
        return out, lse
    lists = None
    if mask.band is None:
        config = sparse_config(config, mask)
        refuse_capture(mask, q.device)
        lengths = pair_lengths(cu_seqlens_q, cu_seqlens_k)
        lists = ragged_tile_lists(mask, *lengths, config.block_m, config.block_n, q.device)
    _launch(
        q,
        k,
        v,
        out,
        lse,
        mask,
        config,
        lists,
        tiles=cdiv(q.shape[0], config.block_m) + num_seqs,
        num_seqs=num_seqs,
        num_keys=k.shape[0],
        scale=scale,
        softcap=softcap,
        sink_logits=sink_logits,
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
    decodes: bool = False,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    kv_scales: tuple[Tensor, Tensor] | None = None,
    lists: TileLists | None = None,
) -> None:
    """The sequences of ``batch`` that are not decodes, or those that are; writes their rows of out (T, Hq, D) and lse
    (T, Hq). Waits for the lengths, once a batch, if the mask has no closed form.

    With ``lists``, of tiles as `list_tiles` says, all sequences of the batch, and the mask is not looked at."""
    config = forward_config(q.shape[-1], q.dtype, capability(q.device), k_pages.shape[1])
    these = slice(batch.decodes) if decodes else slice(batch.decodes, None)
    num_seqs = batch.decodes if decodes else batch.size - batch.decodes
    if lists is not None:
        these, num_seqs, decodes = slice(None), batch.size, False
        config = sparse_config(config)
    elif mask.band is None:
        config = sparse_config(config, mask)
        refuse_capture(mask, q.device)
        queries, keys = batch.host_lengths
        lists = ragged_tile_lists(mask, queries[these], keys[these], config.block_m, config.block_n, q.device)
    _launch(
        q,
        k_pages,
        v_pages,
        out,
        lse,
        mask,
        config,
        lists,
        tiles=cdiv(num_seqs if decodes else q.shape[0] - (these.start or 0), config.block_m) + num_seqs,
        num_seqs=num_seqs,
        num_keys=num_seqs * batch.max_context_len,
        scale=scale,
        softcap=softcap,
        sink_logits=sink_logits,
        kv_scales=kv_scales,
        cu_q=batch.cu_seqlens_q[these.start or 0 :],
        context_lens=batch.context_lens[these],
        page_table=batch.page_table[these],
    )


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


def pair_lengths(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Queries and keys of each sequence as host integers (copies from the device)."""
    return tuple(cu_seqlens_q.diff().tolist()), tuple(cu_seqlens_k.diff().tolist())
