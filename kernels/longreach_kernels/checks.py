"""What a caller gives, checked: every fault is a ValueError that names the argument."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from longreach_kernels.batch import PagedBatch
from longreach_kernels.call import AttentionCall
from longreach_kernels.masks.mask import Mask
from longreach_kernels.masks.tile_lists import TileLists
from longreach_kernels.sizes import MAX_HEAD_DIM

FP8 = torch.float8_e4m3fn


def check_inputs(q: Tensor, k: Tensor, v: Tensor, k_name: str, v_name: str, dims: int, head_axis: int) -> None:
    """Check dtypes, devices, strides and shapes of q, with `dims` dimensions and its heads at `head_axis`, and of keys
    and values, dense, ragged or in pages, under the names that the caller knows them by."""
    for name, x, want in (("q", q, dims), (k_name, k, dims if k_name == "k" else 4), (v_name, v, k.dim())):
        if x.dim() != want:
            raise ValueError(f"{name}: needs {want} dimensions, got shape {tuple(x.shape)}")
    if not q.dtype.is_floating_point:
        raise ValueError(f"q: needs a floating point dtype, got {q.dtype}")
    if k.shape != v.shape:
        raise ValueError(f"{v_name}: needs the shape of {k_name}, {tuple(k.shape)}, got {tuple(v.shape)}")
    if k.dtype != q.dtype and not (k_name == "k_pages" and k.dtype == FP8):
        raise ValueError(f"{k_name}: needs the dtype of q, {q.dtype}, got {k.dtype}")
    if v.dtype != k.dtype:
        raise ValueError(f"{v_name}: needs the dtype of {k_name}, {k.dtype}, got {v.dtype}")
    for name, x in ((k_name, k), (v_name, v)):
        if x.device != q.device:
            raise ValueError(f"{name}: needs the device of q, {q.device}, got {x.device}")
        if x.stride(-1) != 1:
            raise ValueError(f"{name}: the channels of a head must be contiguous; call .contiguous()")
    if q.stride(-1) != 1:
        raise ValueError("q: the channels of a head must be contiguous; call .contiguous()")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"{k_name}: needs the head dim of q, {q.shape[-1]}, got {k.shape[-1]}")
    if not 1 <= q.shape[-1] <= MAX_HEAD_DIM:
        raise ValueError(f"q: head dim must lie between 1 and {MAX_HEAD_DIM}, got {q.shape[-1]}")
    heads, kv_heads = q.shape[head_axis], k.shape[1 if dims == 4 else -2]
    if kv_heads == 0 or heads == 0 or heads % kv_heads:
        raise ValueError(f"{k_name}: {heads} query heads are not a multiple of its {kv_heads} heads")


def check_pages(q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: PagedBatch) -> None:
    """Check the tensors of a paged batch by all that is known without waiting for the device."""
    check_inputs(q, k_pages, v_pages, "k_pages", "v_pages", dims=3, head_axis=1)
    if batch.context_lens.device != q.device:
        raise ValueError(f"batch: needs its tensors on the device of q, {q.device}, got {batch.context_lens.device}")
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if pages.stride(0) != pages.shape[1] * pages.stride(1):
            raise ValueError(f"{name}: pages must follow each other in memory, strides are {pages.stride()}")
    if batch.max_context_len > batch.page_table.shape[1] * k_pages.shape[1]:
        raise ValueError(
            f"batch: max_context_len {batch.max_context_len} does not fit {batch.page_table.shape[1]} pages "
            f"of {k_pages.shape[1]} tokens a sequence"
        )
    if torch.is_grad_enabled() and (q.requires_grad or k_pages.requires_grad or v_pages.requires_grad):
        raise ValueError("q: paged attention has no gradient; call it under torch.no_grad() or detach its inputs")


def kv_scales_of(k_pages: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """The scales of fp8 pages; other pages have none."""
    of_keys, of_values = kv_scale_of(k_pages, "k_scale", k_scale), kv_scale_of(k_pages, "v_scale", v_scale)
    return None if of_keys is None or of_values is None else (of_keys, of_values)


def kv_scale_of(pages: Tensor, name: str, scale: Tensor | None) -> Tensor | None:
    """One of the scales, by its name: (Hkv,) fp32 for fp8 pages, None for others."""
    if pages.dtype != FP8:
        if scale is not None:
            raise ValueError(f"{name}: only float8_e4m3fn pages have scales, these are {pages.dtype}")
        return None
    shape = (pages.shape[2],)
    if scale is None or scale.shape != shape or scale.dtype != torch.float32 or scale.device != pages.device:
        got = None if scale is None else f"{scale.dtype} {tuple(scale.shape)} on {scale.device}"
        raise ValueError(f"{name}: fp8 pages need an fp32 tensor {shape} on {pages.device}, got {got}")
    return scale


def attention_call(
    q: Tensor,
    mask: Mask,
    scale: float | None,
    softcap: float | None,
    sink_logits: Tensor | None,
    *,
    kv_scales: tuple[Tensor, Tensor] | None = None,
    lists: TileLists | None = None,
    batch_invariant: bool = False,
) -> AttentionCall:
    """The call of what a caller gives with queries q, whose heads are at axis 1, checked and completed.

    Scales are those of `kv_scales_of`; lists are checked by `check_lists` once the backend is known.
    """
    heads = q.shape[1]
    if not isinstance(mask, Mask):
        raise ValueError(f"mask: needs a mask such as Causal() or Window(4096), got {mask!r}")
    if heads % mask.heads:
        raise ValueError(f"mask: the {mask.heads} heads that its layout tells apart do not divide the {heads} of q")
    scale = scale_of(q, scale)
    check_softcap(softcap)
    if sink_logits is not None:
        if sink_logits.shape != (heads,):
            raise ValueError(f"sink_logits: needs one logit a query head, ({heads},), got {tuple(sink_logits.shape)}")
        if sink_logits.device != q.device:
            raise ValueError(f"sink_logits: needs the device of q, {q.device}, got {sink_logits.device}")
    return AttentionCall(mask, scale, softcap, sink_logits, kv_scales, lists, batch_invariant)


def scale_of(q: Tensor, scale: float | None) -> float:
    """The factor of the logits; by default ``D ** -0.5``."""
    if scale is None:
        return q.shape[-1] ** -0.5
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale: must be positive and finite, got {scale}")
    return scale


def check_softcap(softcap: float | None) -> None:
    """Check the cap of the logits."""
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap: must be positive and finite, or None, got {softcap}")


def check_cu_seqlens(name: str, cu_seqlens: Tensor, device: torch.device) -> None:
    """Check where the sequences of a ragged batch start: int32 (B + 1,) on the device of q."""
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"{name}: needs an int32 tensor (B + 1,), got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}")
    if cu_seqlens.device != device:
        raise ValueError(f"{name}: needs the device of q, {device}, got {cu_seqlens.device}")


def check_lists(lists: TileLists, batch: PagedBatch, q: Tensor, tiles: tuple[int, int] | None) -> None:
    """Check lists that a caller brings, by all that is known without waiting for the device; ``tiles``: the sizes that
    the backend takes, None for any."""
    heads = q.shape[1]
    for name in ("first_row", "start", "partial", "tiles", "bit_index", "bits", "order"):
        x = getattr(lists, name)
        if x.dtype != torch.int32 or not x.is_contiguous():
            raise ValueError(f"lists: needs a contiguous int32 tensor {name}, got {x.dtype} {tuple(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"lists: needs {name} on the device of q, {q.device}, got {x.device}")
    if tiles is not None and (lists.tile_q, lists.tile_k) != tiles:
        raise ValueError(
            f"lists: this backend takes tiles of {tiles[0]} queries and {tiles[1]} keys here, got {lists.tile_q} and "
            f"{lists.tile_k}; list_tiles() says which"
        )
    if lists.tile_q < 1 or lists.tile_k < 32 or lists.tile_k % 32:
        raise ValueError(f"lists: tiles need keys in multiples of 32, got {lists.tile_q} x {lists.tile_k}")
    if lists.heads < 1 or heads % lists.heads:
        raise ValueError(f"lists: the {lists.heads} heads that they tell apart do not divide the {heads} of q")
    if lists.first_row.shape != (batch.size,):
        raise ValueError(f"lists: needs first_row ({batch.size},), got {tuple(lists.first_row.shape)}")
    rows = lists.partial.shape[0]
    if lists.start.shape != (rows + 1,) or lists.order.shape != (rows,) or lists.partial.dim() != 1:
        raise ValueError(
            f"lists: {rows} rows in partial need {rows + 1} in start and {rows} in order, "
            f"got {tuple(lists.start.shape)} and {tuple(lists.order.shape)}"
        )
    if lists.tiles.dim() != 1 or lists.bit_index.shape != lists.tiles.shape:
        raise ValueError(
            f"lists: needs one bit_index an entry of tiles, got {tuple(lists.bit_index.shape)} for "
            f"{tuple(lists.tiles.shape)}"
        )
    if lists.bits.dim() != 3 or lists.bits.shape[1:] != (lists.tile_q, lists.tile_k // 32):
        raise ValueError(
            f"lists: needs bits (tables, {lists.tile_q}, {lists.tile_k // 32}), got {tuple(lists.bits.shape)}"
        )
