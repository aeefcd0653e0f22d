"""Host side of the Hopper decode kernel: what it can compute, its counters and workspace, and the launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from longreach_kernels.backends.hopper.argument_order import argument_order
from longreach_kernels.backends.hopper.config import (
    DECODE_HEAD_DIMS,
    DecodeConfig,
    SplitRule,
    decode_config,
    split_rule,
)
from longreach_kernels.backends.hopper.decode import decode_kernel
from longreach_kernels.backends.hopper.decode_arguments import Form, Output, Pages, Scales, Sizes
from longreach_kernels.backends.hopper.tma import shared_layout
from longreach_kernels.backends.triton.arguments import logit_scales
from longreach_kernels.backends.triton.config import launch, processors
from longreach_kernels.backends.triton.overlap import overlap_options
from longreach_kernels.batch import DecodeNeeds, PagedBatch
from longreach_kernels.call import AttentionCall
from longreach_kernels.checks import FP8
from longreach_kernels.masks.mask import Mask

_QUERY_ROWS = 16  # of a product
_LEAST_BOX = 16  # keys that one TMA load brings
_PRODUCER_REGISTERS = 48
_MAX_SEQS = 128  # of a launch: the producer warp holds their lengths in registers

_ORDER = argument_order(decode_kernel, "counters", Output, Pages, Sizes, Scales)


def decode_form(config: DecodeConfig, head_dim: int, group: int, kv_heads: int, page_size: int) -> Form:
    """The form that follows from a configuration and the shapes, for up to 32 sequences under a causal mask."""
    group_block = 1 << (group - 1).bit_length()
    return Form(
        kv_heads=kv_heads,
        group=group,
        group_block=group_block,
        head_dim=head_dim,
        page_size=page_size,
        block_n=config.block_n,
        box=min(config.block_n, page_size & -page_size),
        ring=config.ring,
        max_seqs=32,
        merge_block=max(4, min(32, 4096 * config.warps // (group_block * head_dim))),
        producer_registers=_PRODUCER_REGISTERS,
        messages=2 if config.programs > 1 or head_dim == 256 else 4,  # as many as fit
        windowed=False,
        softcap=False,
        sink_logits=False,
    )


def launch_options(config: DecodeConfig) -> dict[str, int]:
    """The options that Triton's compiler takes. The producer warp is allotted the registers of four."""
    options = {"num_warps": config.warps}
    if config.programs > 1:
        options["maxnreg"] = 65536 // config.programs // (32 * (config.warps + 4))
    return options


def supports(q: Tensor, k_pages: Tensor, v_pages: Tensor, mask: Mask) -> bool:
    """Whether the Hopper kernel computes this decode; everything else is the portable kernel's work.

    It takes head dims 64, 128 and 256, queries in fp16 or bf16, pages in the same dtype or in fp8, whose size is a
    multiple of 16 tokens, at most 16 query heads for a KV head, and masks that have a closed form.
    """
    head_dim = q.shape[-1]
    return (
        head_dim in DECODE_HEAD_DIMS
        and q.dtype in (torch.bfloat16, torch.float16)
        and k_pages.dtype in (q.dtype, FP8)
        and mask.band is not None
        and q.shape[1] // k_pages.shape[2] <= _QUERY_ROWS
        and k_pages.shape[1] % _LEAST_BOX == 0
        and all(x.stride(2) == head_dim and x.stride(1) % 16 == 0 for x in (k_pages, v_pages))
        and k_pages.stride() == v_pages.stride()
    )


