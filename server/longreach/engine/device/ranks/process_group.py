"""How the ranks of an engine find each other and agree: torch.distributed, on one machine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from longreach_patches import RankLayout
from torch import distributed

from longreach.engine.messages import EngineConfig

# Weights are loaded one rank after the other, from disks that may be slow.
LOADING = timedelta(hours=2)


def layout_of(config: EngineConfig, rank: int = 0) -> RankLayout:
    """The place of a rank in an engine, before it has joined the others."""
    return RankLayout(config.tensor_parallel_size, config.context_parallel_size, rank)


def on_rank(config: EngineConfig, rank: int) -> EngineConfig:
    """The config with the rank's own device: GPU 0, 1, ... or the CPU, which they share.

    Raises:
        ValueError: the machine has too few GPUs, or one of them is named; the message names the fix.
    """
    layout = layout_of(config)
    size = layout.size
    if size == 1 or config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return config
    if ":" in config.device:
        raise ValueError(
            f"--device {config.device} is one GPU and {layout.flags} asks for {size}; use --device cuda, and "
            "CUDA_VISIBLE_DEVICES to choose which"
        )
    if (count := torch.cuda.device_count()) < size:
        raise ValueError(
            f"{layout.flags} asks for {size} GPUs and this machine has {count}; "
            + ("use a smaller one" if count else "use --device cpu, or a machine with GPUs")
        )
    return msgspec.structs.replace(config, device=f"cuda:{rank}")


class Joined(NamedTuple):
    """A rank that has met the others, and the store through which they say what they have done."""

    layout: RankLayout
    store: distributed.Store | None = None


def join(config: EngineConfig, rank: int, rendezvous: str) -> Joined:
    """Meet the other ranks at the file `rendezvous`; returns when all are there.

    A collective operation that takes longer than `config.step_timeout` fails, which ends the process.
    """
    layout = layout_of(config, rank)
    on_gpu = config.device.startswith("cuda")
    # Nothing listens where another machine could reach it.
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    if on_gpu:
        torch.cuda.set_device(torch.device(config.device))
    store = distributed.FileStore(rendezvous, layout.size)
    distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=layout.size,
        timeout=timedelta(seconds=config.step_timeout),
        device_id=torch.device(config.device) if on_gpu else None,
    )
    return Joined(_with_groups(layout), store)


def _with_groups(layout: RankLayout) -> RankLayout:
    """The layout with its process groups, which all ranks make in the same order."""
    everyone = distributed.group.WORLD
    if 1 in (layout.tensor_size, layout.context_size):
        return dataclasses.replace(layout, tensor_group=everyone, context_group=everyone, group=everyone)
    # A row of ranks has the same weights, a column the same tokens.
    ranks = np.arange(layout.size).reshape(layout.tensor_size, layout.context_size)
    rows = [distributed.new_group(row.tolist()) for row in ranks]
    columns = [distributed.new_group(column.tolist()) for column in ranks.T]
    return dataclasses.replace(
        layout,
        tensor_group=columns[layout.context_rank],
        context_group=rows[layout.tensor_rank],
        group=everyone,
    )


def leave(*, together: bool = True) -> None:
    """Part from the other ranks; `together` says that they do the same."""
    # NCCL might wait for those that are gone. Whoever leaves it so is about to end.
    if distributed.is_initialized() and (together or distributed.get_backend() == "gloo"):
        distributed.destroy_process_group()


@contextlib.contextmanager
def in_turn(joined: Joined) -> Iterator[None]:
    """Let the ranks do this one after the other, in order, and go on when all have done it: host memory need not hold
    what each of them takes."""
    layout, store = joined
    if store is None:
        yield
        return
    if layout.rank:
        store.wait([f"loaded/{layout.rank - 1}"], LOADING)
    yield
    store.set(f"loaded/{layout.rank}", "1")
    store.wait([f"loaded/{rank}" for rank in range(layout.size)], LOADING)


def least(value: int, layout: RankLayout, device: torch.device) -> int:
    """The smallest of the ranks' values."""
    if layout.size == 1:
        return value
    everywhere = torch.tensor(value, device=device)
    distributed.all_reduce(everywhere, distributed.ReduceOp.MIN)
    return int(everywhere)
