"""Host side of the Hopper forward kernel: what it can compute, in which configuration, and the launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from longreach_kernels.backends.hopper.argument_order import argument_order
from longreach_kernels.backends.hopper.config import ForwardConfig, forward_config
from longreach_kernels.backends.hopper.forward import forward_kernel
from longreach_kernels.backends.hopper.forward_arguments import Form, Lists, Logits, Output, Pages, Sizes, Split
from longreach_kernels.backends.hopper.forward_split import (
    FIXED_KEYS,
    KeySplits,
    merge_splits,
    split_fixed,
    split_keys,
)
from longreach_kernels.backends.hopper.tma import HeadRows, dense_rows, padded, token_rows
from longreach_kernels.backends.hopper.transpose import transposed
from longreach_kernels.backends.protocol import CuSeqlens
from longreach_kernels.backends.triton.arguments import logit_scales
from longreach_kernels.backends.triton.config import cached_heads, launch, processors, smallest_block
from longreach_kernels.backends.triton.forward_launch import pair_lengths, refuse_capture
from longreach_kernels.batch import PagedBatch
from longreach_kernels.call import AttentionCall
from longreach_kernels.checks import FP8
from longreach_kernels.masks.mask import Mask
from longreach_kernels.masks.tile_lists import TileLists, ragged_tile_lists, tile_lists
from longreach_kernels.sizes import MAX_HOPPER_HEAD_DIM

_PAGE_MULTIPLE = 128  # a key tile lies inside one page


_ORDER = argument_order(forward_kernel, "counter", Output, Pages, Sizes, Lists, Logits, Split)


def supports(q: Tensor, k: Tensor, mask: Mask | None, *, page_size: int | None = None) -> bool:
    """Whether the Hopper kernel computes this; everything else is the portable kernels' work.

    It takes fp16 and bf16, head dims that are multiples of 8 from 40 to 512, at least one key, pages that hold whole
    tiles of 128 keys, and every mask that has a closed form or blocks of 128; None stands for lists that the caller
    brings. Softcaps and learned sinks are no limit.
    Keys in fp8 pages may be of head dims that are multiples of 16 from 48 to 128.
    """
    fp8 = k.dtype == FP8
    mask_fits = True
    if mask is not None:
        band = mask.band
        mask_fits = smallest_block(mask) >= 128 if band is None else band.window is None or band.causal
    return (
        mask_fits
        and q.dtype in (torch.bfloat16, torch.float16)
        and (fp8 or k.dtype == q.dtype)
        and k.numel() > 0
        and q.shape[-1] % (16 if fp8 else 8) == 0
        and 32 < q.shape[-1] <= (128 if fp8 else MAX_HOPPER_HEAD_DIM)
        and (page_size is None or page_size % _PAGE_MULTIPLE == 0)
    )


class _Tensors(NamedTuple):
    """Queries, keys, values and results by heads and rows, the log-sum-exp with its strides of a head and a row, and
    the heads of queries and of keys in a sequence."""

    q: HeadRows
    k: HeadRows
    v: HeadRows
    out: HeadRows
    lse: Tensor
    lse_strides: tuple[int, int]
    heads: tuple[int, int]


class _Sequences(NamedTuple):
    """The sequences of a launch; `lengths` are queries and keys of each one of a dense batch, `num_items` those of all
    sequences at most."""

    num_seqs: int
    num_items: int
    lengths: tuple[int, int] = (0, 0)
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    context_lens: Tensor | None = None
    page_table: Tensor | None = None
    page_size: int = 0
    tiles_of_seq: int = 0


def dense_forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """q (B, Hq, Nq, D), k, v (B, Hkv, Nk, D): out like q, lse (B, Hq, Nq) fp32."""
    batch, heads, length, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, length), dtype=torch.float32, device=q.device)
    config = forward_config(q.shape[-1], call.mask)
    lists = None
    if call.mask.band is None:
        lists = tile_lists(call.mask, length, k.shape[2], config.block_m, config.block_n, q.device)
    tensors = _Tensors(
        *(dense_rows(q), dense_rows(k), dense_rows(v), dense_rows(out)),
        lse,
        lse_strides=(length, 1),
        heads=(heads, k.shape[1]),
    )
    num_items = -(-length // config.block_m) * batch * heads
    _launch(tensors, _Sequences(batch, num_items, lengths=(length, k.shape[2])), call, config, lists)
    return out, lse


def ragged_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: CuSeqlens, call: AttentionCall
) -> tuple[Tensor, Tensor]:
    """q (Tq, Hq, D), k, v (Tk, Hkv, D): out like q, lse (Tq, Hq) fp32."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    config = forward_config(q.shape[-1], call.mask)
    num_seqs = cu_seqlens.q.shape[0] - 1
    lists = None
    if call.mask.band is None:
        refuse_capture(call.mask, q.device)
        lists = ragged_tile_lists(call.mask, *pair_lengths(cu_seqlens), config.block_m, config.block_n, q.device)
    tensors = _Tensors(
        *(token_rows(q), token_rows(k), token_rows(v), token_rows(out)),
        lse,
        lse_strides=(1, lse.stride(0)),
        heads=(q.shape[1], k.shape[1]),
    )
    num_items = _ragged_items(q.shape[0], num_seqs, q.shape[1], config)
    _launch(tensors, _Sequences(num_seqs, num_items, cu_q=cu_seqlens.q, cu_k=cu_seqlens.k), call, config, lists)
    return out, lse


