"""Training steps as CUDA graphs: forward pass, backward pass and update of a batch are one launch.

A step of the embedded model is many short kernels, and the processes that make batches keep the host's cores busy. As a
graph it is launched at once, so that small batches need not wait for the host.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable

import torch

from training.data import Batch

EAGER = 2  # steps of a shape before it is captured: the first compiles
ROUND = 1024  # answer tokens that a graph has room for are a multiple of this

Results = dict[str, torch.Tensor]


def padded(batch: Batch, size: int) -> Batch:
    """The batch with `size` answer tokens: those that are added weigh nothing and belong to no question of their own.

    They stand at positions of their own, since a gradient that gathers thousands of rows at one place would be slow.
    """
    missing = size - len(batch.at)
    where = torch.arange(missing, device=batch.at.device)

    def extended(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x.new_zeros(missing)])

    changes = {name: extended(getattr(batch, name)) for name in ("token", "weight", "lead", "question")}
    return dataclasses.replace(batch, at=torch.cat([batch.at, where]), questions=size, **changes)


class Captured:
    """A graph with the batch that it reads and the results that it writes."""

    def __init__(self, update: Callable[[Batch], Results], batch: Batch, pool: tuple[int, int]) -> None:
        self.batch, self.graph = batch, torch.cuda.CUDAGraph()
        # Of this thread alone: another one takes memory for batches, which would end a capture of the whole process.
        where = {"pool": pool, "stream": torch.cuda.current_stream(), "capture_error_mode": "thread_local"}
        with torch.cuda.graph(self.graph, **where):
            self.results = update(self.batch)

    def replay(self, batch: Batch) -> Results:
        """The step of `batch`, which is on the host; the results hold until the next one."""
        for name in ("ids", "text"):
            getattr(self.batch, name).copy_(getattr(batch, name), non_blocking=True)
        count, room = len(batch.at), len(self.batch.at)
        for name in ("at", "token", "weight", "lead", "question"):
            getattr(self.batch, name)[:count].copy_(getattr(batch, name), non_blocking=True)
        torch.arange(room - count, out=self.batch.at[count:])
        for name in ("weight", "lead", "question"):
            getattr(self.batch, name)[count:].zero_()
        self.graph.replay()
        return self.results


class GraphedSteps:
    """`update`, a step of a batch on the device that returns device scalars, replayed by the shape of the batch.

    Graphs share their memory: they run one after another, and nothing but the results outlives a step. A batch with
    more answer tokens than its graph has room for is captured anew.
    """

    def __init__(self, update: Callable[[Batch], Results], device: torch.device) -> None:
        self.update, self.device = update, device
        # Not the default stream: it cannot be captured, and gradients remember the stream that they were made on.
        torch.cuda.set_stream(torch.cuda.Stream(device))
        self.pool = torch.cuda.graph_pool_handle()
        self.seen: Counter[torch.Size] = Counter()
        self.captured: dict[torch.Size, Captured] = {}

    def step(self, batch: Batch) -> Results:
        """One step; the results hold until the next one."""
        shape, answers = batch.ids.shape, len(batch.at)
        self.seen[shape] += 1
        if self.seen[shape] <= EAGER:
            return self.update(batch.to(self.device))
        captured = self.captured.get(shape)
        if captured is None or len(captured.batch.at) < answers:
            room = -(-answers * 5 // (4 * ROUND)) * ROUND
            captured = Captured(self.update, padded(batch.to(self.device), room), self.pool)
            self.captured[shape] = captured
        return captured.replay(batch)
