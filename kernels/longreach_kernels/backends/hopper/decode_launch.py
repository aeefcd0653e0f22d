"""Host side of the Hopper decode kernel: what it can compute, its counters and workspace, and the launch."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from longreach_kernels.backends.hopper.decode import decode_kernel
from longreach_kernels.backends.hopper.tma import shared_layout
from longreach_kernels.backends.triton.config import launch, processors
from longreach_kernels.batch import PagedBatch
from longreach_kernels.masks.mask import Mask
from longreach_kernels.needs import DecodeNeeds

FP8 = torch.float8_e4m3fn
HEAD_DIMS = (64, 128, 256)
_ROWS = 16  # of queries in a product
_LEAST_BOX = 16  # keys that one TMA load brings
_PRODUCER_REGISTERS = 48
_MAX_SEQS = 128  # of a launch: the producer warp holds their lengths in registers

# Keys of the smallest split, as a power of two, and the number of splits beyond which they double in size. Between 16
# and 31 splits of 8 KV heads keep all programs of an H200 busy with one sequence; each costs as much as 8 tiles.
MIN_BITS = 10
MAX_SPLITS = 31


class Config(NamedTuple):
    """Keys in a tile, tiles in the ring, consumer warps, and programs on a multiprocessor."""

    block_n: int
    ring: int
    warps: int
    programs: int


def configure(head_dim: int, fp8: bool) -> Config:
    """The configuration for a head dim and a kind of pages; the loops over tiles compile for sm_90 without spills.

    At head dim 128 two programs share a multiprocessor: one's scores and merge run while the other's tiles arrive. That
    is worth 1 percent where all sequences are long and even, and 3 to 15 beside the products of a step:
    docs/dev/kernel-log.md#two-decode-programs-on-a-multiprocessor.
    """
    if head_dim == 256:
        return Config(64, 6 if fp8 else 3, 8, 1)
    if head_dim == 64:
        return Config(128, 6, 4, 2 if fp8 else 1)
    return Config(128 if fp8 else 64, 3, 4, 2)


def constants(config: Config, head_dim: int, group: int, page_size: int) -> dict[str, Any]:
    """The kernel's constants that follow from a configuration and the shapes."""
    group_block = triton.next_power_of_2(group)
    return {
        "D": head_dim,
        "GROUP": group,
        "GROUP_BLOCK": group_block,
        "BN": config.block_n,
        "BOX": min(config.block_n, page_size & -page_size),
        "RING": config.ring,
        "PAGE_SIZE": page_size,
        "MERGE_BLOCK": max(4, min(32, 4096 * config.warps // (group_block * head_dim))),
        "MIN_BITS": MIN_BITS,
        "MAX_SPLITS": MAX_SPLITS,
        "PRODUCER_REGISTERS": _PRODUCER_REGISTERS,
        "MESSAGES": 2 if config.programs > 1 or head_dim == 256 else 4,  # from producer to consumers: as many as fit
    }


def launch_options(config: Config) -> dict[str, int]:
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
        head_dim in HEAD_DIMS
        and q.dtype in (torch.bfloat16, torch.float16)
        and k_pages.dtype in (q.dtype, FP8)
        and mask.band is not None
        and q.shape[1] // k_pages.shape[2] <= _ROWS
        and k_pages.shape[1] % _LEAST_BOX == 0
        and all(x.stride(2) == head_dim and x.stride(1) % 16 == 0 for x in (k_pages, v_pages))
        and k_pages.stride() == v_pages.stride()
    )


def most_splits(max_context_len: int, window: int | None, sinks: int) -> int:
    """Most splits that `decode_queue._plan` gives a query over at most ``max_context_len`` keys."""
    size = 1 << MIN_BITS
    if window is None:
        return max(1, min(-(-max_context_len // size), MAX_SPLITS))
    span = min(-(-min(window, max_context_len) // size), MAX_SPLITS)
    return max(1, min(-(-max_context_len // size), span + 1 + -(-sinks // size)))


def decode_needs(q: Tensor, num_seqs: int, max_context_len: int) -> DecodeNeeds:
    """At most `MAX_SPLITS` places for each row of a launch; a queue has the splits that there are."""
    places = min(num_seqs, _MAX_SEQS) * q.shape[1] * most_splits(max_context_len, None, 0)
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
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    out: Tensor,
    lse: Tensor,
    batch: PagedBatch,
    mask: Mask,
    *,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    kv_scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """The decodes of ``batch``: writes their rows of out (T, Hq, D) and lse (T, Hq)."""
    options = {"scale": scale, "softcap": softcap, "sink_logits": sink_logits, "kv_scales": kv_scales}
    for first in range(0, batch.decodes, _MAX_SEQS):
        _launch(q, k_pages, v_pages, out, lse, batch, mask, first, min(batch.decodes - first, _MAX_SEQS), **options)


def _descriptor(pages: Tensor, box: int) -> TensorDescriptor:
    """Pages (num_pages, page_size, Hkv, D) as a matrix with a row for each token."""
    num_pages, page_size, heads, head_dim = pages.shape
    rows = pages.as_strided((num_pages * page_size, heads * head_dim), (pages.stride(1), 1))
    return TensorDescriptor.from_tensor(rows, [box, head_dim], shared_layout(box, head_dim, dtype=pages.dtype))


def _query_descriptor(q: Tensor) -> TensorDescriptor:
    """Queries (T, Hq, D), a box of one token's group; copied where TMA cannot address them."""
    if q.data_ptr() % 16 or q.stride(0) % 8 or q.stride(1) % 8:
        q = q.clone(memory_format=torch.contiguous_format)
    block = [1, _ROWS, q.shape[2]]
    return TensorDescriptor.from_tensor(q, block, shared_layout(*block, dtype=q.dtype))


def _launch(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    out: Tensor,
    lse: Tensor,
    batch: PagedBatch,
    mask: Mask,
    first: int,
    num_seqs: int,
    *,
    scale: float,
    softcap: float | None,
    sink_logits: Tensor | None,
    kv_scales: tuple[Tensor, Tensor] | None,
) -> None:
    band = mask.band
    assert band is not None, mask
    heads, head_dim = q.shape[1:]
    page_size, kv_heads = k_pages.shape[1:3]
    group = heads // kv_heads
    config = configure(head_dim, kv_scales is not None)
    fixed = constants(config, head_dim, group, page_size)
    splits = most_splits(batch.max_context_len, band.window, band.sinks)
    part_out = torch.empty((num_seqs, kv_heads, splits, group, head_dim), dtype=torch.float32, device=q.device)
    part_lse = torch.empty((num_seqs, kv_heads, splits, group), dtype=torch.float32, device=q.device)
    counters = _take_counters(2 + num_seqs * kv_heads, q.device)
    programs = min(processors(q.device) * config.programs, num_seqs * kv_heads * splits)
    scale_log2 = scale * math.log2(math.e)
    softcap_log2 = 0.0
    if softcap is not None:
        # cap tanh(x) = cap (1 - 2 / (exp(2x) + 1))
        scale_log2, softcap_log2 = 2 * scale_log2 / softcap, softcap * math.log2(math.e)
    options: dict[str, Any] = fixed | launch_options(config)
    launch(
        decode_kernel,
        (programs,),
        _query_descriptor(q),
        _descriptor(k_pages, fixed["BOX"]),
        _descriptor(v_pages, fixed["BOX"]),
        part_out,
        part_lse,
        out,
        lse,
        *(kv_scales or (None, None)),
        sink_logits,
        batch.cu_seqlens_q[first:],
        batch.context_lens[first:],
        batch.page_table[first:],
        counters,
        batch.page_table.stride(0),
        out.stride(0),
        out.stride(1),
        lse.stride(0),
        lse.stride(1),
        num_seqs,
        band.window or 0,
        band.sinks,
        splits,
        scale_log2,
        softcap_log2,
        KV_HEADS=kv_heads,
        MAX_SEQS=32 if num_seqs <= 32 else _MAX_SEQS,
        WINDOWED=band.window is not None,
        SOFTCAP=softcap is not None,
        SINK_LOGITS=sink_logits is not None,
        **options,
    )
