"""One rank of the tests of context parallelism: computes its shards of every case and writes them to a file.

python -m tests.kernels.context_ranks RANK RANKS DIRECTORY
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from longreach_kernels import BlockSparse, Causal, Full, Mask, Window
from longreach_kernels.block_rules import LocalGlobal, Strided
from longreach_kernels.context_parallel import context_parallel_attention, contiguous_sizes, zigzag_split
from torch import Tensor

EXCHANGES = ("ring", "all_gather", "all_to_all")
# The ranks of the whole test, and of process groups within them.
GROUPS = {4: (0, 1, 2, 3), 3: (1, 2, 3), 2: (1, 3)}


@dataclass(frozen=True)
class Case:
    """One sequence, and how its attention is computed."""

    mask: Mask
    num_tokens: int = 333
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
    return torch.rand(heads, 6, 6, generator=torch.Generator().manual_seed(3)) < 0.4


CASES = {
    "causal": Case(Causal()),
    "even": Case(Causal(), 512),
    "fewer tokens than blocks": Case(Causal(), 5),
    "full": Case(Full()),
    "bf16": Case(Causal(), dtype=torch.bfloat16),
    "fp64": Case(Causal(), dtype=torch.float64),
    "window": Case(Window(50)),
    "window of one": Case(Window(1)),
    "window wider than a shard": Case(Window(190)),
    "window with sinks": Case(Window(50, 7)),
    "sinks beyond a shard": Case(Window(20, 100)),
    "block lists": Case(LocalGlobal(1, 1), 640),
    "block lists by head": Case(Strided(2, per_head=True), 640),
    "strided under a window": Case(Strided(2) & Window(300), 640),
    "blocks, not causal": Case(BlockSparse(_layout(1), 64)),
    "blocks by head, causal": Case(BlockSparse(_layout(4), 64) & Causal()),
    "either": Case(BlockSparse(_layout(1), 64) & Causal() | Window(20)),
    "softcap": Case(Causal(), options={"softcap": 5.0}),
    "learned sinks": Case(Causal(), options={"sink_logits": torch.linspace(-2.0, 3.0, 8)}),
    "scale": Case(Window(90), options={"scale": 0.5}),
    "many query heads": Case(Causal(), heads=(16, 4)),
}


def runs() -> Iterator[tuple[str, str, int]]:
    """What is computed: (case, exchange, ranks)."""
    for name in CASES:
        for exchange in EXCHANGES:
            for ranks in GROUPS:
                if exchange != "all_to_all" or ranks != 3:  # 4 key heads
                    yield name, exchange, ranks


def shard(x: Tensor, exchange: str, ranks: int, rank: int) -> Tensor:
    """The rows of x that a rank has."""
    if exchange == "all_to_all":
        return x.split(contiguous_sizes(len(x), ranks))[rank]
    return zigzag_split(x, ranks, rank)


def main(rank: int, ranks: int, directory: Path) -> None:
    """Compute everything as one of the ranks."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    groups: dict[int, Any] = {size: dist.new_group(list(members)) for size, members in GROUPS.items()}
    results = {}
    for name, exchange, size in runs():
        if rank not in GROUPS[size]:
            continue
        case, place = CASES[name], GROUPS[size].index(rank)
        q, k, v = (shard(x, exchange, size, place) for x in case.inputs())
        options = case.options | {"exchange": exchange, "group": groups[size], "return_lse": True}
        results[name, exchange, size] = context_parallel_attention(q, k, v, case.num_tokens, case.mask, **options)
    refusals = {}
    q, k, v = CASES["even"].inputs()
    wrong = {
        "tokens": lambda: context_parallel_attention(q, k, v, 512, exchange="ring"),
        "heads": lambda: context_parallel_attention(q, k, v, 3 * 512, exchange="all_to_all", group=groups[3]),
    }
    for what, call in wrong.items():
        try:
            call()
        except ValueError as error:
            refusals[what] = str(error)
    torch.save((results, refusals), directory / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
