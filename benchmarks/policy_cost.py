"""Time to the first token by attention policy, in this process: what a policy saves, and what it costs.

    python -m benchmarks.policy_cost --lengths 16k,64k,126k --out result.json
    python -m benchmarks.policy_cost --layers 8 --profile 126k

The model has the shape of an 8B Llama and random weights. Its attention is as diffuse as attention can be: at a recall
of 0.95 nearly all tiles are wanted, so that choosing them cannot pay. Each policy reads one prompt of each length that
is not timed, which compiles its kernels, and then others. No two prompts share a page.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from longreach.bench import shapes
from longreach.bench.sizes import load_of
from longreach.bench.summary import environment
from longreach.engine.engine import Engine
from longreach.engine.messages import AttentionUse, EngineConfig, Failed, Generate, Sampling
from longreach.engine.startup.build import build_engine
from longreach.policies.parse import policy_of

DENSE = "dense"
_POLICIES = (DENSE, "window:4096:4", "dynamic:0.95", '{"policy": "dynamic", "density": 0.1}')
_KERNELS = 14  # that a profile names


def lengths_of(text: str) -> tuple[int, ...]:
    """Numbers of tokens such as 64k, with commas."""
    return load_of(lengths=text).lengths


def policy(text: str) -> Any:
    """A policy by its short form or its JSON."""
    return policy_of(json.loads(text) if text.startswith("{") else text).resolve()


def first_token(engine: Engine, name: str, prompt: list[int], text: str) -> tuple[float, AttentionUse | None]:
    """Seconds to the first token of a request, and what its usage says of attention.

    Raises:
        RuntimeError: the request failed.
    """
    asked = Generate(
        request_id=name, prompt=prompt, max_tokens=1, sampling=Sampling(temperature=0.0), attention=policy(text)
    )
    use = None
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    since = time.perf_counter()
    if (failed := engine.submit(asked)) is not None:
        raise RuntimeError(failed.message)
    while engine.has_work:
        for news in engine.step():
            if isinstance(news, Failed):
                raise RuntimeError(news.message)
            use = next((update.attention for update in news.updates if update.attention is not None), use)
    return time.perf_counter() - since, use


class Prompts:
    """Random prompts, no two of which begin alike."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._generator = torch.Generator().manual_seed(1)

    def of(self, length: int) -> list[int]:
        """The next one."""
        return torch.randint(3, self._vocab_size, (length,), generator=self._generator).tolist()


def measured(engine: Engine, prompts: Prompts, length: int, texts: list[str], repeats: int) -> list[dict[str, Any]]:
    """A row for each policy; the policies take turns, so that a warmer GPU favours none of them."""
    for text in texts:
        first_token(engine, f"warm-{text}-{length}", prompts.of(length), text)
    times: dict[str, list[float]] = {text: [] for text in texts}
    uses: dict[str, AttentionUse | None] = {}
    for turn in range(repeats):
        for text in texts:
            seconds, uses[text] = first_token(engine, f"{text}-{length}-{turn}", prompts.of(length), text)
            times[text].append(seconds)
    dense = statistics.median(times[DENSE]) if DENSE in times else None
    rows = []
    for text in texts:
        use, median = uses[text], statistics.median(times[text])
        rows.append(
            {
                "tokens": length,
                "policy": text,
                "ttft_s": median,
                "all_s": times[text],
                "of_dense": None if dense is None else median / dense,
                "density": None if use is None else use.pairs / use.dense_pairs,
                "tiles": None if use is None else use.tiles / max(1, use.dense_tiles),
                "kept_mass": None if use is None or use.kept_mass is None else use.kept_mass.mean,
            }
        )
        print(line(rows[-1]), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    of_dense = "" if row["of_dense"] is None else f", {row['of_dense']:.3f} of dense"
    density = "" if row["density"] is None else f", density {row['density']:.3f}, tiles {row['tiles']:.3f}"
    return f"{row['tokens']:>7} {row['policy']:<40} {row['ttft_s']:.3f} s{of_dense}{density}"


def profiled(engine: Engine, prompts: Prompts, length: int, text: str) -> dict[str, Any]:
    """What a GPU computes for the first token of a request: its kernels by time, and how long it waits."""
    first_token(engine, f"warm-profile-{text}", prompts.of(length), text)
    watched = torch.profiler.ProfilerActivity.CUDA if torch.cuda.is_available() else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[watched]) as profile:
        seconds, _ = first_token(engine, f"profile-{text}", prompts.of(length), text)
    kernels = [
        {"name": event.key[:70], "ms": event.self_device_time_total / 1e3, "count": event.count}
        for event in profile.key_averages()
        if event.self_device_time_total > 0
    ]
    kernels.sort(key=lambda kernel: -kernel["ms"])
    busy = sum(kernel["ms"] for kernel in kernels)
    print(f"profile {length} {text}: {1e3 * seconds:.0f} ms, of which the GPU computes {busy:.0f} ms", flush=True)
    for kernel in kernels[:_KERNELS]:
        print(f"  {kernel['ms']:9.2f} ms {kernel['count']:6d} x {kernel['name']}", flush=True)
    return {"tokens": length, "policy": text, "ms": 1e3 * seconds, "busy_ms": busy, "kernels": kernels[:40]}


def main() -> None:
    """Measure, print a line for each row, and write the JSON after each length."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--shape", default="llama-8b", choices=sorted(shapes.SHAPES))
    parser.add_argument("--layers", type=int, help="that many layers in place of all")
    parser.add_argument("--lengths", default="16k,64k,126k", help="tokens of the prompts, with commas")
    parser.add_argument("--policy", action="append", dest="policies", help="short form or JSON; repeat for more")
    parser.add_argument("--repeats", type=int, default=3, help="prompts of each length that are timed")
    parser.add_argument("--profile", help="tokens of a prompt whose kernels are listed for each policy")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    texts = arguments.policies or list(_POLICIES)
    lengths = lengths_of(arguments.lengths) if arguments.lengths else ()
    profile = None if arguments.profile is None else lengths_of(arguments.profile)[0]
    rows: list[dict[str, Any]] = []
    profiles: list[dict[str, Any]] = []
    about = {"shape": arguments.shape, "layers": arguments.layers, "repeats": arguments.repeats}
    result = {"environment": environment(), **about, "rows": rows, "profiles": profiles}

    def save() -> None:
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / arguments.shape
        shapes.write(arguments.shape, path)
        config = EngineConfig(
            model=str(path),
            random_weights=True,
            max_model_len=max((*lengths, profile or 0)) + 128,
            max_num_seqs=4,
            kv_cache_bytes=None if torch.cuda.is_available() else 1 << 28,
            hf_overrides={} if arguments.layers is None else {"num_hidden_layers": arguments.layers},
        )
        engine, started = build_engine(config)
        print(f"started, {started.max_batched_tokens} tokens a step", file=sys.stderr, flush=True)
        prompts = Prompts(started.vocab_size)
        for length in lengths:
            rows += measured(engine, prompts, length, texts, arguments.repeats)
            save()
        for text in texts if profile is not None else ():
            profiles.append(profiled(engine, prompts, profile, text))
            save()
        engine.close()


if __name__ == "__main__":
    main()
