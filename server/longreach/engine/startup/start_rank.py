"""The start of one rank of an engine, in named steps: load, compile, measure, allocate, capture, warm up.

Where there are several ranks they compute steps together: each of them makes everything in this order, of the same
sizes.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from longreach_kernels import Mask
from longreach_kernels.compile_counts import CompileCounts
from longreach_patches import KVPages, RankLayout, StateStore, check_agreement

from longreach.engine.device.device_tables import DeviceTables
from longreach.engine.device.forward_pass import ForwardPass, StepGraphs
from longreach.engine.device.offload_store import HostStore
from longreach.engine.device.ranks.process_group import Joined, least
from longreach.engine.messages import EngineConfig
from longreach.engine.scheduling.limits import Limits
from longreach.engine.scheduling.step_sizes import LEAST_CHUNK
from longreach.engine.startup import capacity
from longreach.engine.startup.calibrate import Calibration, calibrate
from longreach.engine.startup.host_memory import host_memory, thread_count
from longreach.engine.startup.load import LoadedRank, load_rank
from longreach.engine.startup.parallel_compile import compile_kernels
from longreach.engine.startup.phases import Phases
from longreach.engine.startup.policy_steps import PolicySteps
from longreach.engine.startup.warmup import warm

logger = logging.getLogger(__name__)


class RankState(NamedTuple):
    """A rank that is ready: what computes, the bounds of what it can compute, its layers' own masks, the places for
    pages in host memory, the phases of the start by name in seconds, and the kernels that are compiled after it."""

    forward: ForwardPass
    limits: Limits
    own_masks: tuple[Mask, ...]
    host_places: int
    phases: dict[str, float]
    compiled: CompileCounts


class Measured(NamedTuple):
    """What fits into a rank's memory: the limits of steps and requests, pages on the device, places in host memory.

    `calibration` is of the step that was run to learn that; None if none was. `state_slots` are for states, in models
    that have layers which keep some.
    """

    limits: Limits
    num_pages: int
    host_places: int
    calibration: Calibration | None = None
    state_slots: int = 0


def share_threads(layout: RankLayout) -> None:
    """Take as many threads as a limit of processor time allows, and leave the other ranks their part of them."""
    torch.set_num_threads(max(1, thread_count(torch.get_num_threads()) // layout.size))


def start_rank(config: EngineConfig, joined: Joined, place_file: str = "") -> RankState:
    """Make everything that a rank needs to compute steps; `place_file` is as for `Join`.

    Raises:
        longreach_patches.PatchError: the model cannot be loaded or is not supported.
        ValueError: the settings cannot hold together or do not fit the machine; the message names the fix.
    """
    phases = Phases()
    with phases.of("load weights"):
        rank = load_rank(config, joined)
    if rank.on_gpu:
        with phases.of("compile kernels"):
            compile_start(rank)
    with phases.of("compare layers"):
        check_agreement(rank.loaded.patched)
    with phases.of("calibrate"):
        measured = measure(rank)
    with phases.of("allocate pages"):
        pages, drawn = allocate(rank, measured)
        states = allocate_states(rank, measured)
    with phases.of("capture graphs"):
        graphs = capture(rank, pages, drawn, measured.limits, states)
    if rank.on_gpu:
        with phases.of("warm up"):
            warm(rank.loaded, pages, measured.limits, states)
            PolicySteps(rank.loaded, pages, measured.limits, rank.policies, states).compute(all_contexts=False)
    with phases.of("allocate host memory"):
        host = HostStore(pages, measured.host_places, states, place_file) if measured.host_places else None
    most_pages = -(-measured.limits.max_model_len // rank.config.page_size)
    tables = DeviceTables(len(pages.shape.groups), rank.config.max_num_seqs, most_pages, rank.loaded.device)
    forward = ForwardPass(rank.loaded, pages, drawn, tables, graphs, rank.policies, host, states)
    compiled = CompileCounts()
    if rank.on_gpu:
        compiled.listen()
    return RankState(forward, measured.limits, rank.own_masks, measured.host_places, phases.seconds, compiled)


def calibrated_step(rank: LoadedRank) -> tuple[int, int] | None:
    """Tokens and rows of the step that `measure` calibrates with; None if nothing depends on one.

    Scales of pages do, and the memory for pages, where a GPU's is measured.
    """
    measures_scales = rank.scales_pages and rank.loaded.kv_scales is None
    if measures_scales or (rank.on_gpu and rank.config.kv_cache_bytes is None):
        return rank.demand.step_tokens, rank.demand.step_rows
    return None


def compile_start(rank: LoadedRank) -> None:
    """Compile the kernels of all steps of the start, with as many pages as are planned."""
    config, loaded = rank.config, rank.loaded
    planned = rank.demand.fit(least(_room(rank).bytes, loaded.layout, loaded.device))
    compile_kernels(
        loaded,
        rank.footprint,
        planned.num_pages,
        Limits(config.max_num_seqs, rank.batched_tokens, planned.max_model_len, batch_invariant=config.batch_invariant),
        rank.policies,
        calibrated=calibrated_step(rank),
        graphs_over=rank.graphs if config.cuda_graphs else None,
    )


def measure(rank: LoadedRank) -> Measured:
    """Calibrate, and say what fits into the memory that is left.

    Raises:
        ValueError: the settings do not fit the machine; the message names the fix.
    """
    config, loaded, shape = rank.config, rank.loaded, rank.footprint.pages
    calibration = None
    if (step := calibrated_step(rank)) is not None:
        calibration = calibrate(loaded, config.page_size, *step)
    room = _room(rank, None if calibration is None else calibration.peak_bytes)
    sized = rank.demand.fit(least(room.bytes, loaded.layout, loaded.device), room.why)
    page_bytes = loaded.layout.size * shape.bytes_per_page  # of all ranks, which share the host's memory
    unused = 0 if rank.on_gpu else sized.num_pages * page_bytes  # not in use yet, but reserved for pages
    if (states := rank.footprint.states) is not None and not rank.on_gpu:
        unused += loaded.layout.size * sized.state_slots * states.bytes_per_slot
    state_bytes = 0 if states is None else loaded.layout.size * states.bytes_per_slot
    places = capacity.host_places(config, page_bytes, host_memory().less(unused), state_bytes)
    limits = Limits(
        config.max_num_seqs,
        rank.batched_tokens,
        sized.max_model_len,
        config.max_itl,
        config.resume_seconds,
        restored_pages=capacity.restored_pages(config.max_itl, shape.bytes_per_page),
        dense_share=rank.policies.dense_share,
        batch_invariant=config.batch_invariant,
        rope_factors=tuple(table.factor for table in loaded.rope_tables),
        **({"least_chunk": LEAST_CHUNK} if rank.on_gpu else {}),
    )
    return Measured(limits, sized.num_pages, places, calibration, sized.state_slots)


def allocate(rank: LoadedRank, measured: Measured) -> tuple[KVPages, torch.Tensor]:
    """The pages, and (max_num_seqs,) int64 for the tokens that requests draw last."""
    calibration = measured.calibration
    scales = rank.loaded.kv_scales if rank.scales_pages else None
    if scales is None and calibration is not None and rank.scales_pages:
        scales = calibration.scales
    pages = KVPages(rank.footprint.pages, measured.num_pages, rank.loaded.device, scales)
    return pages, torch.zeros(measured.limits.max_num_seqs, dtype=torch.int64, device=rank.loaded.device)


def allocate_states(rank: LoadedRank, measured: Measured) -> StateStore | None:
    """The slots for states; None for a model whose layers all attend."""
    shape = rank.footprint.states
    return None if shape is None else StateStore(shape, measured.state_slots, rank.loaded.device)


def capture(
    rank: LoadedRank, pages: KVPages, drawn: torch.Tensor, limits: Limits, states: StateStore | None = None
) -> StepGraphs | None:
    """The CUDA graphs of steps over these pages and states; None where there are none."""
    if not (rank.on_gpu and rank.config.cuda_graphs):
        return None
    graphs = rank.graphs(pages, drawn, limits, states)
    try:
        graphs.capture()
    except RuntimeError as error:
        if not rank.loaded.patched.runs_own_modules or isinstance(error, torch.OutOfMemoryError):
            raise
        logger.warning(
            "no CUDA graphs: layers of the family %s cannot be captured (%s); kernels of each step are launched one by "
            "one, which takes %.1f ms: no token comes sooner after the one before it",
            rank.loaded.config.model_type,
            str(error).splitlines()[0],
            1000 * graphs.launch_seconds(),
        )
        return None
    return graphs


class _Room(NamedTuple):
    """Bytes for KV pages, and what allows no more, for people."""

    bytes: int
    why: str = ""


def _room(rank: LoadedRank, peak: int | None = None) -> _Room:
    """The room for KV pages: as asked for, or what this machine has left; with `peak` bytes that a step took on a GPU,
    or as planned."""
    config, loaded, demand = rank.config, rank.loaded, rank.demand
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
