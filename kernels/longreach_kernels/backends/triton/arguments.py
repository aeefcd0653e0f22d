"""What kernels are given: what they are compiled for, strides, tile lists, and the factors of the logits.

Kernels take these as tuples with names, so that an argument is written once on each side of a launch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from longreach_kernels.backends.triton.config import TileConfig
from longreach_kernels.backends.triton.primitives import LOG2E
from longreach_kernels.call import AttentionCall
from longreach_kernels.masks.mask import Band
from longreach_kernels.masks.tile_lists import TileLists

# Numbers that differ from call to call: a kernel must not be compiled again for each kind of them.
NUMBERS = ["num_seqs", "dense_queries", "dense_keys", "window", "sinks", "stride_table", "section"]


class Form(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        group: query heads of a KV head.
        head_dim, block_d: channels, and the power of two that they are padded to.
        block_m, block_n: queries and keys of a tile.
        ragged: sequences are found by cu_seqlens; else all have the same lengths.
        page_size: tokens of a page; 0 where keys are contiguous.
        listed: key tiles come from `TileLists`; else from the closed form.
        causal, windowed, sinks: the closed form; sinks are first keys beside a window.
        softcap, sink_logits, kv_scales: whether there are any.
        precision: of fp32 products.
    """

    group: int
    head_dim: int
    block_d: int
    block_m: int
    block_n: int
    ragged: bool
    page_size: int
    listed: bool
    causal: bool
    windowed: bool
    sinks: bool
    softcap: bool
    sink_logits: bool
    kv_scales: bool
    precision: str


class Lists(NamedTuple):
    """`TileLists` as a kernel reads them; ``sharing`` query heads in a row have the same list."""

    first_row: Any
    start: Any
    tiles: Any
    bit_index: Any
    bits: Any
    order: Any
    sharing: int


class Sequences(NamedTuple):
    """Where the sequences of a launch lie.

    Attributes:
        tiles: query tiles of all sequences together, at most.
        num_seqs: how many there are.
        num_keys: keys of all sequences together, at most.
        lengths: queries and keys of each sequence of a dense batch.
        cu_q, cu_k: of a ragged or paged batch, where each sequence's queries and keys begin.
        context_lens, page_table: of a paged batch.
    """

    tiles: int
    num_seqs: int
    num_keys: int
    lengths: tuple[int, int] = (0, 0)
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    context_lens: Tensor | None = None
    page_table: Tensor | None = None


def form(
    q: Tensor,
    kv_heads: int,
    config: TileConfig,
    band: Band | None,
    call: AttentionCall,
    *,
    ragged: bool = False,
    page_size: int = 0,
) -> Form:
    """The form for queries (..., Hq, [N,] D) with Hq at axis 1; ``band`` is None where there are tile lists."""
    window = None if band is None else band.window
    return Form(
        group=q.shape[1] // kv_heads,
        head_dim=q.shape[-1],
        block_d=padded(q.shape[-1]),
        block_m=config.block_m,
        block_n=config.block_n,
        ragged=ragged,
        page_size=page_size,
        listed=band is None,
        causal=band is not None and band.causal,
        windowed=window is not None,
        sinks=window is not None and band is not None and band.sinks > 0,
        softcap=call.softcap is not None,
        sink_logits=call.sink_logits is not None,
        kv_scales=call.kv_scales is not None,
        precision="ieee" if q.dtype == torch.float32 else "tf32",
    )


def lists_of(lists: TileLists | None, heads: int) -> Lists | None:
    """What the kernels for ``heads`` query heads take of tile lists."""
    if lists is None:
        return None
    return Lists(
        lists.first_row,
        lists.start,
        lists.tiles,
        lists.bit_index,
        lists.bits,
        lists.order,
        heads // lists.heads,
    )


def padded(head_dim: int) -> int:
    """Channels of a tile: a power of two that matrix products take."""
    return max(16, 1 << (head_dim - 1).bit_length())


def strides(x: Tensor, *, token_major: bool = False) -> tuple[int, int, int]:
    """(batch, head, token) strides of x (B, H, N, ...), or (0, head, token) of x (T, H, ...)."""
    return (0, x.stride(1), x.stride(0)) if token_major else (x.stride(0), x.stride(1), x.stride(2))


def page_strides(x: Tensor) -> tuple[int, int, int]:
    """(page, head, token) strides of x (P, page_size, H, D)."""
    return x.stride(0), x.stride(2), x.stride(1)


def logit_scales(scale: float, softcap: float | None) -> tuple[float, float]:
    """The two factors that `primitives.logits_log2` takes."""
    if softcap is None:
        return scale * LOG2E.value, 0.0
    return 2.0 * scale / softcap * LOG2E.value, softcap * LOG2E.value
