"""Host side of the Hopper forward kernel: what it can compute, in which configuration, and the launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from longreach_kernels.backends.hopper import forward_split as parts
from longreach_kernels.backends.hopper.forward import forward_kernel
from longreach_kernels.backends.hopper.tma import Rows, dense_rows, padded, token_rows
from longreach_kernels.backends.hopper.transpose import transposed
from longreach_kernels.backends.triton.arguments import logit_scales
from longreach_kernels.backends.triton.config import cached_heads, launch, processors, smallest_block
from longreach_kernels.backends.triton.forward_launch import pair_lengths, refuse_capture
from longreach_kernels.batch import PagedBatch
from longreach_kernels.checks import FP8
from longreach_kernels.masks.mask import Mask
from longreach_kernels.masks.tile_lists import TileLists, ragged_tile_lists, tile_lists

_ROWS = 64  # of queries, a consumer warpgroup
_PAGE_MULTIPLE = 128  # a key tile lies inside one page


class Config(NamedTuple):
    """How a program is made.

    Attributes:
        block_n: keys in a tile.
        consumers: warpgroups of 64 queries.
        registers, producer_registers: of a thread of a consumer and of the producer.
        own_out: whether results have shared memory of their own, or that of the queries.
        ring: tiles of K and of V in shared memory; three of 16 bits at D=128 leave no room for results of their own.
    """

    block_n: int
    consumers: int
    registers: int
    producer_registers: int
    own_out: bool = True
    ring: int = 2


HEAD_DIMS = (64, 96, 128, 192, 256)
FP8_HEAD_DIMS = (64, 96, 128)  # at 256 the sums of a tile and those of all tiles do not fit the registers together


def configure(head_dim: int, mask: Mask | None, fp8: bool = False) -> Config:
    """The configuration for a head dim, a kind of mask (None: lists that the caller brings) and of keys; each compiles
    for sm_90 without spills where it matters."""
    width = padded(head_dim)
    if fp8:
        return Config(128, 2, 240, 24, ring=4)
    if width == 256:
        return Config(64, 2, 240, 24, False)
    if width == 64 and mask is not None and mask.band is not None and mask.band.window is None:
        return Config(128, 3, 160, 32)
    return Config(128, 2, 240, 24)


def supports(q: Tensor, k: Tensor, mask: Mask | None, *, page_size: int | None = None) -> bool:
    """Whether the Hopper kernel computes this; everything else is the portable kernels' work.

    It takes fp16 and bf16, head dims that are multiples of 8 from 40 to 256, at least one key, pages that hold whole
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
        and 32 < q.shape[-1] <= (128 if fp8 else 256)
        and (page_size is None or page_size % _PAGE_MULTIPLE == 0)
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
    batch, heads, length, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, length), dtype=torch.float32, device=q.device)
    config = configure(q.shape[-1], mask)
    lists = None
    if mask.band is None:
        lists = tile_lists(mask, length, k.shape[2], _ROWS * config.consumers, config.block_n, q.device)
    _launch(
        dense_rows(q),
        dense_rows(k),
        dense_rows(v),
        dense_rows(out),
        lse,
        lse_strides=(length, 1),
        heads=(heads, k.shape[1]),
        num_items=-(-length // (_ROWS * config.consumers)) * batch * heads,
        num_seqs=batch,
        lengths=(length, k.shape[2]),
        config=config,
        mask=mask,
        lists=lists,
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
    """q (Tq, Hq, D), k, v (Tk, Hkv, D): out like q, lse (Tq, Hq) fp32."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    config = configure(q.shape[-1], mask)
    num_seqs = cu_seqlens_q.shape[0] - 1
    lists = None
    if mask.band is None:
        refuse_capture(mask, q.device)
        lengths = pair_lengths(cu_seqlens_q, cu_seqlens_k)
        lists = ragged_tile_lists(mask, *lengths, _ROWS * config.consumers, config.block_n, q.device)
    _launch(
        token_rows(q),
        token_rows(k),
        token_rows(v),
        token_rows(out),
        lse,
        lse_strides=(1, lse.stride(0)),
        heads=(q.shape[1], k.shape[1]),
        num_items=_ragged_items(q.shape[0], num_seqs, q.shape[1], config),
        num_seqs=num_seqs,
        config=config,
        mask=mask,
        lists=lists,
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
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    kv_scales: tuple[Tensor, Tensor] | None = None,
    lists: TileLists | None = None,
    batch_invariant: bool = False,
) -> None:
    """The sequences of `batch` that are not decodes; writes their rows of out (T, Hq, D) and lse (T, Hq). Waits for the
    lengths, once a batch, if the mask has no closed form.

    Few queries with many keys are computed in parts of the keys, which are merged (`forward_split`): how many depends
    on all queries of the batch, and so does the last bit of a result, unless it is to be `batch_invariant`.

    With `lists`, of tiles as `list_tiles` says, all sequences of the batch, and the mask is not looked at. They are
    not computed in parts.

    Over fp8 pages with `kv_scales` (Hkv,) both products are of e4m3: a query is divided by a scale of its own and
    rounded, so that it does not depend on its batch, and weights are rounded too.
    """
    skip = batch.decodes if lists is None else 0
    config = configure(q.shape[-1], mask if lists is None else None, kv_scales is not None)
    rows = _ROWS * config.consumers
    band = mask.band
    options = {"scale": scale, "softcap": softcap, "sink_logits": sink_logits, "kv_scales": kv_scales}
    cut = None
    if lists is None and band is not None and band.window is None and sink_logits is None:
        if not batch_invariant:
            available = processors(q.device)
            cut = parts.cut(q, q.shape[0] - skip, batch.max_context_len, rows, config.block_n, available)
        elif band.causal and batch.max_context_len > parts.FIXED_KEYS:
            for piece in parts.cut_fixed(batch, q, rows, config.block_n):
                here = piece.rows
                _paged(
                    q[here], k_pages, v_pages, out[here], lse[here], piece.batch, mask, config, piece.parts, **options
                )
            return
    if lists is None and band is None:
        refuse_capture(mask, q.device)
        queries, keys = batch.host_lengths
        lists = ragged_tile_lists(mask, queries[skip:], keys[skip:], rows, config.block_n, q.device)
    _paged(q, k_pages, v_pages, out, lse, batch, mask, config, cut, skip=skip, lists=lists, **options)


def _paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    out: Tensor,
    lse: Tensor,
    batch: PagedBatch,
    mask: Mask,
    config: Config,
    cut: parts.Parts | None,
    *,
    scale: float,
    softcap: float | None,
    sink_logits: Tensor | None,
    kv_scales: tuple[Tensor, Tensor] | None,
    skip: int = 0,
    lists: TileLists | None = None,
) -> None:
    """The sequences of `batch` behind the first `skip`, which have one query each."""
    num_seqs = batch.size - skip
    values = token_rows(v_pages.flatten(0, 1))
    context_lens, page_table, page_size = batch.context_lens[skip:], batch.page_table[skip:], k_pages.shape[1]
    tiles_of_seq = max(1, -(-batch.max_context_len // config.block_n))
    if kv_scales is not None and num_seqs:
        shape = {"tiles_of_seq": tiles_of_seq, "width": padded(q.shape[-1]), "block": config.block_n}
        tiles = transposed(values.tensor, context_lens, page_table, page_size, **shape)
        values = Rows(tiles, *tiles.shape[:2], *tiles.stride()[:2])
    _launch(
        token_rows(q),
        token_rows(k_pages.flatten(0, 1)),
        values,
        token_rows(out),
        lse,
        lse_strides=(1, lse.stride(0)),
        heads=(q.shape[1], k_pages.shape[2]),
        num_items=_ragged_items(q.shape[0] - skip, num_seqs, q.shape[1], config),
        num_seqs=num_seqs,
        config=config,
        mask=mask,
        lists=lists,
        scale=scale,
        softcap=softcap,
        sink_logits=sink_logits,
        cu_q=batch.cu_seqlens_q[skip:],
        context_lens=context_lens,
        page_table=page_table,
        page_size=page_size,
        kv_scales=kv_scales,
        tiles_of_seq=tiles_of_seq,
        cut=cut,
    )
    if cut is not None:
        parts.merge(cut, out, lse, skip)


def list_tiles(q: Tensor, k_pages: Tensor) -> tuple[int, int]:
    """Queries and keys of a tile of the lists that `paged_forward` takes."""
    config = configure(q.shape[-1], None, k_pages.dtype == FP8)
    return _ROWS * config.consumers, config.block_n


def _ragged_items(tokens: int, num_seqs: int, heads: int, config: Config) -> int:
    """Each sequence may end in a part of a tile; see `work_items.find_item`."""
    return heads * (-(-tokens // (_ROWS * config.consumers)) + num_seqs) if tokens and num_seqs else 0


def _launch(
    q: Rows,
    k: Rows,
    v: Rows,
    out: Rows,
    lse: Tensor,
    *,
    lse_strides: tuple[int, int],
    heads: tuple[int, int],
    num_items: int,
    num_seqs: int,
    config: Config,
    mask: Mask,
    scale: float,
    softcap: float | None,
    sink_logits: Tensor | None,
    lists: TileLists | None = None,
    lengths: tuple[int, int] = (0, 0),
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    context_lens: Tensor | None = None,
    page_table: Tensor | None = None,
    page_size: int = 0,
    kv_scales: tuple[Tensor, Tensor] | None = None,
    tiles_of_seq: int = 0,
    cut: parts.Parts | None = None,
) -> None:
    """With `cut` the results go there, and not to `out` and `lse`, which are of the same shape."""
    if num_items == 0:
        return
    if cut is not None:
        num_items *= cut.number
    band = mask.band if lists is None else None
    group = heads[0] // heads[1]
    head_dim = q.tensor.shape[-1]
    kv_bytes = max(1, lengths[1]) * 2 * padded(head_dim) * k.tensor.itemsize
    scale_log2, softcap_log2 = logit_scales(scale, softcap)
    unused = lse  # stands where the kernel, compiled for another kind of call, reads nothing
    options: dict[str, Any] = {"num_warps": 4}
    launch(
        forward_kernel,
        (min(num_items, processors(lse.device)),),
        q.descriptor(_ROWS),
        k.descriptor(config.block_n),
        v.descriptor(config.block_n if kv_scales is None else padded(head_dim)),
        out.descriptor(_ROWS),
        out.tensor if cut is None else cut.out,
        lse if cut is None else cut.lse,
        torch.zeros(1, dtype=torch.int32, device=lse.device),
        *lse_strides,
        out.head_stride,
        out.row_stride,
        head_dim,
        unused if cu_q is None else cu_q,
        unused if cu_k is None else cu_k,
        unused if context_lens is None else context_lens,
        unused if page_table is None else page_table,
        0 if page_table is None else page_table.stride(0),
        num_seqs,
        *lengths,
        heads[0],
        group * cached_heads(kv_bytes),
        num_items,
        0 if band is None else band.window or 0,
        0 if band is None else band.sinks,
        *_list_arguments(lists, heads[0], unused),
        unused if sink_logits is None else sink_logits,
        scale_log2,
        softcap_log2,
        *(kv_scales or (unused, unused)),
        tiles_of_seq,
        *((0, 0, 0) if cut is None else (cut.number, cut.least_tiles, cut.whole_tiles)),
        *((0, 0) if cut is None else (cut.lse.stride(0), cut.out.stride(0))),
        GROUP=group,
        D=padded(head_dim),
        BN=config.block_n,
        RING=config.ring,
        CONSUMERS=config.consumers,
        REGISTERS=config.registers,
        PRODUCER_REGISTERS=config.producer_registers,
        OWN_OUT=config.own_out,
        RAGGED=cu_q is not None,
        PAGE_SIZE=page_size,
        LISTED=lists is not None,
        CAUSAL=band is not None and band.causal,
        WINDOWED=band is not None and band.window is not None,
        SOFTCAP=softcap is not None,
        SINK_LOGITS=sink_logits is not None,
        SPLIT=cut is not None,
        **options,
    )


def _list_arguments(lists: TileLists | None, heads: int, unused: Tensor) -> tuple[Any, ...]:
    if lists is None:
        return unused, unused, unused, unused, unused, 1, unused, unused
    return (
        lists.first_row,
        lists.start,
        lists.partial,
        lists.tiles,
        lists.order,
        heads // lists.heads,
        lists.bits,
        lists.bit_index,
    )
