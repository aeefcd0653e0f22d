"""Attention as operators of torch: ``longreach::attention`` and its backward, for autograd and torch.compile.

Operators take tensors, numbers and strings only, so a mask travels as its key (`Mask.key`). Dense and ragged batches
share the operators; ragged ones have cu_seqlens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longreach_kernels.backends.load import differentiable_backend_of
from longreach_kernels.backends.protocol import CuSeqlens, Saved
from longreach_kernels.backends.resolve import resolve_backend
from longreach_kernels.call import AttentionCall
from longreach_kernels.masks.mask import mask_of


@torch.compiler.assume_constant_result  # loads torch's compiler, which takes longer than all the rest of this package
def constant_backend_name(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """The name of the backend that is chosen, for a compiler that cannot see into the choice."""
    return resolve_backend(backend, device, dtype).name


@torch.library.custom_op("longreach::attention", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_logits: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    mask: str,
    scale: float,
    softcap: float | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """out and lse of a dense or ragged batch, contiguous."""
    call = AttentionCall(mask_of(mask), scale, softcap, sink_logits)
    chosen = differentiable_backend_of(backend)
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return chosen.attention(q, k, v, call)
    return chosen.ragged_attention(q, k, v, CuSeqlens(cu_seqlens_q, cu_seqlens_k), call)


@attention_op.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=lse_dtype)


@torch.library.custom_op("longreach::attention_backward", mutates_args=())
def attention_backward_op(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Sequence[Tensor],
    mask: str,
    scale: float,
    softcap: float | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and delta = rowsum(grad_out * out) - grad_lse; ``cu_seqlens`` is empty for a dense batch."""
    saved = Saved(q, k, v, out, lse, CuSeqlens(*cu_seqlens) if cu_seqlens else None)
    call = AttentionCall(mask_of(mask), scale, softcap)
    return differentiable_backend_of(backend).backward(grad_out, grad_lse, saved, call)


@attention_backward_op.register_fake
def _(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), torch.empty_like(lse)


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sink_logits, cu_seqlens_q, cu_seqlens_k, mask, scale, softcap, backend = inputs
    ctx.save_for_backward(q, k, v, sink_logits, cu_seqlens_q, cu_seqlens_k, *output)
    ctx.options = (mask, scale, softcap, backend)
    ctx.mask = mask_of(mask)  # a mask without a closed form lives until its backward pass
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, sink_logits, cu_seqlens_q, cu_seqlens_k, out, lse = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    cu_seqlens = [] if cu_seqlens_q is None else [cu_seqlens_q, cu_seqlens_k]
    dq, dk, dv, delta = attention_backward_op(grad_out, grad_lse, q, k, v, out, lse, cu_seqlens, *ctx.options)
    dsinks = None
    if sink_logits is not None and ctx.needs_input_grad[3]:
        # The sink's column has a weight exp(s - L) and no value, so its logit's gradient is -weight * delta.
        sinks = sink_logits.to(lse.dtype)
        if cu_seqlens_q is None:
            dsinks = -(torch.exp(sinks[None, :, None] - lse) * delta).sum((0, 2))
        else:
            dsinks = -(torch.exp(sinks - lse) * delta).sum(0)
        dsinks = dsinks.to(sink_logits.dtype)
    return dq, dk, dv, dsinks, None, None, None, None, None, None


attention_op.register_autograd(_backward, setup_context=_setup_context)
