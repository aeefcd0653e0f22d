"""Inter-token latency by decode budget: answers about one long document, alone and several at once, on a GPU.

    python -m benchmarks.decode_budget --length 131072 --budgets 512,2048,8192 --out result.json

The model has the shape of an 8B Llama and random weights: its speed is that of a trained one, its attention is not, and
so what was missed of it says nothing and is not reported. Answers to the same prompt share its pages, and each reads
them for itself. A first engine, without bounds beside the pages, says what these cost dense decodes. One token of an
answer in 64 is read densely, too, for its kept mass: the mean has that in it, the median has not.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from longreach.bench import shapes
from longreach.bench.sizes import whole_numbers
from longreach.bench.summary import environment
from longreach.engine.engine import Engine
from longreach.engine.messages import EngineConfig, Failed, Generate, Sampling
from longreach.engine.startup.build import build_engine
from longreach.engine.updates import DecodeUse
from longreach.policies.parse import policy_of
from longreach.policies.values import DENSE, AttentionPolicy

_SETTLING = 4  # steps after the last prompt has been read that are not timed


def under(budget: int | None) -> AttentionPolicy:
    """The policy whose answers read a budget of keys; the prompt is read sparsely, since only answers are timed."""
    if budget is None:
        return DENSE
    return policy_of({"policy": "dynamic", "density": 0.05, "decode_budget": budget}).resolve()


def measured(engine: Engine, prompt: list[int], budget: int | None, answers: int, tokens: int) -> dict[str, Any]:
    """Milliseconds of each step in which `answers` to one prompt get a token, once all are being written.

    Raises:
        RuntimeError: a request failed.
    """
    for number in range(answers):
        asked = Generate(
            request_id=f"{budget}-{answers}-{number}",
            prompt=prompt,
            max_tokens=tokens + _SETTLING + answers,
            sampling=Sampling(temperature=0.0),
            attention=under(budget),
        )
        if (failed := engine.submit(asked)) is not None:
            raise RuntimeError(failed.message)
    writing: set[str] = set()
    times: list[float] = []
    use: DecodeUse | None = None
    since = time.perf_counter()
    while engine.has_work:
        for news in engine.step():
            if isinstance(news, Failed):
                raise RuntimeError(news.message)
            writing |= {update.request_id for update in news.updates if update.tokens}
            use = next((update.decode for update in news.updates if update.decode is not None), use)
        now = time.perf_counter()
        if len(writing) == answers and engine.stats.running == answers:
            times.append(1e3 * (now - since))
        since = now
    steady = times[_SETTLING:]
    return {
        "budget": budget,
        "answers": answers,
        "itl_ms": statistics.median(steady),
        "itl_mean_ms": statistics.fmean(steady),
        "itl_max_ms": max(steady),
        "steps": len(steady),
        "keys_read": None if use is None else use.keys_read / use.keys,
    }


def run(
    shape: str, length: int, budgets: list[int | None], crowds: list[int], tokens: int, without: bool, save: Any
) -> dict[str, Any]:
    """A row for dense attention `without` bounds, if wanted, and for each budget and number of answers with them;
    `save` is given the result after each one."""
    rows: list[dict[str, Any]] = []
    result = {"environment": environment(), "shape": shape, "length": length, "rows": rows}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / shape
        shapes.write(shape, path)
        for bounds in (False, True) if without else (True,):
            config = EngineConfig(
                model=str(path),
                random_weights=True,
                page_bounds=bounds,
                max_model_len=length + 1024,
                max_num_seqs=max(crowds),
                kv_cache_bytes=None if torch.cuda.is_available() else 1 << 28,
            )
            engine, started = build_engine(config)
            prompt = torch.randint(
                3, started.vocab_size, (length,), generator=torch.Generator().manual_seed(1)
            ).tolist()
            for budget in budgets if bounds else [None]:
                for answers in crowds:
                    row = {"page_bounds": bounds} | measured(engine, prompt, budget, answers, tokens)
                    rows.append(row)
                    print(line(row), file=sys.stderr, flush=True)
                    save(result)
            engine.close()
            del engine
            gc.collect()  # its parts refer to each other, and the next engine needs the memory
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return result


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    what = "dense" if row["budget"] is None else f"budget {row['budget']:,}"
    bounds = "with bounds" if row["page_bounds"] else "without bounds"
    return f"{what}, {bounds}, {row['answers']} answers: {row['itl_ms']:.2f} ms, mean {row['itl_mean_ms']:.2f} ms"


def table(result: dict[str, Any]) -> str:
    """The rows as Markdown, with what was measured where."""
    lines = [
        "| attention of answers | bounds | answers at once | ITL: median (ms) | mean | max | keys read |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result["rows"]:
        read = "" if row["keys_read"] is None else f"{row['keys_read']:.4f}"
        what = "dense" if row["budget"] is None else f"budget {row['budget']:,}"
        bounds = "yes" if row["page_bounds"] else "no"
        times = " | ".join(f"{row[f'itl_{name}ms']:.2f}" for name in ("", "mean_", "max_"))
        numbers = f"{row['answers']} | {times} | {read}"
        lines.append(f"| {what} | {bounds} | {numbers} |")
    where = result["environment"]
    return (
        "\n".join(lines)
        + f"\n\n{result['shape']}, random weights, {result['length']:,} tokens; {where['device']}; {where['date']}.\n"
    )


def main() -> None:
    """Measure, print the table, and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--shape", default="llama-8b", choices=sorted(shapes.SHAPES))
    parser.add_argument("--length", type=int, default=131072, help="tokens of the document")
    parser.add_argument(
        "--budgets", default="512,2048,8192", help="keys that a token reads, with commas; dense besides"
    )
    parser.add_argument("--answers", default="1,8", help="answers at once, with commas")
    parser.add_argument("--tokens", type=int, default=80, help="tokens of each answer that are timed")
    parser.add_argument("--no-baseline", action="store_true", help="leave out the engine without bounds")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()

    def save(result: dict[str, Any]) -> None:
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")

    try:
        budgets = [None, *whole_numbers("--budgets", arguments.budgets)]
        crowds = list(whole_numbers("--answers", arguments.answers))
        if arguments.tokens < 8 or arguments.length < 512:
            raise ValueError("--tokens must be 8 or more, and --length 512 or more")
        sizes = arguments.shape, arguments.length, budgets, crowds, arguments.tokens
        result = run(*sizes, not arguments.no_baseline, save)
    except ValueError as error:
        parser.error(str(error))
    print(table(result))


if __name__ == "__main__":
    main()
