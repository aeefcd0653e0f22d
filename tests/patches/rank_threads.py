"""Ranks as threads of one process: the sums and exchanges of several ranks without the time that processes take."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from longreach.engine.device.ranks.process_group import _with_groups as with_groups
from longreach_patches import RankLayout
from torch import distributed
from torch._C._distributed_c10d import _set_thread_isolation_mode as isolate  # pyright: ignore[reportMissingModuleSource, reportAttributeAccessIssue]
from torch.testing._internal.distributed import multi_threaded_pg as threaded

T = TypeVar("T")


def on_ranks(tensor_size: int, context_size: int, compute: Callable[[RankLayout], T]) -> list[T]:
    """What `compute` gives on each rank, in order."""
    size = tensor_size * context_size
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    store = distributed.HashStore()

    def run(rank: int) -> None:
        try:
            distributed.init_process_group("threaded", rank=rank, world_size=size, store=store)
            # A rank that waits for one that has failed ends with SystemExit.
            with torch.inference_mode(), contextlib.suppress(SystemExit):
                results[rank] = compute(with_groups(RankLayout(tensor_size, context_size, rank)))
        except Exception as error:  # noqa: BLE001  # raised again below
            errors.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)  # the others would wait for this one
        finally:
            if distributed.is_initialized():
                distributed.destroy_process_group()

    threaded._install_threaded_pg()
    isolate(True)
    try:
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        isolate(False)
        threaded._uninstall_threaded_pg()
        threaded.ProcessLocalGroup.reset()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]
