"""The kernels of the start, compiled on all cores before the start launches them one after the other.

Triton compiles a kernel when it is first launched, which takes a core up to some seconds, and a model needs dozens. So
the steps of the start (`compute_both`, `calibrate`, the captured steps of `device.graphs`, `warmup`) are computed once
with nothing launched, on pages as they are planned to be. What they would have launched is compiled on several threads,
and is found by the launches that follow. `warmup_command` fills the same cache ahead of a start, by real launches.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from longreach_kernels.compilation import compile_only
from longreach_patches import Footprint, KVPages, LoadedModel, StateStore, compared_tokens, compute_both

from longreach.engine.device.forward_pass import StepGraphs
from longreach.engine.device.policies.layer_masks import LayerPolicies
from longreach.engine.scheduling.limits import Limits
from longreach.engine.startup.calibrate import calibrate
from longreach.engine.startup.policy_steps import PolicySteps
from longreach.engine.startup.warmup import warm

logger = logging.getLogger(__name__)


@torch.inference_mode()
def compile_kernels(
    loaded: LoadedModel,
    footprint: Footprint,
    num_pages: int,
    limits: Limits,
    policies: LayerPolicies,
    *,
    calibrated: tuple[int, int] | None,
    graphs_over: Callable[[KVPages, torch.Tensor, Limits, StateStore | None], StepGraphs] | None,
) -> None:
    """Compile what the start will launch, and what requests may ask for. A kernel that does not compile is logged; the
    start then fails at it.

    The pages, as `footprint` has them, are there for a moment: there has to be room for them, as for the real ones.
    Of slots for states there is one: no state is read or written.

    Args:
        loaded: the model, on a GPU.
        footprint, num_pages, limits: as they are planned; should they turn out otherwise, the start may have to compile
            some kernels by itself.
        policies: the layers' masks under attention policies.
        calibrated: tokens and rows of the step that the start calibrates with, or None if it does not calibrate.
        graphs_over: makes the graphs that the start captures, as `StepGraphs.of` does; None if it captures none.
    """
    if loaded.patched.backend.name == "reference":
        return  # it is made of torch's operations

    shape = footprint.pages

    def compute_start() -> None:
        """The pages end with this function: a name that still held them, if only through the last step's closure, would
        take their memory from the real ones."""
        for tokens in compared_tokens(loaded.patched):
            compute_both(loaded.patched, tokens)
        calibration = None if calibrated is None else calibrate(loaded, shape.page_size, *calibrated)
        scales = calibration.scales if calibration is not None and shape.dtype != loaded.dtype else None
        pages = KVPages(shape, num_pages, loaded.device, scales)
        states = None if footprint.states is None else StateStore(footprint.states, 1, loaded.device)
        if graphs_over is not None:
            drawn = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=loaded.device)
            for run in graphs_over(pages, drawn, limits, states).steps():
                run()
        warm(loaded, pages, limits, states)
        PolicySteps(loaded, pages, limits, policies, states).compute(all_contexts=True)

    start = time.perf_counter()
    threads = torch.get_num_threads()  # this rank's part of the cores
    with compile_only(loaded.device, threads) as done:
        compute_start()
    if loaded.device.type == "cuda":
        torch.cuda.empty_cache()  # the room for pages is measured next
    elapsed = time.perf_counter() - start
    logger.info("made %d kernels ready in %.1f s on %d threads", done.ready, elapsed, threads)
