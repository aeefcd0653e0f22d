"""The public entry points: dense, ragged and paged attention, and the write of new keys into pages.

Shapes: B sequences, Hq query heads, Hkv key heads (Hq a multiple of Hkv), N tokens of a sequence, T tokens of a batch,
D channels of a head. The log-sum-exp is natural, of the scaled (and softcapped) logits, fp32 (fp64 for fp64 inputs).
"""

from __future__ import annotations

from types import ModuleType
from typing import Literal, overload

import torch
from torch import Tensor

from longreach_kernels import debug
from longreach_kernels.backends.resolve import resolve_backend
from longreach_kernels.batch import PagedBatch
from longreach_kernels.checks import check_cu_seqlens, check_inputs, check_lists, kv_scales_of, options_of
from longreach_kernels.masks.mask import Causal, Mask
from longreach_kernels.masks.tile_lists import TileLists
from longreach_kernels.needs import DecodeNeeds

_CAUSAL = Causal()


def _module(backend: str, q: Tensor) -> ModuleType:
    name = resolve_backend(backend, q.device, q.dtype).name
    if name == "cpu":
        from longreach_kernels.backends.cpu import forward as cpu

        return cpu
    if name == "triton":
        from longreach_kernels.backends import triton as portable

        return portable
    if name == "hopper":
        from longreach_kernels.backends import hopper

        return hopper
    from longreach_kernels.backends.reference import forward as reference

    return reference


def _fp8_module(backend: str, q: Tensor) -> ModuleType:
    """The module for fp8 pages."""
    name = resolve_backend(backend, q.device, q.dtype).name
    if name == "triton" and q.device.type == "cuda" and torch.cuda.get_device_capability(q.device) < (8, 9):
        raise ValueError("k_pages: fp8 pages need compute capability 8.9 or later; use bf16 or fp16 pages")
    return _module(backend, q)


