"""From an `EngineConfig` to a ready engine: start the other ranks, start this one, and put an engine on it."""

from __future__ import annotations

import msgspec
import torch
from longreach_kernels import Backend
from longreach_kernels.compile_beside import KernelsBeside
from longreach_kernels.sizes import MAX_HOPPER_DECODE_HEAD_DIM
from longreach_patches import (
    LoadedModel,
    PageShape,
    check_layout,
    check_ranks,
    check_split,
    layer_masks,
    load_config,
    state_layers,
)

from longreach import gguf_source, hub
from longreach.engine.device.batch_builder import BatchBuilder
from longreach.engine.device.forward_pass import ForwardPass
from longreach.engine.device.policies.usage import PolicyUsage
from longreach.engine.device.ranks.leader import Ranks
from longreach.engine.device.ranks.process_group import Joined, join, layout_of, leave, on_rank
from longreach.engine.device.runner import Runner
from longreach.engine.disk.needs import check_disk
from longreach.engine.engine import Engine
from longreach.engine.kv_cache.allocator import PageAllocator
from longreach.engine.kv_cache.groups import PageGroups
from longreach.engine.kv_cache.host_tier import HostTier
from longreach.engine.kv_cache.page_pool import PagePool
from longreach.engine.kv_cache.prefix_cache import PageHasher
from longreach.engine.kv_cache.state_allocator import StateAllocator
from longreach.engine.kv_cache.state_pool import StatePool
from longreach.engine.messages import EngineConfig, Started
from longreach.engine.pair_count import PairCount
from longreach.engine.rope_choice import RopeTable, within
from longreach.engine.scheduling.forecast import EntrySizes
from longreach.engine.scheduling.scheduler import Scheduler
from longreach.engine.startup.capacity import Capacity, bounded_layers, host_tokens, state_places
from longreach.engine.startup.disk import open_disk
from longreach.engine.startup.start_rank import RankState, share_threads, start_rank
from longreach.engine.startup.state_demand import keeps_copies
from longreach.engine.startup.vocabulary import check_vocabulary


def build_engine(config: EngineConfig) -> tuple[Engine, Started]:
    """Load the model and everything around it. With several ranks this process becomes the first, and starts the
    others; `Engine.close` ends them.

    Raises:
        EngineStartError: the other ranks' processes cannot be started.
        longreach.errors.ModelFilesError: a file of the model cannot be had.
        longreach_patches.PatchError: the model cannot be loaded or is not supported.
        ValueError: the settings cannot hold together or do not fit the machine; the message names the fix.
    """
    # Once for all ranks: what follows reads a directory.
    gguf = None if config.gguf_file is not None else gguf_source.find(config.model, config.revision)
    if gguf is not None:
        config = msgspec.structs.replace(config, gguf_file=str(gguf))
        files = gguf_source.described(gguf, tokenizer=False)
    else:
        files = (hub.small_files if config.random_weights else hub.all_files)(config.model, config.revision)
    config = msgspec.structs.replace(config, model=str(files))
    if config.other_tokenizer is not None:  # before any weights are read
        check_vocabulary(
            config.other_tokenizer, config.other_tokenizer_ids, load_config(str(files), config.hf_overrides)
        )
    check_disk(config.kv_disk, config.kv_disk_bytes, config.kv_offload_bytes)
    layout = layout_of(config)
    if layout.size == 1:
        share_threads(layout)
        alone = Joined(layout)
        return _engine(config, alone, start_rank(config, alone))
    # Before there are ranks: the messages are this one's to give.
    if config.batch_invariant:
        check_ranks(layout)
    own_config = load_config(config.model, config.hf_overrides, config.quantization)
    check_layout(own_config, layout)
    check_split(own_config, layout)
    bounded_layers(config, layer_masks(own_config), layout)
    own, threads = on_rank(config, 0), torch.get_num_threads()
    ranks = Ranks(config, layout.size)
    try:
        joined = join(own, 0, ranks.rendezvous)
        share_threads(joined.layout)
        return _engine(own, joined, start_rank(own, joined), ranks)
    except BaseException:
        ranks.kill()
        leave(together=False)
        torch.set_num_threads(threads)
        raise


