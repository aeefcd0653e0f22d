"""The forward kernel in plain Triton: dense, ragged and paged batches, one program a query tile and head.

FlashAttention-2 (Dao 2023, algorithm 1): a program holds one tile of queries, walks the key tiles that the mask leaves,
ascending, and keeps a running maximum and sum. Masks are evaluated on boundary tiles only. The order of key tiles
depends on nothing but their absolute position, so a query's result is the same bits however its prompt is chunked.
"""

# pyright: reportGeneralTypeIssues=false
# (the stubs give device functions that return a tuple of tl values the type NoReturn)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longreach_kernels.batch import PagedBatch
from longreach_kernels.masks import Band, Full, Mask
from longreach_kernels.tile_lists import TileLists, tile_lists

from .config import Config, capability, cdiv, forward_config, launch, sparse_config
from .primitives import (
    LN2,
    LOG2E,
    band_allows,
    bits_allow,
    find_sequence,
    key_tile_ranges,
    load_tile,
    online_softmax,
    tile_pointers,
)


@triton.jit
def _walk(
    acc,
    row_max,
    row_sum,
    q,
    start,
    end,
    k_base,
    v_base,
    Table,
    stride_kp,
    stride_kr,
    stride_vp,
    stride_vr,
    Tiles,
    BitIndex,
    Bits,
    q_positions,
    num_keys,
    window,
    sinks,
    scale_log2,
    softcap_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LISTED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Visit the key tiles ``start <= tile < end``, or those that a list holds at these places."""
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    for i in range(start, end):
        tile = i
        if LISTED:
            tile = tl.load(Tiles + i)
        keys = tile * BLOCK_N + offs_n
        k_ptrs = tile_pointers(
            k_base, Table, tile, offs_n, offs_d, num_keys, stride_kp, stride_kr, PAGE_SIZE, BLOCK_N, MASKED
        )
        k = load_tile(k_ptrs, offs_d, keys, num_keys, HEAD_DIM, BLOCK_D, MASKED).to(q.dtype)
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if MASKED:
            if LISTED:
                bits = tl.load(BitIndex + i)
                allowed = bits_allow(Bits, bits, offs_m[:, None], offs_n[None, :], BLOCK_M, BLOCK_N)
            else:
                allowed = band_allows(q_positions, keys, num_keys, window, sinks, CAUSAL, WINDOWED)
            qk = tl.where(allowed, qk, float("-inf"))
        p, alpha, row_max, row_sum = online_softmax(qk, row_max, row_sum, scale_log2, softcap_log2, SOFTCAP, MASKED)
        acc = acc * alpha[:, None]
        v_ptrs = tile_pointers(
            v_base, Table, tile, offs_n, offs_d, num_keys, stride_vp, stride_vr, PAGE_SIZE, BLOCK_N, MASKED
        )
        v = load_tile(v_ptrs, offs_d, keys, num_keys, HEAD_DIM, BLOCK_D, MASKED).to(q.dtype)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, row_max, row_sum


@triton.jit(
    do_not_specialize=["num_seqs", "dense_queries", "dense_keys", "window", "sinks", "stride_table", "list_stride"],
    do_not_specialize_on_alignment=["CuQ", "CuK", "ContextLens", "Table"],
)
def _forward_kernel(
    Q,
    K,
    V,
    Out,
    Lse,
    SinkLogits,
    KScale,
    VScale,
    CuQ,
    CuK,
    ContextLens,
    Table,
    FullStart,
    FullTiles,
    PartStart,
    PartTiles,
    PartBits,
    Bits,
    Order,
    list_stride,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_ob,
    stride_oh,
    stride_ot,
    stride_lb,
    stride_lh,
    stride_lt,
    stride_table,
    num_seqs,
    dense_queries,
    dense_keys,
    window,
    sinks,
    scale_log2,
    softcap_log2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RAGGED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LISTED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINK_LOGITS: tl.constexpr,
    KV_SCALES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (Hq, query tiles). Dense: stride_*b is the batch stride. Ragged: queries by CuQ, keys by CuK or by pages;
    with pages stride_kb is the page stride. LISTED: `TileLists` of a dense batch; list_stride is the number of query
    tiles where heads have lists of their own, else 0."""
    head = tl.program_id(0)
    # Under a causal mask late tiles are long; they go first, so that short ones fill the tail.
    slot = tl.num_programs(1) - 1 - tl.program_id(1)
    if RAGGED:
        seq, first_slot = find_sequence(CuQ, num_seqs, slot, BLOCK_M)
        q_row = tl.load(CuQ + seq)
        num_queries = tl.load(CuQ + seq + 1) - q_row
        tile_m = slot - first_slot
        if PAGE_SIZE:
            num_keys = tl.load(ContextLens + seq)
            k_base = K
            v_base = V
        else:
            k_row = tl.load(CuK + seq)
            num_keys = tl.load(CuK + seq + 1) - k_row
            k_base = K + k_row.to(tl.int64) * stride_kt
            v_base = V + k_row.to(tl.int64) * stride_vt
        q_base = Q + q_row.to(tl.int64) * stride_qt
        o_base = Out + q_row.to(tl.int64) * stride_ot
        l_base = Lse + q_row.to(tl.int64) * stride_lt
    else:
        seq = slot % num_seqs
        tile_m = slot // num_seqs
        if LISTED:  # longest first by count: slots were reversed above
            tile_m = tl.load(Order + head * list_stride + tl.num_programs(1) // num_seqs - 1 - tile_m)
        num_queries = dense_queries
        num_keys = dense_keys
        q_base = Q + seq.to(tl.int64) * stride_qb
        k_base = K + seq.to(tl.int64) * stride_kb
        v_base = V + seq.to(tl.int64) * stride_vb
        o_base = Out + seq.to(tl.int64) * stride_ob
        l_base = Lse + seq.to(tl.int64) * stride_lb
    if tile_m * BLOCK_M >= num_queries:
        return
    k_base += (head // GROUP).to(tl.int64) * stride_kh
    v_base += (head // GROUP).to(tl.int64) * stride_vh
    if KV_SCALES:  # of 8-bit keys; they factor out of the products
        scale_log2 *= tl.load(KScale + head // GROUP)
    table = Table + seq.to(tl.int64) * stride_table

    offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    row_mask = offs_m[:, None] < num_queries
    if HEAD_DIM != BLOCK_D:
        row_mask = row_mask & (offs_d[None, :] < HEAD_DIM)
    rows = offs_m.to(tl.int64)[:, None]
    q = tl.load(q_base + head.to(tl.int64) * stride_qh + rows * stride_qt + offs_d[None, :], mask=row_mask, other=0.0)

    low = num_keys - num_queries + tile_m * BLOCK_M
    high = num_keys - num_queries + tl.minimum((tile_m + 1) * BLOCK_M, num_queries)
    q_positions = num_keys - num_queries + offs_m
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    # fmt: off
    if LISTED:
        row = head * list_stride + tile_m
        full_start = tl.load(FullStart + row)
        full_end = tl.load(FullStart + row + 1)
        part_start = tl.load(PartStart + row)
        part_end = tl.load(PartStart + row + 1)
        acc, row_max, row_sum = _walk(
            acc, row_max, row_sum, q, full_start, full_end, k_base, v_base, table,
            stride_kb, stride_kt, stride_vb, stride_vt, FullTiles, PartBits, Bits,
            q_positions, num_keys, window, sinks, scale_log2, softcap_log2,
            HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PAGE_SIZE, LISTED, CAUSAL, WINDOWED, SOFTCAP, PRECISION, False,
        )
        acc, row_max, row_sum = _walk(
            acc, row_max, row_sum, q, part_start, part_end, k_base, v_base, table,
            stride_kb, stride_kt, stride_vb, stride_vt, PartTiles, PartBits, Bits,
            q_positions, num_keys, window, sinks, scale_log2, softcap_log2,
            HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PAGE_SIZE, LISTED, CAUSAL, WINDOWED, SOFTCAP, PRECISION, True,
        )
    else:
        sink_stop, first, inner, inner_end, stop = key_tile_ranges(
            low, high, num_keys, window, sinks, BLOCK_N, CAUSAL, WINDOWED
        )
        if SINKS:
            acc, row_max, row_sum = _walk(
                acc, row_max, row_sum, q, 0, sink_stop, k_base, v_base, table,
                stride_kb, stride_kt, stride_vb, stride_vt, FullTiles, PartBits, Bits,
                q_positions, num_keys, window, sinks, scale_log2, softcap_log2,
                HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PAGE_SIZE, LISTED, CAUSAL, WINDOWED, SOFTCAP, PRECISION, True,
            )
        if WINDOWED:
            acc, row_max, row_sum = _walk(
                acc, row_max, row_sum, q, first, inner, k_base, v_base, table,
                stride_kb, stride_kt, stride_vb, stride_vt, FullTiles, PartBits, Bits,
                q_positions, num_keys, window, sinks, scale_log2, softcap_log2,
                HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PAGE_SIZE, LISTED, CAUSAL, WINDOWED, SOFTCAP, PRECISION, True,
            )
        acc, row_max, row_sum = _walk(
            acc, row_max, row_sum, q, inner, inner_end, k_base, v_base, table,
            stride_kb, stride_kt, stride_vb, stride_vt, FullTiles, PartBits, Bits,
            q_positions, num_keys, window, sinks, scale_log2, softcap_log2,
            HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PAGE_SIZE, LISTED, CAUSAL, WINDOWED, SOFTCAP, PRECISION, False,
        )
        acc, row_max, row_sum = _walk(
            acc, row_max, row_sum, q, inner_end, stop, k_base, v_base, table,
            stride_kb, stride_kt, stride_vb, stride_vt, FullTiles, PartBits, Bits,
            q_positions, num_keys, window, sinks, scale_log2, softcap_log2,
            HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PAGE_SIZE, LISTED, CAUSAL, WINDOWED, SOFTCAP, PRECISION, True,
        )
    # fmt: on

    if SINK_LOGITS:  # one more column of the softmax, without a value
        sink = tl.load(SinkLogits + head).to(tl.float32) * LOG2E
        max_new = tl.maximum(row_max, sink)
        alpha = tl.exp2(row_max - max_new)
        row_sum = row_sum * alpha + tl.exp2(sink - max_new)
        acc = acc * alpha[:, None]
        row_max = max_new
    seen = row_sum > 0.0
    out = acc / tl.where(seen, row_sum, 1.0)[:, None]
    if KV_SCALES:
        out *= tl.load(VScale + head // GROUP)
    lse = tl.where(seen, (row_max + tl.log2(tl.where(seen, row_sum, 1.0))) * LN2, float("-inf"))
    o_ptrs = o_base + head.to(tl.int64) * stride_oh + rows * stride_ot + offs_d[None, :]
    tl.store(o_ptrs, out.to(Out.dtype.element_ty), mask=row_mask)
    l_ptrs = l_base + head.to(tl.int64) * stride_lh + offs_m.to(tl.int64) * stride_lt
    tl.store(l_ptrs, lse, mask=offs_m < num_queries)


def logit_scales(scale: float, softcap: float | None) -> tuple[float, float]:
    """The two factors that `primitives.logits_log2` takes."""
    if softcap is None:
        return scale * LOG2E.value, 0.0
    return 2.0 * scale / softcap * LOG2E.value, softcap * LOG2E.value


def closed_form(mask: Mask) -> Band:
    """The closed form of a mask.

    Raises:
        ValueError: it has none; ragged and paged batches need one, because lists are made for one pair of lengths.
    """
    if mask.band is None:
        raise ValueError(
            f"mask: {mask!r} is described by tile lists, which backend 'triton' takes in attention() only; "
            "use attention() for each sequence, or backend='cpu' or 'reference'"
        )
    return mask.band


def list_tensors(lists: TileLists | None) -> tuple[Tensor | int | None, ...]:
    """What the kernels take of tile lists: the tensors and the stride between heads."""
    if lists is None:
        return (None,) * 7 + (0,)
    stride = lists.num_q_tiles if lists.heads > 1 else 0
    return (
        lists.full_start,
        lists.full_tiles,
        lists.part_start,
        lists.part_tiles,
        lists.part_bits,
        lists.bits,
        lists.order,
        stride,
    )


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    strides: tuple[int, ...],
    tiles: int,
    num_seqs: int,
    lengths: tuple[int, int],
    group: int,
    config: Config,
    mask: Mask,
    scale: float,
    softcap: float | None,
    sink_logits: Tensor | None,
    kv_scales: tuple[Tensor, Tensor] | None = None,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    context_lens: Tensor | None = None,
    page_table: Tensor | None = None,
    page_size: int = 0,
    lists: TileLists | None = None,
) -> None:
    band = closed_form(mask) if lists is None else Band(causal=False)
    if tiles == 0:
        return
    scale_log2, softcap_log2 = logit_scales(scale, softcap)
    launch(
        _forward_kernel,
        (q.shape[1], tiles),
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
        *list_tensors(lists),
        *strides,
        page_table.stride(0) if page_table is not None else 0,
        num_seqs,
        *lengths,
        band.window or 0,
        band.sinks,
        scale_log2,
        softcap_log2,
        GROUP=group,
        HEAD_DIM=q.shape[-1],
        BLOCK_D=max(16, triton.next_power_of_2(q.shape[-1])),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        RAGGED=cu_q is not None,
        PAGE_SIZE=page_size,
        LISTED=lists is not None,
        CAUSAL=band.causal,
        WINDOWED=band.window is not None,
        SINKS=band.window is not None and band.sinks > 0,
        SOFTCAP=softcap is not None,
        SINK_LOGITS=sink_logits is not None,
        KV_SCALES=kv_scales is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
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
    config = forward_config(q.shape[-1], q.dtype, capability(q.device), None)
    lists = None
    if mask.band is None and q.shape[2] and k.shape[2]:
        config = sparse_config(config, mask)
        lists = tile_lists(mask, q.shape[2], k.shape[2], config.block_m, config.block_n, q.device)
    elif mask.band is None:
        mask = Full()  # no pairs at all: the kernel writes the empty rows
    _launch(
        q,
        k,
        v,
        out,
        lse,
        strides=(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *lse.stride()),
        tiles=cdiv(q.shape[2], config.block_m) * q.shape[0],
        num_seqs=q.shape[0],
        lengths=(q.shape[2], k.shape[2]),
        group=q.shape[1] // k.shape[1],
        config=config,
        mask=mask,
        scale=scale,
        softcap=softcap,
        sink_logits=sink_logits,
        lists=lists,
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
    config = forward_config(q.shape[-1], q.dtype, capability(q.device), None)
    num_seqs = cu_seqlens_q.shape[0] - 1
    _launch(
        q,
        k,
        v,
        out,
        lse,
        strides=(*_token_major(q), *_token_major(k), *_token_major(v), *_token_major(out), *_token_major(lse)),
        tiles=cdiv(q.shape[0], config.block_m) + num_seqs if num_seqs and q.shape[0] else 0,
        num_seqs=num_seqs,
        lengths=(0, 0),
        group=q.shape[1] // k.shape[1],
        config=config,
        mask=mask,
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
) -> None:
    """The sequences of ``batch`` that are not decodes; writes their rows of out (T, Hq, D) and lse (T, Hq)."""
    page_size = k_pages.shape[1]
    config = forward_config(q.shape[-1], q.dtype, capability(q.device), page_size)
    skip = batch.decodes
    num_seqs = batch.size - skip
    _launch(
        q,
        k_pages,
        v_pages,
        out,
        lse,
        strides=(*_token_major(q), *_pages(k_pages), *_pages(v_pages), *_token_major(out), *_token_major(lse)),
        tiles=cdiv(q.shape[0] - skip, config.block_m) + num_seqs,
        num_seqs=num_seqs,
        lengths=(0, 0),
        group=q.shape[1] // k_pages.shape[2],
        config=config,
        mask=mask,
        scale=scale,
        softcap=softcap,
        sink_logits=sink_logits,
        kv_scales=kv_scales,
        cu_q=batch.cu_seqlens_q[skip:],
        context_lens=batch.context_lens[skip:],
        page_table=batch.page_table[skip:],
        page_size=page_size,
    )


def _token_major(x: Tensor) -> tuple[int, int, int]:
    """(batch, head, token) strides of x (T, H, ...)."""
    return 0, x.stride(1), x.stride(0)


def _pages(x: Tensor) -> tuple[int, int, int]:
    """(page, head, token) strides of x (P, page_size, H, D)."""
    return x.stride(0), x.stride(2), x.stride(1)
