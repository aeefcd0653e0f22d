"""Attention of one sequence over several GPUs, by exchange, beside one GPU alone: time, error, and bytes sent.

python -m benchmarks.context_parallel --ranks 2 --lengths 32768,131072 --out result.json

`benchmarks/report.py` makes a table of the JSON.

Random bf16 queries (32 heads of 128), keys and values (8 heads), the same on all ranks, which keep their own shards.
Lengths are multiples of twice the ranks. A time is the slowest rank's, from a barrier to the end of its kernels; the
median of --turns runs. The error is the largest over some queries and all their heads, from fp64; "allowed" is what the
accuracy rule of the tests grants: twice the error of eager bf16 attention on the same queries, plus rounding.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from longreach_kernels import Causal, Mask, Window, attention
from longreach_kernels.context_parallel import (
    context_parallel_attention,
    contiguous_sizes,
    zigzag_join,
    zigzag_split,
)
from longreach_kernels.context_parallel.traffic import Heads, all_gather_bytes, all_to_all_bytes, ring_bytes
from longreach_kernels.masks.block_rules import Strided
from longreach_kernels.masks.tile_counts import tile_count
from torch import Tensor

HEADS = Heads(queries=32, keys=8, dim=128)
MASKS: dict[str, Mask] = {"causal": Causal(), "window": Window(4096, 64), "strided": Strided(16)}
SENT = {"ring": ring_bytes, "all_gather": all_gather_bytes, "all_to_all": all_to_all_bytes}
ROWS = 48


def inputs(length: int) -> tuple[Tensor, Tensor, Tensor]:
    """q (N, Hq, D), k and v (N, Hkv, D), bf16, the same on every GPU."""
    generator = torch.Generator("cuda").manual_seed(length)
    sizes = (HEADS.queries, HEADS.keys, HEADS.keys)
    q, k, v = (torch.randn(length, h, HEADS.dim, device="cuda", generator=generator).bfloat16() for h in sizes)
    return q, k, v


def alone(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Attention on one GPU, (N, Hq, D)."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return attention(q, k, v, mask)[0].transpose(0, 1)


def milliseconds(run: Callable[[], object], turns: int, everyone: bool) -> float:
    """Median of `turns` runs after two that are not counted; of the slowest rank if `everyone` runs."""
    times = []
    for turn in range(turns + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if everyone:
            dist.barrier()
        torch.cuda.synchronize()
        begin.record()
        run()
        end.record()
        end.synchronize()
        taken = torch.tensor(begin.elapsed_time(end), device="cuda")
        if everyone:
            dist.all_reduce(taken, dist.ReduceOp.MAX)
        if turn > 1:
            times.append(taken.item())
    return statistics.median(times)


def judged(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor, float]:
    """Some queries, their exact results (rows, Hq, D) in fp64, and the error that the accuracy rule allows them."""
    length = q.shape[0]
    rows = torch.linspace(0, length - 1, ROWS, device="cuda").long()
    seen = mask.allowed(rows.cpu(), torch.arange(length)).cuda()
    exact = torch.empty(HEADS.queries, ROWS, HEADS.dim, dtype=torch.float64, device="cuda")
    eager = torch.empty_like(exact)
    group = HEADS.queries // HEADS.keys
    for head in range(HEADS.queries):
        query, keys, values = q[rows, head], k[:, head // group], v[:, head // group]
        scores = query.double() @ keys.double().T * HEADS.dim**-0.5
        exact[head] = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1) @ values.double()
        rounded = (query @ keys.T * HEADS.dim**-0.5).float().masked_fill(~seen, float("-inf"))
        eager[head] = (torch.softmax(rounded, -1).bfloat16() @ values).double()
    nudged = exact.bfloat16()
    allowed = 2 * (eager - exact).abs().max() + 2 * (nudged + 0.3 - 0.3 - nudged).abs().max()
    return rows, exact.transpose(0, 1), allowed.item()


def measure(name: str, length: int, turns: int) -> list[dict[str, Any]]:
    """A row for one GPU and one for each exchange; the same on all ranks, but for what rank 0 alone knows."""
    rank, ranks, mask = dist.get_rank(), dist.get_world_size(), MASKS[name]
    q, k, v = inputs(length)
    rows, exact, allowed = judged(q, k, v, mask)
    whole = alone(q, k, v, mask)
    one = {"mask": name, "tokens": length, "exchange": "one GPU", "ms": 0.0, "sent_bytes": 0}
    one |= {"error": (whole[rows].double() - exact).abs().max().item(), "allowed": allowed}
    if rank == 0:
        one["ms"] = milliseconds(lambda: alone(q, k, v, mask), turns, everyone=False)
    dist.barrier()
    results = [one]
    for exchange, bytes_of in SENT.items():
        if exchange == "all_to_all":
            own = [x.split(contiguous_sizes(length, ranks))[rank].contiguous() for x in (q, k, v)]
        else:
            own = [zigzag_split(x, ranks, rank) for x in (q, k, v)]

        def run(own: list[Tensor] = own, exchange: str = exchange) -> Tensor:
            return context_parallel_attention(own[0], own[1], own[2], length, mask, exchange=exchange)

        out = run()
        shards = [torch.empty_like(out) for _ in range(ranks)]
        dist.all_gather(shards, out)
        joined = torch.cat(shards) if exchange == "all_to_all" else zigzag_join(shards)
        row = {"mask": name, "tokens": length, "exchange": exchange, "ms": milliseconds(run, turns, everyone=True)}
        row |= {"sent_bytes": bytes_of(HEADS, ranks, length), "allowed": allowed}
        row["error"] = (joined[rows].double() - exact).abs().max().item()
        results.append(row)
    pairs = tile_count(mask, 0, length).pairs // mask.heads * HEADS.queries
    for row in results:
        row["flops"] = 4 * pairs * HEADS.dim
        row["of_one_gpu"] = row["ms"] / one["ms"] if one["ms"] else None
    return results


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    speed = row["flops"] / row["ms"] / 1e9
    return (
        f"{row['mask']:<8} {row['tokens'] // 1024:>4}K {row['exchange']:<11} {row['ms']:8.2f} ms, "
        f"{row['of_one_gpu']:.3f} of one GPU, {speed:5.0f} TFLOP/s; {row['sent_bytes'] / 1e6:6.1f} MB sent; "
        f"error {row['error']:.2e} of {row['allowed']:.2e} allowed"
    )


def work(rank: int, ranks: int, scratch: str, arguments: argparse.Namespace) -> None:
    """Everything, as one rank."""
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{scratch}/store", ranks)
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks, timeout=timeout)
    where = {"device": torch.cuda.get_device_name(), "ranks": ranks, "torch": torch.__version__}
    where["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
    rows: list[dict[str, Any]] = []
    for name in arguments.masks.split(","):
        for length in map(int, arguments.lengths.split(",")):
            found = measure(name, length, arguments.turns)
            torch.cuda.empty_cache()
            if rank:
                continue
            rows += found
            print("\n".join(line(row) for row in found), flush=True)
            if arguments.out is not None:
                arguments.out.write_text(json.dumps({"environment": where, "rows": rows}, indent=1) + "\n")
    wrong = [row for row in rows if row["error"] > row["allowed"]]
    dist.destroy_process_group()
    if wrong:
        raise SystemExit(f"not exact: {', '.join(line(row) for row in wrong)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--ranks", type=int, default=2, help="GPUs")
    parser.add_argument("--lengths", default="32768,131072", help="tokens")
    parser.add_argument("--masks", default="causal,window,strided", help=f"of {', '.join(MASKS)}")
    parser.add_argument("--turns", type=int, default=7, help="runs that are timed; their median counts")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    if torch.cuda.device_count() < arguments.ranks:
        parser.error(f"{arguments.ranks} ranks need as many GPUs; this machine has {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as scratch:
        torch.multiprocessing.spawn(work, (arguments.ranks, scratch, arguments), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
