"""What every rank of an engine makes at its start: the model, or its part of it, pages, graphs.

Most of it computes steps, and where there are several ranks they compute these together: each of them makes everything
in this order, of the same sizes.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from typing import NamedTuple

import torch
from longreach_kernels import Mask, decode_needs, list_tiles
from longreach_patches import (
    Footprint,
    KVPages,
    LoadedModel,
    PageShape,
    RankLayout,
    layer_masks,
    load_model,
    resolve_kv_dtype,
    rotary_layers,
)
from transformers.utils import logging as transformers_logging

from longreach.engine.device.forward_pass import ForwardPass, StepGraphs
from longreach.engine.device.offload_store import HostStore
from longreach.engine.device.policies.layer_masks import LayerPolicies
from longreach.engine.device.ranks.process_group import Joined, in_turn, least
from longreach.engine.messages import EngineConfig
from longreach.engine.scheduling.limits import Limits
from longreach.engine.scheduling.step_sizes import LEAST_CHUNK
from longreach.engine.startup import capacity
from longreach.engine.startup.calibrate import rehearse
from longreach.engine.startup.host_memory import host_memory, thread_count
from longreach.engine.startup.parallel_compile import compile_kernels
from longreach.engine.startup.warmup import warm

logger = logging.getLogger(__name__)


class Parts(NamedTuple):
    """What computes, the bounds of what it can compute, and the slots for pages in host memory."""

    forward: ForwardPass
    limits: Limits
    own: tuple[Mask, ...]
    host_slots: int


def share_threads(layout: RankLayout) -> None:
    """Take as many threads as a limit of processor time allows, and leave the other ranks their part of them."""
    torch.set_num_threads(max(1, thread_count(torch.get_num_threads()) // layout.size))


def build_parts(config: EngineConfig, joined: Joined) -> Parts:
    """Load the model, measure what memory is left, allocate pages, capture graphs.

    Raises:
        longreach_patches.PatchError: the model cannot be loaded or is not supported.
        ValueError: the settings cannot hold together or do not fit the machine; the message names the fix.
    """
    transformers_logging.disable_progress_bar()  # it would be drawn between the lines of the server's log
    layout = joined.layout
    # Files may have to be on the host as a whole for a moment; random weights are drawn on the ranks' devices.
    with contextlib.nullcontext() if config.random_weights else in_turn(joined):
        loaded = load_model(
            config.model,
            device=config.device,
            dtype=config.dtype,
            backend=config.attention_backend,
            random_weights=config.random_weights,
            batch_invariant=config.batch_invariant,
            layout=layout,
            overrides=config.hf_overrides,
        )
    on_gpu = loaded.device.type == "cuda"
    if on_gpu and layout.size > 1:
        torch.cuda.empty_cache()  # what whole weights took before they were cut
    batched_tokens = config.max_batched_tokens or capacity.default_batched_tokens(on_gpu, layout.context_size)
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, loaded.dtype, loaded.device)
    own = layer_masks(loaded.config)
    bounded = capacity.bounded_layers(config, own, layout)
    footprint = Footprint.of(loaded.config, loaded.dtype, config.page_size, kv_dtype, layout, bounded)
    demand = capacity.Demand.of(footprint, loaded.max_positions, config, batched_tokens)
    policies = LayerPolicies(
        own,
        loaded.config.num_attention_heads,
        PageShape.of(loaded.config, kv_dtype, config.page_size, bounded=bounded),
        tuple(config.attention_dense_layers),
        tile=_tile(loaded, footprint),
        step_tokens=batched_tokens,
        part=layout.part(loaded.config.num_attention_heads),
        rotary=rotary_layers(loaded.config),
    )
    needs = functools.partial(decode_needs, *_alike(loaded, footprint), backend=loaded.patched.backend.name)
    graphs_over = functools.partial(StepGraphs.of, loaded, policies, needs)
    rehearsed = None
    if kv_dtype != loaded.dtype or (on_gpu and config.kv_cache_bytes is None):
        rehearsed = demand.step_tokens, demand.step_rows
    if on_gpu:
        planned = demand.fit(least(_room(config, loaded, demand).bytes, layout, loaded.device))
        compile_kernels(
            loaded,
            footprint.pages,
            planned.num_pages,
            Limits(config.max_num_seqs, batched_tokens, planned.max_model_len),
            rehearsed=rehearsed,
            graphs_over=graphs_over if config.cuda_graphs else None,
        )
    rehearsal = None if rehearsed is None else rehearse(loaded, config.page_size, *rehearsed)
    peak = None if rehearsal is None else rehearsal.peak_bytes
    room = _room(config, loaded, demand, peak)
    sized = demand.fit(least(room.bytes, layout, loaded.device), room.why)
    page_bytes = layout.size * footprint.pages.bytes_per_page  # of all ranks, which share the host's memory
    unused = 0 if on_gpu else sized.num_pages * page_bytes  # not in use yet, but promised
    slots = capacity.host_slots(config, page_bytes, host_memory().less(unused))
    limits = Limits(
        config.max_num_seqs,
        batched_tokens,
        sized.max_model_len,
        config.max_itl,
        config.resume_seconds,
        restored_pages=capacity.restored_pages(config.max_itl, footprint.pages.bytes_per_page),
        dense_share=policies.dense_share,
        batch_invariant=config.batch_invariant,
        **({"least_chunk": LEAST_CHUNK} if on_gpu else {}),
    )
    scales = rehearsal.scales if rehearsal is not None and kv_dtype != loaded.dtype else None
    pages = KVPages(footprint.pages, sized.num_pages, loaded.device, scales)
    drawn = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=loaded.device)
    graphs = None
    if on_gpu and config.cuda_graphs:
        graphs = graphs_over(pages, drawn, limits)
        graphs.capture()
    if on_gpu:
        start = time.perf_counter()
        warm(loaded, pages, limits)
        logger.info("warmed up in %.1f s", time.perf_counter() - start)
    host = HostStore(pages, slots) if slots else None
    return Parts(ForwardPass(loaded, pages, drawn, graphs, policies, host), limits, own, slots)


def _tile(loaded: LoadedModel, footprint: Footprint) -> tuple[int, int]:
    """Queries and keys of the tiles that the attention kernels take lists of."""
    return list_tiles(*_alike(loaded, footprint), backend=loaded.patched.backend.name)


def _alike(loaded: LoadedModel, footprint: Footprint) -> tuple[torch.Tensor, torch.Tensor]:
    """A query and a page of the kind that attention is computed of."""
    shape = footprint.pages
    heads = len(loaded.layout.part(loaded.config.num_attention_heads))
    q = torch.empty((1, heads, shape.head_dim), dtype=loaded.dtype, device=loaded.device)
    size = (1, shape.page_size, shape.num_kv_heads, shape.head_dim)
    return q, torch.empty(size, dtype=shape.dtype, device=loaded.device)


class _Room(NamedTuple):
    """Bytes for KV pages, and what allows no more, for people."""

    bytes: int
    why: str = ""


def _room(config: EngineConfig, loaded: LoadedModel, demand: capacity.Demand, peak: int | None = None) -> _Room:
    """The room for KV pages: as asked for, or what this machine has left; with `peak` bytes that a step took on a GPU,
    or as planned."""
    if config.kv_cache_bytes is not None:
        return _Room(config.kv_cache_bytes)
    if loaded.device.type == "cpu":
        memory = host_memory()
        if memory.limit:
            logger.info("host memory: %s can be had%s", capacity.readable(memory.available), memory.why)
        return _Room(demand.host_room(memory.share(loaded.layout.size).available), memory.why)
    free, total = torch.cuda.mem_get_info(loaded.device)
    if peak is not None:
        logger.info(
            "GPU memory: %s used, %s for the largest step (%s and %s were planned)",
            capacity.readable(total - free),
            capacity.readable(peak),
            capacity.readable(demand.planned_use()),
            capacity.readable(demand.step_bytes),
        )
    return _Room(demand.gpu_room(total, config.gpu_memory_utilization, used=total - free, peak=peak or 0))
