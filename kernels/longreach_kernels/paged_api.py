"""The public entry points for keys in pages: attention, what it needs, and the write of new keys.

Shapes: B sequences, Hq query heads, Hkv key heads (Hq a multiple of Hkv), T tokens of a batch, D channels of a head.
The log-sum-exp is as `api` says.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from longreach_kernels import debug
from longreach_kernels.batch import DecodeNeeds, PagedBatch
from longreach_kernels.call import AttentionCall
from longreach_kernels.checks import attention_call, check_pages, kv_scales_of
from longreach_kernels.dispatch import check_fp8, chosen_backend, run_paged
from longreach_kernels.masks.mask import Causal, Mask
from longreach_kernels.masks.tile_lists import TileLists

_CAUSAL = Causal()


@overload
def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: PagedBatch,
    mask: Mask = ...,
    *,
    scale: float | None = ...,
    softcap: float | None = ...,
    sink_logits: Tensor | None = ...,
    k_scale: Tensor | None = ...,
    v_scale: Tensor | None = ...,
    lists: TileLists | None = ...,
    batch_invariant: bool = ...,
    backend: str = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: PagedBatch,
    mask: Mask = ...,
    *,
    scale: float | None = ...,
    softcap: float | None = ...,
    sink_logits: Tensor | None = ...,
    k_scale: Tensor | None = ...,
    v_scale: Tensor | None = ...,
    lists: TileLists | None = ...,
    batch_invariant: bool = ...,
    backend: str = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: PagedBatch,
    mask: Mask = _CAUSAL,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    lists: TileLists | None = None,
    batch_invariant: bool = False,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of a step's queries to keys that lie in pages (PagedAttention, Kwon et al. 2023).

    The new tokens' keys must be in their pages already (`write_pages`). Does not wait for the device, and so believes
    the numbers in ``batch``; with ``LONGREACH_DEBUG=1`` it waits and checks them (`longreach_kernels.debug`). With a
    mask that has no closed form it waits for the lengths, once a batch, and cannot be captured in a CUDA graph.

    Over fp8 pages the backend ``"hopper"`` computes a prefill in products of 8-bit floats where it can
    (`forward_launch.supports`): queries, each with a scale of its own, and softmax weights are rounded to e4m3 as keys
    and values are. ``"triton"`` rounds neither. `rotate` may lessen the error.

    Args:
        q: (T, Hq, D), the queries of all sequences laid end to end.
        k_pages, v_pages: (num_pages, page_size, Hkv, D), in the dtype of q or both float8_e4m3fn.
        batch: whose queries these are and where their keys lie.
        mask, scale, softcap, sink_logits, backend, return_lse: as in `attention`.
        k_scale, v_scale: (Hkv,) fp32, what a head's fp8 numbers are multiplied by; only with fp8 pages.
        lists: what each query tile sees, in place of a mask, for example from `sparse.select_tiles`: lists of all
            sequences, decodes included, of tiles as `list_tiles` says. Their bit tiles hold what cuts tiles, causal
            edges included. Nothing waits for the device, and so what they say is believed, as ``batch`` is.
        batch_invariant: whether the bits of a query's result may depend on nothing but that query, its keys, and
            whether it is a decode: not on other sequences, nor on which queries of its own come in the same call. Under
            a mask without a closed form, or lists, they do depend on where the query's tile begins. Backends
            ``"triton"`` and ``"hopper"``.

    Returns:
        out like q, contiguous; with ``return_lse`` also lse (T, Hq).

    Raises:
        ValueError: an argument does not fit; the message begins with its name.
    """
    check_pages(q, k_pages, v_pages, batch)
    if lists is not None and mask != _CAUSAL:
        raise ValueError(f"mask: the lists say what is seen; leave the mask out, got {mask!r}")
    call = attention_call(
        q,
        mask,
        scale,
        softcap,
        sink_logits,
        kv_scales=kv_scales_of(k_pages, k_scale, v_scale),
        lists=lists,
        batch_invariant=batch_invariant,
    )
    out, lse = run_paged(q, k_pages, v_pages, batch, call, backend)
    return (out.to(q.dtype), lse) if return_lse else out.to(q.dtype)