def paged_forward(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor, lse: Tensor, batch: PagedBatch, call: AttentionCall
) -> None:
    """The sequences of `batch` that are not decodes; writes their rows of out (T, Hq, D) and lse (T, Hq). Waits for the
    lengths, once a batch, if the mask has no closed form.

    Few queries with many keys are computed in splits of the keys, which are merged (`forward_split`): how many depends
    on all queries of the batch, and so does the last bit of a result, unless the call is to be batch invariant.

    Lists of the call, of tiles as `list_tiles` says, are of all sequences of the batch, and computed in one split.

    Over fp8 pages both products are of e4m3: a query is divided by a scale of its own and rounded, so that it does not
    depend on its batch, and weights are rounded too.
    """
    lists, mask = call.lists, call.mask
    skip = batch.decodes if lists is None else 0
    config = forward_config(q.shape[-1], mask if lists is None else None, call.kv_scales is not None)
    band = mask.band
    splits = None
    if lists is None and band is not None and band.window is None and call.sink_logits is None:
        if not call.batch_invariant:
            shape = q.shape[0] - skip, batch.max_context_len, config.block_m, config.block_n
            splits = split_keys(q, *shape, processors(q.device), config.value_parts)
        elif band.causal and batch.max_context_len > FIXED_KEYS:
            for piece in split_fixed(batch, q, config.block_m, config.block_n):
                here = piece.rows
                own = q[here], k_pages, v_pages, out[here], lse[here]
                _paged(*own, piece.batch, call, config, splits=piece.splits)
            return
    if lists is None and band is None:
        refuse_capture(mask, q.device)
        queries, keys = batch.host_lengths
        lists = ragged_tile_lists(mask, queries[skip:], keys[skip:], config.block_m, config.block_n, q.device)
    _paged(q, k_pages, v_pages, out, lse, batch, call, config, splits=splits, skip=skip, lists=lists)


