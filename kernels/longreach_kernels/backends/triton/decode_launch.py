"""Launches of the decode kernels, and the workspace that they need."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from longreach_kernels.backends.triton.arguments import logit_scales, padded, page_strides
from longreach_kernels.backends.triton.config import SPLIT_KEYS, capability, cdiv, decode_config, launch
from longreach_kernels.backends.triton.decode import merge_kernel, split_kernel
from longreach_kernels.backends.triton.forward_launch import paged_forward
from longreach_kernels.batch import DecodeNeeds, PagedBatch
from longreach_kernels.call import AttentionCall


def split_bound(max_context_len: int, window: int | None, sinks: int, split: int) -> int:
    """Most splits that a query can need: all up to the longest context, or with a window those of the window, one
    more because it is not aligned, and the sinks'."""
    bound = cdiv(max_context_len, split)
    if window is not None:
        bound = min(bound, cdiv(sinks, split) + cdiv(window, split) + 1)
    return max(bound, 1)


def decode_needs(q: Tensor, k_pages: Tensor, num_seqs: int, max_context_len: int) -> DecodeNeeds:
    """Programs are launched for every split that there could be, and each has a place for its result."""
    places = num_seqs * q.shape[1] * split_bound(max_context_len, None, 0, SPLIT_KEYS)
    return DecodeNeeds(4 * places * (q.shape[2] + 1), by_length=False)


def paged_decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    out: Tensor,
    lse: Tensor,
    batch: PagedBatch,
    call: AttentionCall,
    *,
    pages_of_head: int = 0,
) -> None:
    """The decodes of ``batch``: writes their rows of out (T, Hq, D) and lse (T, Hq). Where the mask has no closed form
    the prefill kernel computes them: it walks tile lists.

    With ``pages_of_head`` the rows of the page table hold so many pages for each KV head, one head after the other."""
    band = call.mask.band
    if band is None:
        paged_forward(q, k_pages, v_pages, out, lse, batch, call, decodes=True)
        return
    num_seqs = batch.decodes
    heads, head_dim = q.shape[1], q.shape[2]
    kv_heads = k_pages.shape[2]
    config = decode_config(head_dim, q.dtype, capability(q.device))
    splits = split_bound(batch.max_context_len, band.window, band.sinks, SPLIT_KEYS)
    split_out = torch.empty((num_seqs, heads, splits, head_dim), dtype=torch.float32, device=q.device)
    split_lse = torch.empty((num_seqs, heads, splits), dtype=torch.float32, device=q.device)
    scale_log2, softcap_log2 = logit_scales(call.scale, call.softcap)
    group = heads // kv_heads
    block_d = padded(head_dim)
    launch(
        split_kernel,
        (splits, kv_heads, num_seqs),
        q,
        k_pages,
        v_pages,
        split_out,
        split_lse,
        *(call.kv_scales or (None, None)),
        batch.cu_seqlens_q,
        batch.context_lens,
        batch.page_table,
        q.stride(0),
        q.stride(1),
        page_strides(k_pages),
        page_strides(v_pages),
        batch.page_table.stride(0),
        pages_of_head,
        band.window or 0,
        band.sinks,
        splits,
        scale_log2,
        softcap_log2,
        GROUP=group,
        BLOCK_G=max(config.block_m, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_N=config.block_n,
        SPLIT=SPLIT_KEYS,
        PAGE_SIZE=k_pages.shape[1],
        WINDOWED=band.window is not None,
        SOFTCAP=call.softcap is not None,
        KV_SCALES=call.kv_scales is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        **config.options(),
    )
    launch(
        merge_kernel,
        (heads, num_seqs),
        split_out,
        split_lse,
        out,
        lse,
        call.sink_logits,
        batch.cu_seqlens_q,
        batch.context_lens,
        out.stride(0),
        out.stride(1),
        lse.stride(0),
        lse.stride(1),
        band.window or 0,
        band.sinks,
        splits,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_S=16,
        SPLIT=SPLIT_KEYS,
        WINDOWED=band.window is not None,
        SINK_LOGITS=call.sink_logits is not None,
    )
