"""Dynamic sparse prefill beside dense attention: time of the estimate, the lists and attention, and the mass kept.

python -m benchmarks.dynamic --lengths 32768,131072 --out result.json

The keys and queries are made so that the sparse set is known. In each KV head every key tile of 128 has one of TOPICS
orthogonal directions, at random, and a run of RUN keys that carry it; every query tile has one too, and all of its
queries carry it; the rest is noise. The strength is such that a query's weight on the keys of its own direction is MASS
of its total: with a share f = RUN / 128 / TOPICS of such keys, exp(strength) = MASS / (1 - MASS) * (1 - f) / f. The
lists of exactly those tiles are measured as "known".

With --model the queries and keys are those of the embedded model instead, for a prompt of the recall benchmark: of its
first and last layer that attend to everything, each head repeated until there are as many as above.

With --decode a decode over chosen blocks is measured beside dense decode, as CUDA graphs, on random numbers.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from longreach_kernels import PagedBatch, paged_attention
from longreach_kernels.sparse import (
    Antidiagonal,
    Density,
    Moments,
    Pooled,
    Recall,
    Threshold,
    block_attention,
    choose_tiles,
    kept_mass,
    new_bounds,
    plan_tiles,
    select_blocks,
    select_tiles,
    write_bounds,
)
from longreach_kernels.sparse.select.lists import lists_of_choice
from longreach_kernels.sparse.select.reference import Logits
from longreach_kernels.sparse.select.select_tiles import lists_of_masses, masses
from torch import Tensor

TOPICS, RUN, MASS, TILE = 32, 32, 0.95, 128
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
ROWS = 64
CONFIGURATIONS = [
    ("antidiagonal 16, recall 0.9", Antidiagonal(16), Recall(0.9)),
    ("antidiagonal 16, recall 0.95", Antidiagonal(16), Recall(0.95)),
    ("antidiagonal 8, recall 0.9", Antidiagonal(8), Recall(0.9)),
    ("antidiagonal 8, recall 0.95", Antidiagonal(8), Recall(0.95)),
    ("antidiagonal 16, density 0.1", Antidiagonal(16), Density(0.1)),
    ("moments 64, recall 0.9", Moments(64), Recall(0.9)),
    ("moments 64, recall 0.95", Moments(64), Recall(0.95)),
    ("moments 64, density 0.1", Moments(64), Density(0.1)),
    ("moments 32, recall 0.9", Moments(32), Recall(0.9)),
    ("moments 32, recall 0.95", Moments(32), Recall(0.95)),
    ("moments 32, density 0.1", Moments(32), Density(0.1)),
    ("pooled, recall 0.95", Pooled(), Recall(0.95)),
    ("pooled, threshold 0.15", Pooled(), Threshold(0.15)),
    ("pooled, density 0.1", Pooled(), Density(0.1)),
]


def structured(length: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q (N, Hq, D), k, v (N, Hkv, D) bf16, and the key tiles with a query tile's direction, (Hkv, tiles, tiles)."""
    generator = torch.Generator("cuda").manual_seed(seed)
    options: dict[str, Any] = {"device": "cuda", "generator": generator}
    tiles = length // TILE
    share = RUN / TILE / TOPICS
    strength = math.log(MASS / (1 - MASS) * (1 - share) / share)
    basis = torch.linalg.qr(torch.randn(KV_HEADS, HEAD_DIM, HEAD_DIM, **options))[0][:, :TOPICS]
    q_topic = torch.randint(TOPICS, (KV_HEADS, tiles), **options)
    # Each direction once in every stretch of TOPICS tiles, so that their shares are even at every length.
    k_topic = torch.rand(KV_HEADS, -(-tiles // TOPICS), TOPICS, **options).argsort(-1).flatten(1)[:, :tiles]
    # Noise that lies in the other directions: it changes logits of all keys alike, and not what the topics weigh.
    q, k, v = (torch.randn(length, h, HEAD_DIM, **options) for h in (HEADS, KV_HEADS, KV_HEADS))
    grouped = q.view(length, KV_HEADS, -1, HEAD_DIM)
    for x, spectrum in ((grouped, "nhgd,htd->nhgt"), (k[:, :, None], "nhgd,htd->nhgt")):
        x -= torch.einsum("nhgt,htd->nhgd", torch.einsum(spectrum, x, basis), basis)
    amplitude = math.sqrt(strength * math.sqrt(HEAD_DIM))
    heads = torch.arange(KV_HEADS, device="cuda")[:, None]
    q_add = (amplitude * basis[heads, q_topic]).repeat_interleave(TILE, 1).transpose(0, 1)
    grouped += q_add[:, :, None]
    begin = torch.randint(TILE - RUN + 1, (KV_HEADS, tiles, 1), **options)
    place = torch.arange(TILE, device="cuda")
    carries = ((place >= begin) & (place < begin + RUN)).flatten(1).T[..., None]
    k += carries * (amplitude * basis[heads, k_topic]).repeat_interleave(TILE, 1).transpose(0, 1)
    known = q_topic[:, :, None] == k_topic[:, None]
    return q.bfloat16(), k.bfloat16(), v.bfloat16(), known


def in_pages(k: Tensor, v: Tensor, num_queries: int) -> tuple[Tensor, Tensor, PagedBatch]:
    """Keys and values (N, Hkv, D) in shuffled pages of 128, and a batch of one prompt."""
    pages = k.shape[0] // TILE
    order = torch.randperm(pages, device=k.device)
    spread = [
        torch.empty_like(x.unflatten(0, (pages, TILE))).index_copy_(0, order, x.unflatten(0, (pages, TILE)))
        for x in (k, v)
    ]
    starts = torch.tensor([0, num_queries], dtype=torch.int32, device=k.device)
    lengths = torch.tensor([k.shape[0]], dtype=torch.int32, device=k.device)
    return spread[0], spread[1], PagedBatch(starts, lengths, order.int()[None], num_queries, k.shape[0])


def milliseconds(run: Callable[[], object], turns: int) -> float:
    """Median of ``turns`` runs after one that is not counted."""
    times = []
    for turn in range(turns + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        if turn:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def of_model(length: int) -> list[tuple[str, Tensor, Tensor, Tensor]]:
    """(name, q, k, v) as `structured`, of the embedded model's layers."""
    from longreach_patches.loader import load_model

    from benchmarks.dynamic_model import MODEL, Probe, probing
    from training.recall.codec import Codec
    from training.recall.suite import Plan, sampler_of, samples

    plan = Plan(tasks=("multikey",), lengths=(length,), count=1)
    sample, _ = next(samples(sampler_of(Codec.load(MODEL), plan), plan, "multikey", length))
    ids = torch.from_numpy(sample.ids[: len(sample.ids) // TILE * TILE].copy()).long().cuda()
    model = load_model(str(MODEL), device="cuda").patched.model
    with probing(Probe(None, len(ids), keep_inputs=True)) as probe, torch.no_grad():
        model(ids[None], use_cache=False, logits_to_keep=1)
    made = []
    for i in (0, len(probe.inputs) - 1):
        q, k, v = probe.inputs[i]
        group, kv_heads = HEADS // KV_HEADS, k.shape[1]
        q = q.unflatten(1, (kv_heads, -1)).repeat(1, KV_HEADS // kv_heads, group // (q.shape[1] // kv_heads), 1)
        k, v = (x.repeat(1, KV_HEADS // kv_heads, 1) for x in (k, v))
        made.append((f"model {i}", q.flatten(1, 2), k, v))
    return made


def measure_decode(length: int, batch_size: int, budget: int, turns: int) -> dict[str, Any]:
    """Milliseconds of a decode over chosen blocks, in parts, and of a dense one; random bf16 numbers."""
    pages = length // TILE
    shape = (batch_size * pages, TILE, KV_HEADS, HEAD_DIM)
    k_pages, v_pages = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(batch_size, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(batch_size * pages, device="cuda").int().view(batch_size, pages)
    lengths = torch.full((batch_size,), length, dtype=torch.int32, device="cuda")
    batch = PagedBatch(torch.arange(batch_size + 1, dtype=torch.int32, device="cuda"), lengths, table, 1, length)
    bounds = new_bounds(k_pages)
    write_bounds(k_pages, bounds, torch.arange(batch_size * length, device="cuda"))
    choice = select_blocks(q, bounds, batch, budget=budget)
    row: dict[str, Any] = {"inputs": "decode", "tokens": length, "batch": batch_size, "budget": budget}
    for name, run in {
        "dense": lambda: paged_attention(q, k_pages, v_pages, batch),
        "select": lambda: select_blocks(q, bounds, batch, budget=budget),
        "attention": lambda: block_attention(q, k_pages, v_pages, batch, choice),
    }.items():
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(10):
                run()
        row[f"{name}_ms"] = milliseconds(graph.replay, turns) / 10
    row["of_dense"] = (row["select_ms"] + row["attention_ms"]) / row["dense_ms"]
    print({k: round(x, 4) if isinstance(x, float) else x for k, x in row.items()}, flush=True)
    return row


def measure(q: Tensor, k: Tensor, v: Tensor, known: Tensor | None, turns: int, name: str) -> list[dict[str, Any]]:
    """A row for each configuration: milliseconds of its parts, density, and kept mass over rows and heads."""
    k_pages, v_pages, batch = in_pages(k, v, q.shape[0])
    plan = plan_tiles(q, k_pages, batch)
    plan_ms = milliseconds(lambda: plan_tiles(q, k_pages, batch), turns)
    tiles, visible = plan.frame.tiles, plan.visible
    dense_ms = milliseconds(lambda: paged_attention(q, k_pages, v_pages, batch), turns)
    rows = torch.linspace(q.shape[0] // 2, q.shape[0] - 1 - 512, ROWS, device="cuda").long()
    logits = Logits(q.shape[-1] ** -0.5, None, None)
    results = []
    configurations: list[tuple[str, Any, Any]] = list(CONFIGURATIONS)
    if known is not None:
        configurations.insert(0, ("known", None, None))
    for label, estimator, target in configurations:
        row: dict[str, Any] = {
            "inputs": name,
            "tokens": k.shape[0],
            "choice": label,
            "dense_ms": dense_ms,
            "plan_ms": plan_ms,
        }
        if estimator is None:
            assert known is not None
            slots = len(tiles.seq)
            keep = torch.zeros(known.shape[0], slots, tiles.key_tiles, dtype=torch.bool, device=q.device)
            keep[:, : known.shape[1]] = known
            lists = lists_of_choice((keep | plan.forced) & visible, plan.frame, kernels=True)
            row |= {"estimate_ms": 0.0, "index_ms": 0.0, "choose_ms": 0.0, "select_ms": 0.0}
        else:
            options = {"target": target, "estimator": estimator}
            lists = select_tiles(q, k_pages, batch, **options)
            mass = masses(q, k_pages, batch, tiles, logits, estimator, "auto")
            row["estimate_ms"] = milliseconds(
                lambda e=estimator: masses(q, k_pages, batch, tiles, logits, e, "auto"), turns
            )
            row["index_ms"] = milliseconds(lambda m=mass, t=target: lists_of_masses(m, plan, t, kernels=True), turns)
            row["choose_ms"] = milliseconds(lambda o=options: choose_tiles(q, k_pages, plan, **o), turns)
            row["select_ms"] = milliseconds(lambda o=options: select_tiles(q, k_pages, batch, **o), turns)
        row["attention_ms"] = milliseconds(lambda x=lists: paged_attention(q, k_pages, v_pages, batch, lists=x), turns)
        _, lse = paged_attention(q, k_pages, v_pages, batch, lists=lists, return_lse=True)
        kept = kept_mass(q, k_pages, v_pages, batch, lse, rows).flatten().double()
        row["kept_ms"] = milliseconds(lambda x=lse: kept_mass(q, k_pages, v_pages, batch, x, rows), turns)
        row["density"] = int(lists.start[-1]) / (int(visible.sum()) * k.shape[1])
        quantile = torch.tensor([0.05], dtype=torch.float64, device=q.device)
        row |= {
            "kept_mean": kept.mean().item(),
            "kept_min": kept.min().item(),
            "kept_p5": kept.quantile(quantile).item(),
        }
        row["of_dense"] = (row["select_ms"] + row["attention_ms"]) / dense_ms
        results.append(row)
        print(line(row), flush=True)
    return results


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    parts = ("dense", "plan", "estimate", "index", "choose", "select", "attention")
    times = ", ".join(f"{part} {row[part + '_ms']:.2f}" for part in parts)
    kept = ", ".join(f"{name} {row['kept_' + name]:.3f}" for name in ("mean", "p5", "min"))
    head = f"{row['inputs']:<10} {row['tokens'] // 1024:>4}K {row['choice']:<28} {row['of_dense']:.3f} of dense"
    return f"{head}; {times} ms; density {row['density']:.3f}; kept {kept} ({row['kept_ms']:.2f} ms)"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--lengths", default="16384,32768,65536,131072", help="tokens, multiples of 128")
    parser.add_argument("--turns", type=int, default=5, help="runs that are timed; their median counts")
    parser.add_argument("--chunk", type=int, help="queries: the last so many, a multiple of 128; all by default")
    parser.add_argument("--model", action="store_true", help="the embedded model's queries and keys")
    parser.add_argument("--decode", action="store_true", help="decode over chosen blocks")
    parser.add_argument("--budget", type=int, default=2048, help="tokens that a decode reads")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it times GPU kernels: run it on a machine with a CUDA GPU")
    rows: list[dict[str, Any]] = []
    for length in map(int, arguments.lengths.split(",")):
        if arguments.decode:
            rows += [measure_decode(length, b, arguments.budget, arguments.turns) for b in (1, 8)]
        elif arguments.model:
            for name, q, k, v in of_model(length):
                rows += measure(q, k, v, None, arguments.turns, name)
        else:
            q, k, v, known = structured(length)
            chunk = min(arguments.chunk or length, length)
            name = "structured" if chunk == length else f"last {chunk}"
            rows += measure(q[-chunk:], k, v, known[:, -(chunk // TILE) :], arguments.turns, name)
        torch.cuda.empty_cache()
        if arguments.out is not None:
            where = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
            where["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
            arguments.out.write_text(json.dumps({"environment": where, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