def most_splits(rule: SplitRule, max_context_len: int, window: int | None, sinks: int) -> int:
    """Most splits that `decode_queue._plan` gives a query over at most ``max_context_len`` keys."""
    size = rule.least_keys
    if window is None:
        return max(1, min(-(-max_context_len // size), rule.max_splits))
    span = min(-(-min(window, max_context_len) // size), rule.max_splits)
    return max(1, min(-(-max_context_len // size), span + 1 + -(-sinks // size)))


def decode_needs(q: Tensor, k_pages: Tensor, num_seqs: int, max_context_len: int) -> DecodeNeeds:
    """At most as many places for each row of a launch as `split_rule` says; a queue has the splits that there are."""
    rule = split_rule(k_pages.shape[2])
    places = min(num_seqs, _MAX_SEQS) * q.shape[1] * most_splits(rule, max_context_len, None, 0)
    return DecodeNeeds(4 * places * (q.shape[2] + 1), by_length=True)


class _Counters:
    """Zeroed counters on one device. A launch leaves them zeroed, so launches on one stream share them; a launch that
    is captured in a graph, which may be replayed on any stream, gets counters of its own."""

    SIZE = 1 << 20

    def __init__(self, device: torch.device) -> None:
        self._free = torch.zeros(self.SIZE, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()  # other streams use them too
        self._of_stream: dict[int, Tensor] = {}

    def cut(self, number: int) -> Tensor:
        """Counters that nobody else has."""
        if self._free.shape[0] < number:
            return torch.zeros(number, dtype=torch.int32, device=self._free.device)
        counters, self._free = self._free[:number], self._free[number:]
        return counters

    def of_stream(self, number: int) -> Tensor:
        """The counters of the current stream."""
        stream = torch.cuda.current_stream(self._free.device).cuda_stream
        counters = self._of_stream.get(stream)
        if counters is None or counters.shape[0] < number:
            counters = self._of_stream[stream] = self.cut(max(number, 1 << 12))
        return counters


_counters: dict[torch.device, _Counters] = {}


def _take_counters(number: int, device: torch.device) -> Tensor:
    capturing = torch.cuda.is_current_stream_capturing()
    counters = _counters.get(device)
    if counters is None:
        if capturing:  # zeroed by the graph, in each replay
            return torch.zeros(number, dtype=torch.int32, device=device)
        counters = _counters[device] = _Counters(device)
    return counters.cut(number) if capturing else counters.of_stream(number)


def paged_decode(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor, lse: Tensor, batch: PagedBatch, call: AttentionCall
) -> None:
    """The decodes of ``batch``: writes their rows of out (T, Hq, D) and lse (T, Hq)."""
    for first in range(0, batch.decodes, _MAX_SEQS):
        count = min(batch.decodes - first, _MAX_SEQS)
        _launch(q, k_pages, v_pages, out, lse, batch, call, slice(first, first + count))


def _descriptor(pages: Tensor, box: int) -> TensorDescriptor:
    """Pages (num_pages, page_size, Hkv, D) as a matrix with a row for each token."""
    num_pages, page_size, heads, head_dim = pages.shape
    rows = pages.as_strided((num_pages * page_size, heads * head_dim), (pages.stride(1), 1))
    return TensorDescriptor.from_tensor(rows, [box, head_dim], shared_layout(box, head_dim, dtype=pages.dtype))


def _query_descriptor(q: Tensor) -> TensorDescriptor:
    """Queries (T, Hq, D), a box of one token's group; copied where TMA cannot address them."""
    if q.data_ptr() % 16 or q.stride(0) % 8 or q.stride(1) % 8:
        q = q.clone(memory_format=torch.contiguous_format)
    block = [1, _QUERY_ROWS, q.shape[2]]
    return TensorDescriptor.from_tensor(q, block, shared_layout(*block, dtype=q.dtype))


def _launch(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    out: Tensor,
    lse: Tensor,
    batch: PagedBatch,
    call: AttentionCall,
    these: slice,
) -> None:
    """The sequences `these`, at most `_MAX_SEQS`."""
    band = call.mask.band
    assert band is not None, call.mask
    first, num_seqs = these.start, these.stop - these.start
    heads, head_dim = q.shape[1:]
    page_size, kv_heads = k_pages.shape[1:3]
    group = heads // kv_heads
    config = decode_config(head_dim, call.kv_scales is not None)
    form = decode_form(config, head_dim, group, kv_heads, page_size)._replace(
        max_seqs=32 if num_seqs <= 32 else _MAX_SEQS,
        windowed=band.window is not None,
        softcap=call.softcap is not None,
        sink_logits=call.sink_logits is not None,
    )
    rule = split_rule(kv_heads)
    splits = most_splits(rule, batch.max_context_len, band.window, band.sinks)
    split_out = torch.empty((num_seqs, kv_heads, splits, group, head_dim), dtype=torch.float32, device=q.device)
    split_lse = torch.empty((num_seqs, kv_heads, splits, group), dtype=torch.float32, device=q.device)
    strides = out.stride(0), out.stride(1), lse.stride(0), lse.stride(1)
    table = batch.page_table
    options: dict[str, Any] = launch_options(config)
    launch(
        decode_kernel,
        (min(processors(q.device) * config.programs, num_seqs * kv_heads * splits),),
        _query_descriptor(q),
        _descriptor(k_pages, form.box),
        _descriptor(v_pages, form.box),
        *_ORDER(
            (
                _take_counters(2 + num_seqs * kv_heads, q.device),
                *Output(split_out, split_lse, out, lse, *strides, call.sink_logits),
                *Pages(batch.cu_seqlens_q[first:], batch.context_lens[first:], table[first:], table.stride(0)),
                *Sizes(num_seqs, band.window or 0, band.sinks, splits, *rule),
                *Scales(*logit_scales(call.scale, call.softcap), *(call.kv_scales or (None, None))),
            )
        ),
        FORM=form,
        **overlap_options(q.device),
        **options,
    )
