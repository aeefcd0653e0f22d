"""From checked arguments to a backend: each public function ends in one of these."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach_kernels import debug
from longreach_kernels.backends.load import backend_of
from longreach_kernels.backends.protocol import AttentionBackend, CuSeqlens
from longreach_kernels.backends.resolve import resolve_backend
from longreach_kernels.batch import PagedBatch
from longreach_kernels.call import AttentionCall
from longreach_kernels.checks import check_lists
from longreach_kernels.sizes import MAX_GRADIENT_HEAD_DIM


def chosen_backend(name: str, q: Tensor) -> AttentionBackend:
    """The backend for tensors like q.

    Raises:
        ValueError: it cannot run there.
    """
    return backend_of(resolve_backend(name, q.device, q.dtype).name)


def check_fp8(name: str, x: Tensor) -> None:
    """Raises a ValueError where the backend for tensors like x cannot read or write fp8 pages."""
    resolved = resolve_backend(name, x.device, x.dtype).name
    if resolved == "triton" and x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) < (8, 9):
        raise ValueError("k_pages: fp8 pages need compute capability 8.9 or later; use bf16 or fp16 pages")


def run(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: CuSeqlens | None, call: AttentionCall, backend: str
) -> tuple[Tensor, Tensor]:
    """A dense or ragged batch: straight to the backend, or through an operator where autograd or a compiler watches.

    The reference is made of differentiable operations and needs no operator of its own.

    Raises:
        ValueError: gradients are wanted of more channels than the backward kernels take.
    """
    compiling = torch.compiler.is_compiling()
    if compiling:
        from longreach_kernels.ops import constant_backend_name

        name = constant_backend_name(backend, q.device, q.dtype)
    else:
        name = resolve_backend(backend, q.device, q.dtype).name
    sinks = call.sink_logits
    differentiated = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad)
    )
    watched = compiling or differentiated
    if differentiated and name in ("triton", "hopper") and q.shape[-1] > MAX_GRADIENT_HEAD_DIM:
        raise ValueError(
            f"q: the backward kernels take head dims to {MAX_GRADIENT_HEAD_DIM}, got {q.shape[-1]}; use "
            "backend='reference', or call it under torch.no_grad()"
        )
    if name == "reference" or not watched:
        if cu_seqlens is None:
            return backend_of(name).attention(q, k, v, call)
        return backend_of(name).ragged_attention(q, k, v, cu_seqlens, call)
    from longreach_kernels.ops import attention_op

    cu_q, cu_k = cu_seqlens or (None, None)
    return attention_op(q, k, v, sinks, cu_q, cu_k, call.mask.key, call.scale, call.softcap, name)


def run_paged(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: PagedBatch, call: AttentionCall, backend: str
) -> tuple[Tensor, Tensor]:
    """A paged batch, once its tensors are checked (`checks.check_pages`).

    Raises:
        ValueError: the backend does not compute this call.
    """
    if debug.ENABLED:
        debug.check_batch(batch, q.shape[0], *k_pages.shape[:2])
    chosen = chosen_backend(backend, q)
    if call.kv_scales is not None:
        check_fp8(backend, q)
    if call.lists is not None:
        check_lists(call.lists, batch, q, None if chosen.takes_any_tiles else chosen.list_tiles(q, k_pages))
        if debug.ENABLED:
            debug.check_lists(call.lists, batch)
    if call.batch_invariant and not chosen.batch_invariant:
        name = resolve_backend(backend, q.device, q.dtype).name
        raise ValueError(f'batch_invariant: needs the backend "triton" or "hopper", not {name!r}')
    return chosen.paged_attention(q, k_pages, v_pages, batch, call)
