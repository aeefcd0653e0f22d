"""Which large steps are worth a CUDA graph: those whose kernels take longer to launch than to compute.

A mixture layer has some fifty kernels where a dense one has fifteen. A model of 48 such layers takes the host 80 to 120
ms a step, whatever is in it, and an H200 computes 4,096 tokens in 55 ms of that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
from torch import distributed

# What is left for the GPU to compute once all is launched, as a share of the step's time, where launching is what takes
# so long. The driver's queue holds a thousand launches: with more of them to compute, the host waits for the GPU.
_LEFT = 0.15
# A graph keeps the memory of its step. There should be so many times that memory, of what pages left free.
_SPARE = 2


def worthwhile(steps: Iterable[tuple[int, Callable[[], torch.Tensor]]]) -> list[int]:
    """The rows of the steps that are worth a graph, of `steps` in ascending order of rows, as all ranks see it.

    Each step is computed before the next is taken. After the first that is not worth a graph none is taken: the more
    rows, the longer the GPU computes. A step with fewer rows than a worthwhile size is worth being filled up to it,
    since launching takes as long.
    """
    found: list[int] = []
    for rows, run in steps:
        run()  # compiles
        votes = _waits_for_host(run), _has_memory(run)  # both on each rank: they compute the step together
        if not _agreed(all(votes)):
            break
        found.append(rows)
    return found


def _waits_for_host(run: Callable[[], torch.Tensor]) -> bool:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    launched = time.perf_counter()
    torch.cuda.synchronize()
    end = time.perf_counter()
    return end - launched < _LEFT * (end - start)


def _has_memory(run: Callable[[], torch.Tensor]) -> bool:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    taken = torch.cuda.max_memory_allocated() - before
    free, _ = torch.cuda.mem_get_info()
    return _SPARE * taken <= free


def _agreed(wish: bool) -> bool:
    """Whether all ranks wish something: they have to compute the same padding."""
    if not distributed.is_initialized():
        return wish
    vote = torch.tensor(int(wish), device="cuda")
    distributed.all_reduce(vote, distributed.ReduceOp.MIN)
    return bool(vote)