def _paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    out: Tensor,
    lse: Tensor,
    batch: PagedBatch,
    call: AttentionCall,
    config: ForwardConfig,
    *,
    splits: KeySplits | None,
    skip: int = 0,
    lists: TileLists | None = None,
) -> None:
    """The sequences of `batch` behind the first `skip`, which have one query each."""
    num_seqs = batch.size - skip
    values = token_rows(v_pages.flatten(0, 1))
    context_lens, page_table, page_size = batch.context_lens[skip:], batch.page_table[skip:], k_pages.shape[1]
    tiles_of_seq = max(1, -(-batch.max_context_len // config.block_n))
    if call.kv_scales is not None and num_seqs:
        shape = {"tiles_of_seq": tiles_of_seq, "width": padded(q.shape[-1]), "block": config.block_n}
        tiles = transposed(values.tensor, context_lens, page_table, page_size, **shape)
        values = HeadRows(tiles, *tiles.shape[:2], *tiles.stride()[:2])
    tensors = _Tensors(
        token_rows(q),
        token_rows(k_pages.flatten(0, 1)),
        values,
        token_rows(out),
        lse,
        lse_strides=(1, lse.stride(0)),
        heads=(q.shape[1], k_pages.shape[2]),
    )
    sequences = _Sequences(
        num_seqs,
        _ragged_items(q.shape[0] - skip, num_seqs, q.shape[1], config),
        cu_q=batch.cu_seqlens_q[skip:],
        context_lens=context_lens,
        page_table=page_table,
        page_size=page_size,
        tiles_of_seq=tiles_of_seq,
    )
    _launch(tensors, sequences, call, config, lists, splits)
    if splits is not None:
        merge_splits(splits, out, lse, skip)


def list_tiles(q: Tensor, k_pages: Tensor) -> tuple[int, int]:
    """Queries and keys of a tile of the lists that `paged_forward` takes."""
    config = forward_config(q.shape[-1], None, k_pages.dtype == FP8)
    return config.block_m, config.block_n


def _ragged_items(tokens: int, num_seqs: int, heads: int, config: ForwardConfig) -> int:
    """Each sequence may end in a part of a tile; see `work_items.find_item`."""
    return heads * (-(-tokens // config.block_m) + num_seqs) if tokens and num_seqs else 0


def _launch(
    tensors: _Tensors,
    sequences: _Sequences,
    call: AttentionCall,
    config: ForwardConfig,
    lists: TileLists | None,
    splits: KeySplits | None = None,
) -> None:
    """`lists`: those of the call, or made of its mask; None where the mask has a closed form. With `splits` the results
    go there, in place of `out` and `lse`."""
    num_items = sequences.num_items * config.value_parts * (1 if splits is None else splits.number)
    if num_items == 0:
        return
    q, k, v, out, lse, lse_strides, (heads, kv_heads) = tensors
    head_dim = q.tensor.shape[-1]
    width = padded(head_dim)
    group = heads // kv_heads
    band = call.mask.band if lists is None else None
    kv_bytes = max(1, sequences.lengths[1]) * 2 * width * k.tensor.itemsize
    options: dict[str, Any] = {"num_warps": 4}
    launch(
        forward_kernel,
        (min(num_items, processors(lse.device)),),
        q.descriptor(64),
        k.descriptor(config.block_n),
        v.descriptor(config.block_n if call.kv_scales is None else width, config.value_parts),
        out.descriptor(64),
        *_ORDER(
            (
                torch.zeros(1, dtype=torch.int32, device=lse.device),
                *_output(out, lse, lse_strides, head_dim, splits),
                *_pages(sequences, lse),
                *Sizes(
                    num_seqs=sequences.num_seqs,
                    num_queries=sequences.lengths[0],
                    num_keys=sequences.lengths[1],
                    heads=heads,
                    section=group * cached_heads(kv_bytes),
                    num_items=num_items,
                    window=0 if band is None else band.window or 0,
                    sinks=0 if band is None else band.sinks,
                ),
                *_lists(lists, heads, lse),
                *Logits(
                    *logit_scales(call.scale, call.softcap),
                    lse if call.sink_logits is None else call.sink_logits,
                    *(call.kv_scales or (lse, lse)),
                ),
                *(Split(0, 0, 0) if splits is None else Split(splits.number, splits.least_tiles, splits.whole_tiles)),
            )
        ),
        FORM=Form(
            group=group,
            head_dim=width,
            value_dim=width // config.value_parts,
            block_m=config.block_m,
            block_n=config.block_n,
            ring=config.ring,
            consumers=config.consumers,
            registers=config.registers,
            producer_registers=config.producer_registers,
            own_out=config.own_out,
            ragged=sequences.cu_q is not None,
            page_size=sequences.page_size,
            listed=lists is not None,
            causal=band is not None and band.causal,
            windowed=band is not None and band.window is not None,
            softcap=call.softcap is not None,
            sink_logits=call.sink_logits is not None,
            split=splits is not None,
        ),
        **options,
    )


def _output(
    out: HeadRows, lse: Tensor, lse_strides: tuple[int, int], head_dim: int, splits: KeySplits | None
) -> Output:
    head, row = lse_strides
    if splits is None:
        return Output(out.tensor, lse, head, row, 0, out.head_stride, out.row_stride, 0, head_dim)
    of_split = splits.lse.stride(0), splits.out.stride(0)
    return Output(
        splits.out, splits.lse, head, row, of_split[0], out.head_stride, out.row_stride, of_split[1], head_dim
    )


def _pages(sequences: _Sequences, unused: Tensor) -> Pages:
    """`unused` stands where the kernel, compiled for another kind of batch, reads nothing."""
    table = sequences.page_table
    return Pages(
        cu_q=unused if sequences.cu_q is None else sequences.cu_q,
        cu_k=unused if sequences.cu_k is None else sequences.cu_k,
        context_lens=unused if sequences.context_lens is None else sequences.context_lens,
        table=unused if table is None else table,
        stride_table=0 if table is None else table.stride(0),
        tiles_of_seq=sequences.tiles_of_seq,
    )


def _lists(lists: TileLists | None, heads: int, unused: Tensor) -> Lists:
    """`unused` as of `_pages`."""
    if lists is None:
        return Lists(unused, unused, unused, unused, unused, 1, unused, unused)
    return Lists(
        first_row=lists.first_row,
        start=lists.start,
        partial=lists.partial,
        tiles=lists.tiles,
        order=lists.order,
        sharing=heads // lists.heads,
        bits=lists.bits,
        bit_index=lists.bit_index,
    )
