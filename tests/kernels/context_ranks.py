"""One rank of the tests of context parallelism: computes its shards of every case and writes them to a file.

python -m tests.kernels.context_ranks RANK RANKS DIRECTORY
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from longreach_kernels import BlockSparse, Causal, Full, Mask, Window
from longreach_kernels.context_parallel import context_parallel_attention, contiguous_sizes, zigzag_split
from longreach_kernels.masks.block_rules import LocalGlobal, Strided
from torch import Tensor

EXCHANGES = ("ring", "all_gather", "all_to_all")
# The ranks of the whole test, and of process groups within them.
GROUPS = {4: (0, 1, 2, 3), 3: (1, 2, 3), 2: (1, 3)}


@dataclass(frozen=True)
class Case:
    """One sequence, and how its attention is computed."""

    mask: Mask
    num_tokens: int = 203
    heads: tuple[int, int] = (8, 4)
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """q (N, Hq, 16), k, v (N, Hkv, 16), the same in every process."""
        generator = torch.Generator().manual_seed(7)
        heads, kv_heads = self.heads
        q, k, v = (
            torch.randn(self.num_tokens, h, 16, generator=generator).to(self.dtype) for h in (heads, kv_heads, kv_heads)
        )
        return q, k, v


def _layout(heads: int) -> Tensor:
    return torch.rand(heads, 4, 4, generator=torch.Generator().manual_seed(3)) < 0.4


CASES = {
    "causal": Case(Causal()),
    "even": Case(Causal(), 256),
    "fewer tokens than blocks": Case(Causal(), 5),
    "full": Case(Full()),
    "bf16": Case(Causal(), dtype=torch.bfloat16),
    "fp64": Case(Causal(), dtype=torch.float64),
    "window": Case(Window(50)),
    "window of one": Case(Window(1)),
    "window wider than a shard": Case(Window(120)),
    "window with sinks": Case(Window(50, 7)),
    "sinks beyond a shard": Case(Window(20, 100)),
    "block lists": Case(LocalGlobal(1, 1), 384),
    "block lists by head": Case(Strided(2, per_head=True), 384),
    "strided under a window": Case(Strided(2) & Window(200), 384),
    "blocks, not causal": Case(BlockSparse(_layout(1), 64)),
    "blocks by head, causal": Case(BlockSparse(_layout(4), 64) & Causal()),
    "either": Case(BlockSparse(_layout(1), 64) & Causal() | Window(20)),
    "softcap": Case(Causal(), options={"softcap": 5.0}),
    "learned sinks": Case(Causal(), options={"sink_logits": torch.linspace(-2.0, 3.0, 8)}),
    "scale": Case(Window(90), options={"scale": 0.5}),
    "many query heads": Case(Causal(), heads=(16, 4)),
}


_OF_THREE = ("causal", "window with sinks", "block lists by head")


def runs() -> Iterator[tuple[str, str, int]]:
    """What is computed: (case, exchange, ranks)."""
    for name in CASES:
        for exchange in EXCHANGES:
            for ranks in GROUPS:
                # Three ranks do not divide the key heads, and few cases are another with them.
                if ranks != 3 or (exchange != "all_to_all" and name in _OF_THREE):
                    yield name, exchange, ranks


def shard(x: Tensor, exchange: str, ranks: int, rank: int) -> Tensor:
    """The rows of x that a rank has."""
    if exchange == "all_to_all":
        return x.split(contiguous_sizes(len(x), ranks))[rank]
    return zigzag_split(x, ranks, rank)


class Counted:
    """Counts the bytes that this rank sends to others, by standing before torch's own functions."""

    def __init__(self) -> None:
        self.sent = 0
        self._functions = dist.all_to_all_single, dist.all_gather, dist.batch_isend_irecv
        dist.all_to_all_single = self._all_to_all
        dist.all_gather, dist.batch_isend_irecv = self._all_gather, self._pass_on

    def _all_to_all(self, received: Tensor, x: Tensor, gets: list[int], gives: list[int], group: Any) -> None:
        others = sum(gives) - gives[dist.get_rank(group)]
        self.sent += others * x[:1].nbytes
        self._functions[0](received, x, gets, gives, group=group)

    def _all_gather(self, received: list[Tensor], x: Tensor, group: Any) -> None:
        self.sent += x.nbytes * (dist.get_world_size(group) - 1)
        self._functions[1](received, x, group=group)

    def _pass_on(self, operations: list[dist.P2POp]) -> list[dist.Work]:
        self.sent += sum(operation.tensor.nbytes for operation in operations if operation.op is dist.isend)
        return self._functions[2](operations)


def main(rank: int, ranks: int, directory: Path) -> None:
    """Compute everything as one of the ranks."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    groups: dict[int, Any] = {size: dist.new_group(list(members)) for size, members in GROUPS.items()}
    results, sent, counted = {}, {}, Counted()
    for name, exchange, size in runs():
        if rank not in GROUPS[size]:
            continue
        case, place = CASES[name], GROUPS[size].index(rank)
        q, k, v = (shard(x, exchange, size, place) for x in case.inputs())
        options = case.options | {"exchange": exchange, "group": groups[size], "return_lse": True}
        before = counted.sent
        results[name, exchange, size] = context_parallel_attention(q, k, v, case.num_tokens, case.mask, **options)
        sent[name, exchange, size] = counted.sent - before
    refusals = {}
    q, k, v = CASES["even"].inputs()
    wrong = {
        "tokens": lambda: context_parallel_attention(q, k, v, 256, exchange="ring"),
        "heads": lambda: context_parallel_attention(q, k, v, 3 * 256, exchange="all_to_all", group=groups[3]),
    }
    for what, call in wrong.items():
        try:
            call()
        except ValueError as error:
            refusals[what] = str(error)
    torch.save((results, refusals, sent), directory / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # as ranks of an engine end: gloo's threads may abort the interpreter's own end


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
