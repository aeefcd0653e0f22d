"""From an `EngineConfig` to a ready engine: load, measure what memory is left, allocate pages, capture graphs."""

from __future__ import annotations

import functools
import logging

import torch
from longreach_kernels import PagedBatch
from longreach_patches import Footprint, KVPages, LoadedModel, PagedStep, PageShape, layer_masks, load_model
from transformers.utils import logging as transformers_logging

from . import capacity
from .batch import BatchBuilder
from .density import PairCount
from .engine import Engine
from .graphs import DecodeGraphs
from .messages import EngineConfig, Started
from .pages import PagePool
from .prefix_cache import PageHasher
from .runner import Runner, fill_pending, forward
from .scheduler import Limits, Scheduler

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
    footprint = Footprint.of(loaded.config, loaded.dtype, config.page_size)
    demand = capacity.Demand.of(footprint, loaded.max_positions, config, batched_tokens)
    sized = demand.fit(_room(config, loaded, footprint, demand))
    fitting_len = sized.max_model_len
    limits = Limits(config.max_num_seqs, batched_tokens, fitting_len, config.max_itl, config.resume_seconds)
    pages = KVPages(footprint.pages, sized.num_pages, loaded.device)
    drawn = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=loaded.device)
    graphs = None
    if on_gpu and config.cuda_graphs:
        run, fill = functools.partial(forward, loaded), functools.partial(fill_pending, drawn=drawn)
        graphs = DecodeGraphs(run, fill, pages, limits.max_num_seqs, limits.max_model_len)
        with torch.inference_mode():
            graphs.capture()
    pool = PagePool(sized.num_pages, config.page_size)
    builder = BatchBuilder(limits.max_num_seqs, pool.pages_for(fitting_len), config.page_size)
    hasher = PageHasher(config.page_size, config.model, str(loaded.dtype)) if config.prefix_cache else None
    started = _started(loaded, pages, limits)
    start_grammar = None
    if config.tokenizer_file is not None:
        from .grammar import Grammars  # benchmarks run engines without grammars where llguidance is not installed

        start_grammar = Grammars(config.tokenizer_file, started.vocab_size, started.eos_token_ids).start
    runner = Runner(loaded, pages, builder, drawn, graphs)
    bands = [mask.band for mask in layer_masks(loaded.config)]
    pairs = PairCount(None if band.window is None else band.window + band.sinks for band in bands)
    return Engine(Scheduler(pool, limits, hasher), runner, pairs=pairs, start_grammar=start_grammar), started


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


def _room(config: EngineConfig, loaded: LoadedModel, footprint: Footprint, demand: capacity.Demand) -> int:
    """Bytes for KV pages: as asked for, or what this machine has left."""
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes
    if loaded.device.type == "cpu":
        return demand.host_room(capacity.available_host_bytes())
    peak = _peak_bytes_of_a_step(loaded, footprint.pages, demand.step_tokens, demand.step_rows)
    free, total = torch.cuda.mem_get_info(loaded.device)
    logger.info(
        "GPU memory: %s used, %s for the largest step (%s and %s were planned)",
        capacity.readable(total - free),
        capacity.readable(peak),
        capacity.readable(demand.planned_use()),
        capacity.readable(demand.step_bytes),
    )
    return demand.gpu_room(total, config.gpu_memory_utilization, used=total - free, peak=peak)


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
