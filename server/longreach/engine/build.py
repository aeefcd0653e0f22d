"""From an `EngineConfig` to a ready engine: load, measure what memory is left, allocate pages, capture graphs."""

from __future__ import annotations

import functools
import logging

import torch
from longreach_kernels import list_tiles
from longreach_patches import (
    Footprint,
    KVPages,
    LoadedModel,
    layer_masks,
    load_model,
    resolve_kv_dtype,
)
from transformers.utils import logging as transformers_logging

from . import capacity
from .batch import BatchBuilder
from .density import PairCount
from .engine import Engine
from .graphs import DecodeGraphs
from .host_pages import HostPages
from .host_store import HostStore
from .limits import Limits
from .messages import EngineConfig, Started
from .mixed_graphs import MixedGraphs
from .pages import PagePool
from .policies import LayerPolicies
from .prefix_cache import PageHasher
from .rehearsal import Rehearsal, rehearse
from .runner import Runner, fill_pending, forward
from .scheduler import Scheduler
from .step_sizes import LEAST_CHUNK
from .warm import warm

logger = logging.getLogger(__name__)


def build_engine(config: EngineConfig) -> tuple[Engine, Started]:
    """Load the model and everything around it.

    Raises:
        longreach_patches.PatchError: the model cannot be loaded or is not supported.
        ValueError: the settings cannot hold together or do not fit the machine; the message names the fix.
    """
    transformers_logging.disable_progress_bar()  # it would be drawn between the lines of the server's log
    loaded = load_model(
        config.model,
        device=config.device,
        dtype=config.dtype,
        backend=config.attention_backend,
        random_weights=config.random_weights,
    )
    on_gpu = loaded.device.type == "cuda"
    batched_tokens = config.max_batched_tokens or capacity.default_batched_tokens(on_gpu)
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, loaded.dtype, loaded.device)
    footprint = Footprint.of(loaded.config, loaded.dtype, config.page_size, kv_dtype)
    demand = capacity.Demand.of(footprint, loaded.max_positions, config, batched_tokens)
    rehearsal = None
    if kv_dtype != loaded.dtype or (on_gpu and config.kv_cache_bytes is None):
        rehearsal = rehearse(loaded, config.page_size, demand.step_tokens, demand.step_rows)
    sized = demand.fit(_room(config, loaded, demand, rehearsal))
    fitting_len = sized.max_model_len
    page_bytes = footprint.pages.bytes_per_page
    unused = 0 if on_gpu else sized.num_pages * page_bytes  # not in use yet, but promised
    slots = capacity.host_slots(config, page_bytes, capacity.available_host_bytes() - unused)
    own = layer_masks(loaded.config)
    policies = LayerPolicies(
        own,
        loaded.config.num_attention_heads,
        footprint.pages,
        tuple(config.attention_dense_layers),
        tile=_tile(loaded, footprint),
        step_tokens=batched_tokens,
    )
    limits = Limits(
        config.max_num_seqs,
        batched_tokens,
        fitting_len,
        config.max_itl,
        config.resume_seconds,
        restored_pages=capacity.restored_pages(config.max_itl, page_bytes),
        dense_share=policies.dense_share,
        **({"least_chunk": LEAST_CHUNK} if on_gpu else {}),
    )
    scales = rehearsal.scales if rehearsal is not None and kv_dtype != loaded.dtype else None
    pages = KVPages(footprint.pages, sized.num_pages, loaded.device, scales)
    drawn = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=loaded.device)
    graphs = None
    if on_gpu and config.cuda_graphs:
        run, fill = functools.partial(forward, loaded), functools.partial(fill_pending, drawn=drawn)
        graphs = (
            DecodeGraphs(run, fill, pages, limits.max_num_seqs, limits.max_model_len),
            MixedGraphs(run, fill, pages, limits),
        )
        with torch.inference_mode():
            pool = torch.cuda.graph_pool_handle()
            for captured in graphs:
                captured.capture(pool)
    if on_gpu:
        warm(loaded, pages, limits)
    pool = PagePool(sized.num_pages, config.page_size, HostPages(slots) if slots else None)
    builder = BatchBuilder(limits.max_num_seqs, pool.pages_for(fitting_len), config.page_size)
    types = str(loaded.dtype), str(kv_dtype)
    hasher = PageHasher(config.page_size, config.model, *types) if config.prefix_cache else None
    started = _started(loaded, pages, limits, slots * config.page_size)
    host = HostStore(pages, slots) if slots else None
    runner = Runner(loaded, pages, builder, drawn, graphs, policies, host)
    bands = [mask.band for mask in own]
    pairs = PairCount((None if band.window is None else band.window + band.sinks for band in bands), policies.pairs)
    return Engine(Scheduler(pool, limits, hasher), runner, pairs=pairs, policies=policies), started


def _tile(loaded: LoadedModel, footprint: Footprint) -> tuple[int, int]:
    """Queries and keys of the tiles that the attention kernels take lists of."""
    shape = footprint.pages
    q = torch.empty((1, loaded.config.num_attention_heads, shape.head_dim), dtype=loaded.dtype, device=loaded.device)
    size = (1, shape.page_size, shape.num_kv_heads, shape.head_dim)
    pages = torch.empty(size, dtype=shape.dtype, device=loaded.device)
    return list_tiles(q, pages, backend=loaded.patched.backend.name)


def _started(loaded: LoadedModel, pages: KVPages, limits: Limits, host_kv_tokens: int) -> Started:
    backend = loaded.patched.backend
    eos = getattr(loaded.patched.model.generation_config, "eos_token_id", None)
    return Started(
        max_model_len=limits.max_model_len,
        max_batched_tokens=limits.max_batched_tokens,
        kv_tokens=pages.num_tokens,
        page_size=pages.shape.page_size,
        page_bytes=pages.shape.bytes_per_page,
        host_kv_tokens=host_kv_tokens,
        vocab_size=loaded.config.vocab_size,
        eos_token_ids=[] if eos is None else [eos] if isinstance(eos, int) else list(eos),
        model_type=loaded.config.model_type,
        device=torch.cuda.get_device_name(loaded.device) if loaded.device.type == "cuda" else "cpu",
        dtype=str(loaded.dtype).removeprefix("torch."),
        kv_dtype=str(pages.shape.dtype).removeprefix("torch."),
        attention_backend=backend.name,
        backend_reason=backend.reason,
        load_seconds=loaded.load_seconds,
        dense_share=limits.dense_share,
    )


def _room(config: EngineConfig, loaded: LoadedModel, demand: capacity.Demand, rehearsal: Rehearsal | None) -> int:
    """Bytes for KV pages: as asked for, or what this machine has left."""
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes
    if loaded.device.type == "cpu":
        return demand.host_room(capacity.available_host_bytes())
    assert rehearsal is not None
    peak = rehearsal.peak_bytes
    free, total = torch.cuda.mem_get_info(loaded.device)
    logger.info(
        "GPU memory: %s used, %s for the largest step (%s and %s were planned)",
        capacity.readable(total - free),
        capacity.readable(peak),
        capacity.readable(demand.planned_use()),
        capacity.readable(demand.step_bytes),
    )
    return demand.gpu_room(total, config.gpu_memory_utilization, used=total - free, peak=peak)
