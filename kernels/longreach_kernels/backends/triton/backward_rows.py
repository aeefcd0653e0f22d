"""Device functions that the two backward kernels share: rows of tokens, and what was saved of them."""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# (to the stubs a constexpr has no attributes, and device functions that return tl values return nothing)
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from longreach_kernels.backends.triton.primitives import LOG2E, load_rows


class Numbers(NamedTuple):
    """What a mask and the logits are made with."""

    window: Any
    sinks: Any
    scale_log2: Any
    softcap_log2: Any


@triton.jit
def load_tokens(base, rows, stride, offs_d, limit, FORM: tl.constexpr):
    """Rows of a (tokens, channels) matrix, 0 beyond its end."""
    pointers = base + rows.to(tl.int64)[:, None] * stride + offs_d[None, :]
    return load_rows(pointers, rows, offs_d, limit, FORM.head_dim, FORM.block_d, True)


@triton.jit
def load_statistics(l_base, d_base, rows, stride, limit):
    """L in log2 units, +inf for rows beyond the end or that saw nothing, and delta."""
    lse = tl.load(l_base + rows.to(tl.int64) * stride, mask=rows < limit, other=float("inf")) * LOG2E
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    delta = tl.load(d_base + rows.to(tl.int64) * stride, mask=rows < limit, other=0.0)
    return lse, delta


@triton.jit
def capped_slope(ds, logits, softcap_log2, SOFTCAP: tl.constexpr):
    """Times the derivative of the softcap, 1 - tanh^2."""
    if SOFTCAP:
        tanh = logits / softcap_log2
        ds = ds * (1.0 - tanh * tanh)
    return ds


@triton.jit
def store_tokens(base, rows, stride, offs_d, limit, x, HEAD_DIM: tl.constexpr):
    """Write rows of a (tokens, channels) matrix, up to its end."""
    inside = (rows[:, None] < limit) & (offs_d[None, :] < HEAD_DIM)
    pointers = base + rows.to(tl.int64)[:, None] * stride + offs_d[None, :]
    tl.store(pointers, x.to(base.dtype.element_ty), mask=inside)