def _run(
    backend: str, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: tuple[Tensor, Tensor] | None, options: dict
) -> tuple[Tensor, Tensor]:
    """A dense or ragged batch: straight to the backend, or through an operator where autograd or a compiler watches.

    The reference is made of differentiable operations and needs no operator of its own.
    """
    if torch.compiler.is_compiling():
        from longreach_kernels.ops import constant_backend_name

        name = constant_backend_name(backend, q.device, q.dtype)
    else:
        name = resolve_backend(backend, q.device, q.dtype).name
    sinks = options["sink_logits"]
    watched = torch.compiler.is_compiling() or (
        torch.is_grad_enabled()
        and (q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad))
    )
    if name == "reference" or not watched:
        module = _module(backend, q)
        if cu_seqlens is None:
            return module.attention(q, k, v, **options)
        return module.ragged_attention(q, k, v, *cu_seqlens, **options)
    from longreach_kernels.ops import attention_op

    cu_q, cu_k = cu_seqlens or (None, None)
    return attention_op(q, k, v, sinks, cu_q, cu_k, options["mask"].key, options["scale"], options["softcap"], name)


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = ...,
    *,
    scale: float | None = ...,
    softcap: float | None = ...,
    sink_logits: Tensor | None = ...,
    backend: str = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = ...,
    *,
    scale: float | None = ...,
    softcap: float | None = ...,
    sink_logits: Tensor | None = ...,
    backend: str = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = _CAUSAL,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of a dense batch, in memory linear in the length (FlashAttention-2, Dao 2023).

    Differentiable in q, k, v and sink_logits, through out and lse; works under ``torch.compile(fullgraph=True)``.

    Args:
        q: (B, Hq, Nq, D), floating point, channels contiguous.
        k, v: (B, Hkv, Nk, D), same dtype and device.
        mask: which keys a query sees; queries and keys are aligned at the last one.
        scale: factor of the logits; ``D ** -0.5`` by default.
        softcap: caps the logits to ``softcap * tanh(logits / softcap)``.
        sink_logits: (Hq,) a logit for each head that joins the denominator and has no value.
        backend: ``"auto"``, or a name that `resolve_backend` takes.
        return_lse: also return the log-sum-exp.

    Returns:
        out like q, contiguous; with ``return_lse`` also lse (B, Hq, Nq). Rows that see nothing give 0 and -inf.

    Raises:
        ValueError: an argument does not fit; the message begins with its name.
    """
    check_inputs(q, k, v, "k", "v", dims=4, head_axis=1)
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"k: needs the batch size of q, {q.shape[0]}, got {k.shape[0]}")
    options = options_of(q, q.shape[1], mask, scale, softcap, sink_logits)
    out, lse = _run(backend, q, k, v, None, options)
    return (out.to(q.dtype), lse) if return_lse else out.to(q.dtype)


@overload
def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    mask: Mask = ...,
    *,
    scale: float | None = ...,
    softcap: float | None = ...,
    sink_logits: Tensor | None = ...,
    backend: str = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    mask: Mask = ...,
    *,
    scale: float | None = ...,
    softcap: float | None = ...,
    sink_logits: Tensor | None = ...,
    backend: str = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    mask: Mask = _CAUSAL,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of sequences of different lengths laid end to end. Differentiable as `attention`.

    Believes the numbers in the cu_seqlens; with ``LONGREACH_DEBUG=1`` it waits for the device and checks them
    (`longreach_kernels.debug`). Waits, too, for the lengths if the mask has no closed form.

    Args:
        q: (Tq, Hq, D); k, v: (Tk, Hkv, D), same dtype and device.
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32, where each sequence starts; the first entry is 0 and the last the
            number of tokens. Each sequence is aligned at its last token.
        mask, scale, softcap, sink_logits, backend, return_lse: as in `attention`.

    Returns:
        out like q, contiguous; with ``return_lse`` also lse (Tq, Hq).

    Raises:
        ValueError: an argument does not fit; the message begins with its name.
    """
    check_inputs(q, k, v, "k", "v", dims=3, head_axis=1)
    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.device)
    check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q.device)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k: needs the length of cu_seqlens_q, {cu_seqlens_q.shape[0]}, got {cu_seqlens_k.shape[0]}"
        )
    options = options_of(q, q.shape[1], mask, scale, softcap, sink_logits)
    if debug.ENABLED:
        debug.check_starts("cu_seqlens_q", cu_seqlens_q, "q", q.shape[0])
        debug.check_starts("cu_seqlens_k", cu_seqlens_k, "k", k.shape[0])
    out, lse = _run(backend, q, k, v, (cu_seqlens_q, cu_seqlens_k), options)
    return (out.to(q.dtype), lse) if return_lse else out.to(q.dtype)


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
    (`hopper.launch.supports`): queries, each with a scale of its own, and softmax weights are rounded to e4m3 as keys
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
    if lists is not None and mask != _CAUSAL:
        raise ValueError(f"mask: the lists say what is seen; leave the mask out, got {mask!r}")
    options = options_of(q, q.shape[1], mask, scale, softcap, sink_logits)
    kv_scales = kv_scales_of(k_pages, k_scale, v_scale)
    if debug.ENABLED:
        debug.check_batch(batch, q.shape[0], *k_pages.shape[:2])
    module = _module(backend, q)
    if kv_scales is not None:
        module = _fp8_module(backend, q)
        options["kv_scales"] = kv_scales
    if lists is not None:
        wanted = None if module.__name__.endswith((".cpu", ".reference")) else module.list_tiles(q, k_pages)
        check_lists(lists, batch, q, wanted)
        if debug.ENABLED:
            debug.check_lists(lists, batch)
        options["lists"] = lists
    if batch_invariant:
        name = resolve_backend(backend, q.device, q.dtype).name
        if name not in ("triton", "hopper"):
            raise ValueError(f'batch_invariant: needs the backend "triton" or "hopper", not {name!r}')
        if name == "hopper":  # the other has no other way
            options["batch_invariant"] = True
    out, lse = module.paged_attention(q, k_pages, v_pages, batch, **options)
    return (out.to(q.dtype), lse) if return_lse else out.to(q.dtype)


def list_tiles(q: Tensor, k_pages: Tensor, *, backend: str = "auto") -> tuple[int, int]:
    """Queries and keys of a tile of the lists that `paged_attention` takes for such tensors; the backends
    ``"reference"`` and ``"cpu"`` take lists of any tiles.

    Args:
        q: (T, Hq, D).
        k_pages: (num_pages, page_size, Hkv, D).
        backend: as in `attention`.
    """
    return _module(backend, q).list_tiles(q, k_pages)


def decode_needs(
    q: Tensor, k_pages: Tensor, num_seqs: int, max_context_len: int, *, backend: str = "auto"
) -> DecodeNeeds:
    """What a causal decode of ``num_seqs`` sequences with at most ``max_context_len`` keys needs beside such tensors.

    Args:
        q: (T, Hq, D).
        k_pages: (num_pages, page_size, Hkv, D).
        backend: as in `attention`.
    """
    return _module(backend, q).decode_needs(q, k_pages, num_seqs, max_context_len)


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
    module = _module(backend, k) if kv_scales is None else _fp8_module(backend, k)
    module.write_pages(k, v, k_pages, v_pages, slots, kv_scales)
