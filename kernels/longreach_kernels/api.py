"""The public entry points for dense and ragged batches; `paged_api` has those for pages.

Shapes: B sequences, Hq query heads, Hkv key heads (Hq a multiple of Hkv), N tokens of a sequence, T tokens of a batch,
D channels of a head. The log-sum-exp is natural, of the scaled (and softcapped) logits, fp32 (fp64 for fp64 inputs).
"""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from longreach_kernels import debug
from longreach_kernels.backends.protocol import CuSeqlens
from longreach_kernels.checks import attention_call, check_cu_seqlens, check_inputs
from longreach_kernels.dispatch import run
from longreach_kernels.masks.mask import Causal, Mask

_CAUSAL = Causal()


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
    call = attention_call(q, mask, scale, softcap, sink_logits)
    out, lse = run(q, k, v, None, call, backend)
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
    call = attention_call(q, mask, scale, softcap, sink_logits)
    if debug.ENABLED:
        debug.check_starts("cu_seqlens_q", cu_seqlens_q, "q", q.shape[0])
        debug.check_starts("cu_seqlens_k", cu_seqlens_k, "k", k.shape[0])
    out, lse = run(q, k, v, CuSeqlens(cu_seqlens_q, cu_seqlens_k), call, backend)
    return (out.to(q.dtype), lse) if return_lse else out.to(q.dtype)
