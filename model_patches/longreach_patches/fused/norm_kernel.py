"""The Triton form of `norm`."""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from longreach_kernels.backends.triton.config import launch
from torch import Tensor

from longreach_patches.fused.norm import HeadNorms, Norm


@triton.jit
def _norm_kernel(
    X,
    Weight,
    Bias,
    Out,
    epsilon,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    CENTER: tl.constexpr,
    ADD: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Grid (T,)."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    inside = offs < WIDTH
    x = tl.load(X + row * WIDTH + offs, mask=inside, other=0.0).to(tl.float32)
    if CENTER:
        x = tl.where(inside, x - tl.sum(x, 0) / WIDTH, 0.0)
    out = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + epsilon)
    if Weight is not None:
        weight = tl.load(Weight + offs, mask=inside, other=0.0).to(tl.float32)
        if PLUS_ONE:
            weight += 1.0
        out *= weight
    if Bias is not None:
        out += tl.load(Bias + offs, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        out = out * SCALE + tl.load(Out + row * WIDTH + offs, mask=inside, other=0.0).to(tl.float32)
    tl.store(Out + row * WIDTH + offs, out.to(Out.dtype.element_ty), mask=inside)


@triton.jit
def _all_heads_kernel(
    QKV,
    QWeight,
    KWeight,
    epsilon,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):
    """Grid (T, 2): queries, and keys."""
    token = tl.program_id(0).to(tl.int64)
    is_key = tl.program_id(1)
    offs = tl.arange(0, BLOCK)
    width = QUERIES + is_key * (KEYS - QUERIES)
    inside = offs < width
    places = QKV + token * (QUERIES + 2 * KEYS) + is_key * QUERIES + offs
    x = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    q_weight = tl.load(QWeight + offs, mask=inside & (is_key == 0), other=0.0).to(tl.float32)
    k_weight = tl.load(KWeight + offs, mask=inside & (is_key == 1), other=0.0).to(tl.float32)
    weight = q_weight + k_weight  # one of the two is 0
    if PLUS_ONE:
        weight += 1.0
    factor = tl.rsqrt(tl.sum(x * x, 0) / width + epsilon)
    tl.store(places, (x * factor * weight).to(QKV.dtype.element_ty), mask=inside)


def normalize(x: Tensor, norm: Norm, add_to: Tensor | None, scale: float) -> Tensor:
    """As `norm.normalize`, rounded once."""
    rows, width = x.shape
    out = torch.empty_like(x) if add_to is None else add_to
    if rows:
        block = triton.next_power_of_2(width)
        launch(
            _norm_kernel,
            (rows,),
            x,
            norm.weight,
            norm.bias,
            out,
            norm.epsilon,
            WIDTH=width,
            BLOCK=block,
            PLUS_ONE=norm.kind in ("rms_plus_one", "layer_plus_one"),
            CENTER=norm.centred,
            ADD=add_to is not None,
            SCALE=scale,
            num_warps=_warps(block),
        )
    return out


def normalize_all_heads(qkv: Tensor, norms: HeadNorms) -> None:
    """As `norm.normalize_all_heads`, rounded once."""
    queries, keys = len(norms.query), len(norms.key)
    block = triton.next_power_of_2(max(queries, keys))
    if len(qkv):
        launch(
            _all_heads_kernel,
            (len(qkv), 2),
            qkv,
            norms.query,
            norms.key,
            norms.epsilon,
            QUERIES=queries,
            KEYS=keys,
            BLOCK=block,
            PLUS_ONE=norms.kind == "rms_plus_one",
            num_warps=_warps(block),
        )


def _warps(block: Any) -> int:
    return 8 if block >= 4096 else 4
