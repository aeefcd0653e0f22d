"""What `min_mass` holds, costs and saves on a real model: pass keys behind long texts, in this process.

    python -m benchmarks.min_mass MODEL --lengths 4096,8192 --prompts 6 --out min-mass.json

Each prompt is read under every setting. Once with a full check: of what the engine read, the kept mass of all queries
is computed, and compared with what `usage` told. Then some of them again, for the time to the first token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from longreach.bench.summary import environment
from longreach.engine.engine import Engine
from longreach.engine.messages import EngineConfig, Failed, Generate, Sampling
from longreach.engine.startup.build import build_engine
from longreach.engine.updates import AttentionUse, DecodeUse, Updates
from longreach.policies.parse import policy_of
from longreach_kernels.sparse.select import mass_floor, select_tiles

from benchmarks.mass_predicts import prompt_of

BASE = {"policy": "dynamic", "dense_below": 1024}
SETTINGS: dict[str, dict[str, Any]] = {
    "dense": {"policy": "dense"},
    "recall 0.9": BASE | {"recall": 0.9},
    "recall 0.9, min_mass 0.95": BASE | {"recall": 0.9, "min_mass": 0.95},
    "recall 0.9, min_mass 0.98": BASE | {"recall": 0.9, "min_mass": 0.98},
    "recall 0.9, min_mass 0.99": BASE | {"recall": 0.9, "min_mass": 0.99},
    "recall 0.5": BASE | {"recall": 0.5},
    "recall 0.5, min_mass 0.8": BASE | {"recall": 0.5, "min_mass": 0.8},
    "budget 512": BASE | {"recall": 1, "decode_budget": 512},
    "budget 512, min_mass 0.98": BASE | {"recall": 1, "decode_budget": 512, "min_mass": 0.98},
}
ANSWER = 8  # tokens


class FullCheck:
    """Of all queries of the rows that were tested: how many keep less than the floor of what was read."""

    def __init__(self) -> None:
        self.queries = 0
        self.below: Any = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at all choices that are made inside."""
        raised = mass_floor.raised

        def checked(choices: Any, visible: Any, forced: Any, floor: Any, *seen: Any, plain: bool) -> Any:
            keep, found = raised(choices, visible, forced, floor, *seen, plain=plain)
            self._look(keep, visible & ~forced, floor.share, *seen, plain=plain)
            return keep, found

        select_tiles.raised = checked  # type: ignore[assignment]
        try:
            yield
        finally:
            select_tiles.raised = raised

    def _look(
        self, keep: Any, free: Any, floor: float, q: Any, k_pages: Any, batch: Any, tiles: Any, *rest: Any, plain: bool
    ) -> None:
        tested = free.any(-1)
        place = torch.arange(tiles.tile_q, device=q.device)
        real = tested[:, None] & (place <= (tiles.last - tiles.first)[:, None])
        row = (batch.cu_seqlens_q.long()[tiles.seq] + tiles.tile * tiles.tile_q)[:, None] + place
        rows = [
            torch.where(real, row, -1).int(),
            (tiles.first[:, None] + place).int(),
            tiles.seq[:, None].expand_as(row).int(),
        ]
        room = max(1, (256 << 20) // (4 * q.shape[1] * tiles.key_tiles * tiles.tile_q))
        for start in range(0, len(tested), room):
            own = slice(start, start + room)
            given = tuple(x[own].flatten().contiguous() for x in rows)
            shares = mass_floor.shares_of([keep[:, own]], q, k_pages, batch, tiles, given, *rest, plain=plain)[0]
            self.below = self.below + ((shares < floor) & real[own]).sum()
        self.queries = self.queries + real.sum() * len(keep)


def computed(
    engine: Engine, name: str, prompt: list[int], how: dict[str, Any], tokens: int
) -> tuple[float, list[int], AttentionUse | None, DecodeUse | None]:
    """Seconds, the answer, and what was told of its attention.

    Raises:
        RuntimeError: the request failed.
    """
    policy = policy_of(how).resolve()
    asked = Generate(
        request_id=name, prompt=prompt, max_tokens=tokens, sampling=Sampling(temperature=0.0), attention=policy
    )
    since = time.perf_counter()
    if (failed := engine.submit(asked)) is not None:
        raise RuntimeError(failed.message)
    answer: list[int] = []
    use, decode = None, None
    while engine.has_work:
        for news in engine.step():
            if isinstance(news, Failed):
                raise RuntimeError(news.message)
            if isinstance(news, Updates):
                for update in news.updates:
                    answer += update.tokens
                    use, decode = update.attention or use, update.decode or decode
    return time.perf_counter() - since, answer, use, decode


def read(engine: Engine, name: str, prompt: list[int], right: list[int], setting: str, tokens: int) -> dict[str, Any]:
    """One prompt under one setting, with a full check where it has a floor."""
    how, check = SETTINGS[setting], FullCheck()
    with check.watching():
        _, answer, use, decode = computed(engine, name, prompt, how, ANSWER)
    row: dict[str, Any] = {"tokens": tokens, "setting": setting, "found": answer[: len(right)] == right}
    if use is not None:
        row |= {
            "tiles": use.tiles / max(1, use.dense_tiles),
            "kept_mean": use.kept_mass.mean if use.kept_mass else None,
            "kept_min": use.kept_mass.least if use.kept_mass else None,
        }
    if use is not None and use.floor is not None and use.floor.rows:
        floor = use.floor
        below = int(check.below) / max(1, int(check.queries))
        row |= {
            "rows": floor.rows,
            "widened": floor.widened / floor.rows,
            "read_whole": floor.dense / floor.rows,
            "chosen_least": floor.chosen_least,
            "below_estimate": floor.below,
            "below_at_most": floor.below_most,
            "below": below,
            "queries": int(check.queries),
            "holds": below <= floor.below_most,
        }
    if decode is not None:
        row |= {"decode_read_again": decode.whole_share, "decode_keys": decode.keys_read / max(1, decode.keys)}
    return row


def main() -> None:
    """Measure, and write the JSON after each length."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--name")
    parser.add_argument("--lengths", default="4096,8192")
    parser.add_argument("--prompts", default="6", help="of each length, with commas for each its own")
    parser.add_argument("--repeats", type=int, default=3, help="prompts of each length that are timed")
    parser.add_argument("--wait-for", type=Path, help="times are taken when this file exists")
    parser.add_argument("--seconds", type=float, default=1e9, help="no prompt begins later")
    parser.add_argument("--cache-bytes", type=int, default=8 << 30)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    from transformers import AutoTokenizer

    end = time.monotonic() + args.seconds
    lengths = [int(x) for x in args.lengths.split(",")]
    counts = [int(x) for x in args.prompts.split(",")]
    counts = counts * len(lengths) if len(counts) == 1 else counts
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    engine, _ = build_engine(
        EngineConfig(
            model=args.model,
            max_num_seqs=4,
            kv_cache_bytes=args.cache_bytes,
            prefix_cache=False,
            page_bounds=True,
            cuda_graphs=False,
        )
    )
    name = args.name or Path(args.model).name
    result: dict[str, Any] = {"environment": environment(), "model": {"name": name}, "rows": [], "times": []}
    prompts = {(length, i): prompt_of(tokenizer, length, 1000 * length + i) for length in lengths for i in range(64)}
    for length, count in zip(lengths, counts, strict=True):
        for i in range(count):
            if time.monotonic() > end:
                break
            prompt, right, _ = prompts[length, i]
            for setting in SETTINGS:
                row = read(engine, f"{length} {i} {setting}", prompt, right, setting, length) | {"prompt": i}
                result["rows"].append(row)
                print(f"{name} {json.dumps(row)[:330]}", flush=True)
                if setting == "dense" and not row["found"]:
                    break  # what dense attention does not answer tells nothing
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    while args.wait_for is not None and not args.wait_for.exists() and time.monotonic() < end:
        time.sleep(0.05)
    for length in lengths:
        own = [prompts[length, 40 + i][0] for i in range(args.repeats + 1)]
        result["times"] += timed(engine, name, length, own, end)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    engine.close()
    print(table(result))


def timed(engine: Engine, name: str, length: int, prompts: list[list[int]], end: float) -> list[dict[str, Any]]:
    """Times to the first token by setting; the first prompt is not counted, and none begins after `end`."""
    taken: dict[str, list[float]] = {}
    for i, prompt in enumerate(prompts):
        for setting, how in SETTINGS.items():
            if "budget" in setting or time.monotonic() > end:
                continue
            seconds = computed(engine, f"time {length} {i} {setting}", prompt, how, 1)[0]
            if i:
                taken.setdefault(setting, []).append(seconds)
    rows = []
    for setting, seconds in taken.items():
        row = {"tokens": length, "setting": setting, "ttft_s": statistics.median(seconds), "all_s": seconds}
        row["of_dense"] = row["ttft_s"] / statistics.median(taken["dense"])
        rows.append(row)
        print(f"{name} {json.dumps(row)[:200]}", flush=True)
    return rows


def table(result: dict[str, Any]) -> str:
    """The rows as Markdown, with what was measured where."""
    heads = "tokens|setting|answers kept|tiles read|rows read again|queries below|told at most|TTFT of dense"
    lines = ["| " + " | ".join(heads.split("|")) + " |", "| ---: | --- |" + " ---: |" * 6]
    for tokens, setting in dict.fromkeys((row["tokens"], row["setting"]) for row in result["rows"]):
        some = [row for row in result["rows"] if (row["tokens"], row["setting"]) == (tokens, setting)]
        some = some if setting != "dense" else [row for row in some if row["found"]]
        times = [t["of_dense"] for t in result["times"] if (t["tokens"], t["setting"]) == (tokens, setting)]
        again = [row["widened"] + row["read_whole"] for row in some if "rows" in row]
        again = again or [row["decode_read_again"] for row in some if "min_mass" in setting and "tiles" in row]
        cells = [
            f"{sum(row['found'] for row in some)} of {len(some)}",
            _mean([row["tiles"] for row in some if "tiles" in row]),
            _mean(again),
            _most([row["below"] for row in some if "below" in row]),
            _most([row["below_at_most"] for row in some if "below_at_most" in row]),
            f"{times[0]:.2f}" if times else "",
        ]
        lines.append(f"| {tokens:,} | {setting} | " + " | ".join(cells) + " |")
    checked = [row for row in result["rows"] if "holds" in row]
    held = sum(row["holds"] for row in checked)
    where = result["environment"]
    return (
        "\n".join(lines)
        + f"\n\n{result['model']['name']}. The full check met what was told in {held} of {len(checked)} "
        f"readings. Queries below: the most of any prompt. {where['device']}; torch {where['versions']['torch']}; "
        f"{where['date']}."
    )


def _mean(values: list[float]) -> str:
    return f"{sum(values) / len(values):.3f}" if values else ""


def _most(values: list[float]) -> str:
    return f"{max(values):.4f}" if values else ""


if __name__ == "__main__":
    main()