def paged_attention_call(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: PagedBatch, call: AttentionCall, backend: str
) -> tuple[Tensor, Tensor]:
    """As `paged_attention`, of a call that the caller has made, and always with lse. The call is not checked again.

    Raises:
        ValueError: a tensor or ``batch`` does not fit, or the backend does not compute this call.
    """
    check_pages(q, k_pages, v_pages, batch)
    out, lse = run_paged(q, k_pages, v_pages, batch, call, backend)
    return out.to(q.dtype), lse


def list_tiles(q: Tensor, k_pages: Tensor, *, backend: str = "auto") -> tuple[int, int]:
    """Queries and keys of a tile of the lists that `paged_attention` takes for such tensors; the backends
    ``"reference"`` and ``"cpu"`` take lists of any tiles.

    Args:
        q: (T, Hq, D).
        k_pages: (num_pages, page_size, Hkv, D).
        backend: as in `attention`.
    """
    return chosen_backend(backend, q).list_tiles(q, k_pages)


def decode_needs(
    q: Tensor, k_pages: Tensor, num_seqs: int, max_context_len: int, *, backend: str = "auto"
) -> DecodeNeeds:
    """What a causal decode of ``num_seqs`` sequences with at most ``max_context_len`` keys needs beside such tensors.

    Args:
        q: (T, Hq, D).
        k_pages: (num_pages, page_size, Hkv, D).
        backend: as in `attention`.
    """
    return chosen_backend(backend, q).decode_needs(q, k_pages, num_seqs, max_context_len)


def write_pages(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Write new keys and values into their pages, in place.

    Never waits for a GPU, and so believes ``slots``; with ``LONGREACH_DEBUG=1`` it waits and checks them
    (`longreach_kernels.debug`).

    Args:
        k, v: (T, Hkv, D).
        k_pages, v_pages: (num_pages, page_size, Hkv, D), contiguous.
        slots: (T,) int64, ``page * page_size + offset`` of each token; -1 skips it (padding).
        k_scale, v_scale: (Hkv,) fp32, what a head's numbers are divided by on their way into fp8 pages.
        backend: as in `attention`.

    Raises:
        ValueError: an argument does not fit; the message begins with its name.
    """
    for name, x, pages_name, pages in (("k", k, "k_pages", k_pages), ("v", v, "v_pages", v_pages)):
        if pages.dim() != 4 or not pages.is_contiguous():
            raise ValueError(f"{pages_name}: needs a contiguous (num_pages, page_size, Hkv, D), got {pages.shape}")
        if x.dim() != 3 or x.shape[1:] != pages.shape[2:]:
            raise ValueError(f"{name}: needs shape (T, {pages.shape[2]}, {pages.shape[3]}), got {tuple(x.shape)}")
        if x.device != pages.device:
            raise ValueError(f"{name}: needs the device of {pages_name}, {pages.device}, got {x.device}")
    if k.shape != v.shape:
        raise ValueError(f"v: needs the shape of k, {tuple(k.shape)}, got {tuple(v.shape)}")
    if slots.dtype != torch.int64 or slots.shape != k.shape[:1]:
        raise ValueError(f"slots: needs int64 of shape ({k.shape[0]},), got {slots.dtype} {tuple(slots.shape)}")
    if slots.device != k.device:
        raise ValueError(f"slots: needs the device of k, {k.device}, got {slots.device}")
    if v_pages.dtype != k_pages.dtype:
        raise ValueError(f"v_pages: needs the dtype of k_pages, {k_pages.dtype}, got {v_pages.dtype}")
    kv_scales = kv_scales_of(k_pages, k_scale, v_scale)
    if debug.ENABLED:
        debug.check_slots(slots, *k_pages.shape[:2])
    if kv_scales is not None:
        check_fp8(backend, k)
    chosen_backend(backend, k).write_pages(k, v, k_pages, v_pages, slots, kv_scales)
