"""From an `EngineConfig` to a ready engine: load, measure what memory is left, allocate pages, capture graphs."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path

import torch
from longreach_kernels import PagedBatch
from longreach_patches import KVPages, LoadedModel, PagedStep, PageShape, load_model
from transformers.utils import logging as transformers_logging

from .batch import BatchBuilder
from .engine import Engine
from .graphs import DecodeGraphs
from .messages import EngineConfig, Started
from .pages import PagePool
from .prefix_cache import PageHasher
from .runner import Runner, forward
from .scheduler import Limits, Scheduler

logger = logging.getLogger(__name__)

# Tokens in a step: enough to keep a GPU's matrix units busy; on a CPU few enough that running answers keep moving.
_GPU_BATCHED_TOKENS = 8192
_CPU_BATCHED_TOKENS = 512
# A CPU's pages take at most this share of the available memory, and no more than this many longest prompts need.
_CPU_MEMORY_SHARE = 0.25
_CPU_LONGEST_PROMPTS = 2
# Left for graphs, libraries and fragmentation on a GPU, beside the measured peak of a step.
_GPU_RESERVE_BYTES = 1 << 30


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
    batched_tokens = config.max_batched_tokens or (_GPU_BATCHED_TOKENS if on_gpu else _CPU_BATCHED_TOKENS)
    shape = PageShape.of(loaded.config, loaded.dtype, config.page_size)
    if config.max_model_len is not None and config.max_model_len > loaded.max_positions:
        raise ValueError(
            f"max_model_len {config.max_model_len} is longer than the {loaded.max_positions} positions of this model; "
            f"use --max-model-len {loaded.max_positions} or less"
        )
    wanted_len = config.max_model_len or loaded.max_positions
    room = _kv_cache_bytes(config, loaded, shape, batched_tokens, wanted_len)
    num_pages = room // shape.bytes_per_page
    fitting_len = min(wanted_len, num_pages * config.page_size)
    if config.max_model_len is not None and fitting_len < config.max_model_len:
        raise ValueError(
            f"max_model_len {config.max_model_len} needs a KV cache of "
            f"{_readable(config.max_model_len * shape.bytes_per_token)} and {_readable(room)} are there; "
            f"the longest that fits is --max-model-len {fitting_len}"
        )
    if fitting_len < 2:
        raise ValueError("no memory is left for the KV cache; use a smaller model or raise --gpu-memory-utilization")
    limits = Limits(config.max_num_seqs, batched_tokens, fitting_len, config.max_itl, config.resume_seconds)
    pages = KVPages(shape, num_pages, loaded.device)
    graphs = None
    if on_gpu and config.cuda_graphs:
        graphs = DecodeGraphs(functools.partial(forward, loaded), pages, limits.max_num_seqs, limits.max_model_len)
        with torch.inference_mode():
            graphs.capture()
    pool = PagePool(num_pages, config.page_size)
    builder = BatchBuilder(limits.max_num_seqs, pool.pages_for(fitting_len), config.page_size)
    hasher = PageHasher(config.page_size, config.model, str(loaded.dtype)) if config.prefix_cache else None
    engine = Engine(Scheduler(pool, limits, hasher), Runner(loaded, pages, builder, graphs))
    return engine, _started(loaded, pages, limits)


def _started(loaded: LoadedModel, pages: KVPages, limits: Limits) -> Started:
    backend = loaded.patched.backend
    eos = getattr(loaded.patched.model.generation_config, "eos_token_id", None)
    return Started(
        max_model_len=limits.max_model_len,
        max_batched_tokens=limits.max_batched_tokens,
        kv_tokens=pages.num_tokens,
        page_size=pages.shape.page_size,
        vocab_size=loaded.config.vocab_size,
        eos_token_ids=[] if eos is None else [eos] if isinstance(eos, int) else list(eos),
        model_type=loaded.config.model_type,
        device=torch.cuda.get_device_name(loaded.device) if loaded.device.type == "cuda" else "cpu",
        dtype=str(loaded.dtype).removeprefix("torch."),
        attention_backend=backend.name,
        backend_reason=backend.reason,
        load_seconds=loaded.load_seconds,
    )


def _kv_cache_bytes(
    config: EngineConfig, loaded: LoadedModel, shape: PageShape, batched_tokens: int, wanted_len: int
) -> int:
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes
    if loaded.device.type == "cpu":
        enough = _CPU_LONGEST_PROMPTS * -(-wanted_len // shape.page_size) * shape.bytes_per_page
        return min(enough, int(_CPU_MEMORY_SHARE * _available_host_bytes()))
    peak = _peak_bytes_of_a_step(loaded, shape, min(batched_tokens, wanted_len), config.max_num_seqs)
    free, total = torch.cuda.mem_get_info(loaded.device)
    used = total - free
    room = int(total * config.gpu_memory_utilization) - used - peak - _GPU_RESERVE_BYTES
    logger.info("GPU memory: %s used, %s for the largest step", _readable(used), _readable(peak))
    return max(room, 0)


@torch.inference_mode()
def _peak_bytes_of_a_step(loaded: LoadedModel, shape: PageShape, num_tokens: int, num_rows: int) -> int:
    """Run the largest step that can happen and return the bytes it needed beside weights and pages."""
    device = loaded.device
    pages = KVPages(shape, -(-num_tokens // shape.page_size), device)
    integers = functools.partial(torch.tensor, dtype=torch.int32, device=device)
    batch = PagedBatch(
        cu_seqlens_q=integers([0, num_tokens]),
        context_lens=integers([num_tokens]),
        page_table=torch.arange(pages.num_pages, dtype=torch.int32, device=device)[None],
        max_seqlen_q=num_tokens,
        max_context_len=num_tokens,
    )
    positions = torch.arange(num_tokens, device=device)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    rows = positions[-min(num_rows, num_tokens) :]
    forward(loaded, PagedStep(pages, batch, positions), torch.zeros_like(positions), positions, rows).float().sort(-1)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del pages
    torch.cuda.empty_cache()
    return peak


def _available_host_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _readable(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