def _engine(
    config: EngineConfig, joined: Joined, state: RankState, ranks: Ranks | None = None
) -> tuple[Engine, Started]:
    limits, computing = state.limits, state.forward
    loaded, pages, policies = computing.loaded, computing.pages, computing.policies
    places_of_state = _places_of_state(computing)
    host = HostTier(state.host_places, places_of_state) if state.host_places else None
    open_disk(config, joined, computing, host, ranks)
    pool = PagePool(pages.num_pages, config.page_size, host)
    windows = pages.shape.windows
    groups = PageGroups(config.page_size, windows, limits.max_batched_tokens)
    places = pool.pages_for(limits.max_model_len)
    dropped = pages.dropped if groups.windowed else 0
    strides = [group.stride for group in pages.shape.groups]
    factors = [table.factor for table in loaded.rope_tables]
    builder = BatchBuilder(limits.max_num_seqs, places, config.page_size, strides, dropped, factors, policies.tiling)
    types = str(loaded.dtype), str(pages.shape.dtype)
    hasher = None
    if config.prefix_cache:
        hasher = PageHasher(config.page_size, config.model, *types, answers_apart=config.batch_invariant)
    states = None
    if computing.states is not None:
        slots = StatePool(computing.states.num_slots, host)
        states = StateAllocator(slots, config.page_size, copies=keeps_copies(config))
    bands = [mask.band for mask in state.own_masks]
    visible = (None if band is None or band.window is None else band.window + band.sinks for band in bands)
    usage = PolicyUsage(policies, len(state_layers(state.forward.loaded.config)))
    pairs = PairCount(visible, usage.pairs)
    scheduler = Scheduler(PageAllocator(pool, hasher, groups, states), limits)
    started = _started(state, config, groups, hasher)
    sizes = EntrySizes(started.page_bytes, started.state_bytes)
    kernels = None
    if loaded.device.type == "cuda" and ranks is None:  # several would have to wait for each other's
        kernels = KernelsBeside(loaded.device, torch.get_num_threads())
    runner = Runner(computing, builder, ranks, kernels)
    engine = Engine(
        scheduler, runner, pairs=pairs, policies=policies, usage=usage, sizes=sizes, compiled=state.compiled
    )
    return engine, started


def _started(state: RankState, config: EngineConfig, groups: PageGroups, hasher: PageHasher | None) -> Started:
    loaded, pages, limits = state.forward.loaded, state.forward.pages, state.limits
    backend, ranks = loaded.patched.backend, loaded.layout.size
    device = torch.cuda.get_device_name(loaded.device) if loaded.device.type == "cuda" else "cpu"
    return Started(
        max_model_len=limits.max_model_len,
        max_batched_tokens=limits.max_batched_tokens,
        kv_tokens=Capacity(pages.num_pages, groups, limits.max_model_len).kv_tokens,
        page_size=config.page_size,
        page_bytes=ranks * pages.shape.bytes_per_page,
        host_kv_tokens=host_tokens(state.host_places, groups, limits.max_model_len, _places_of_state(state.forward)),
        host_bytes=state.host_places * ranks * pages.shape.bytes_per_page,
        vocab_size=loaded.config.vocab_size,
        eos_token_ids=_end_tokens(loaded, config.tokenizer_eos_ids),
        model_type=loaded.config.model_type,
        device=device if ranks == 1 else f"{ranks} x {device}",
        dtype=str(loaded.dtype).removeprefix("torch."),
        kv_dtype=str(pages.shape.dtype).removeprefix("torch."),
        attention_backend=backend.name,
        backend_reason=why_backend(backend, pages.shape),
        load_seconds=loaded.load_seconds,
        dense_share=limits.dense_share,
        page_bounds=bool(pages.shape.bounded),
        attended_layers=len(state.forward.policies.observed),
        quantization=loaded.quantization or "",
        weight_bytes=loaded.weight_bytes,
        page_groups=len(groups.windows),
        state_slots=0 if (states := state.forward.states) is None else states.num_slots,
        state_bytes=0 if states is None else ranks * states.shape.bytes_per_slot,
        digest_namespace=None if hasher is None else hasher.namespace,
        rope_tables=within([RopeTable(*table) for table in loaded.rope_tables], limits.max_model_len),
        start_phases=state.phases,
    )


def _places_of_state(computing: ForwardPass) -> int:
    """Places of a page each that one rank's part of a state takes in host memory; 0 without states."""
    states = computing.states
    return 0 if states is None else state_places(computing.pages.shape.bytes_per_page, states.shape.bytes_per_slot)


def why_backend(backend: Backend, shape: PageShape) -> str:
    """Why a backend was chosen, and which of a model's layers its fastest kernels do not take."""
    wide = [index for index, layer in enumerate(shape.layers) if layer.head_dim > MAX_HOPPER_DECODE_HEAD_DIM]
    if backend.name != "hopper" or not wide:
        return backend.reason
    return (
        f"{backend.reason}; portable ones for answers in {len(wide)} of {shape.num_layers} layers that attend, whose "
        f"heads have {shape.layers[wide[0]].head_dim} channels"
    )


def _end_tokens(loaded: LoadedModel, of_tokenizer: list[int]) -> list[int]:
    """What ends an answer: every token that the generation config, the config or the tokenizer names.

    Raises:
        ValueError: one of them names what is no token id.
    """
    ids = set(of_tokenizer)
    model = loaded.patched.model
    sources = {"generation_config.json": model.generation_config, "config.json": loaded.config}
    for file, source in sources.items():
        named = getattr(source, "eos_token_id", None)
        named = [] if named is None else named if isinstance(named, list | tuple) else [named]
        if not all(isinstance(id_, int) and not isinstance(id_, bool) for id_ in named):
            raise ValueError(f"{file}: eos_token_id must be a token id, or a list of them; got {named}")
        ids.update(named)
    # A checkpoint may name a token beyond its own output layer: that one is never drawn.
    return sorted(id_ for id_ in ids if 0 <= id_ < loaded.config.vocab_size)
