"""Time to the first token by attention policy, over HTTP: what a policy saves, and what it costs where it cannot save.

    python -m benchmarks.policy_cost llama-8b --lengths 16k,64k,126k --out result.json
    python -m benchmarks.policy_cost llama-8b --layers 8 --lengths "" --profile 126k

The weights of a shape are random. Their attention is as diffuse as attention can be: at a recall of 0.95 nearly all
tiles are wanted, so that choosing them cannot pay. No two prompts share a page. Each policy first reads prompts that
are not timed, which compile its kernels: one of the first length, and where tiles are chosen one of each length, of a
small share that is read fast. Policies take turns, so that a warmer GPU favours none of them.

With --profile the kernels of a prompt are listed for each policy, in this process, in place of a server.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import msgspec
import torch
from longreach.bench.launch import described, model_of, served
from longreach.bench.sizes import load_of
from longreach.bench.summary import environment
from longreach.engine.engine import Engine
from longreach.engine.messages import EngineConfig, Failed, Generate, Sampling
from longreach.engine.startup.build import build_engine
from longreach.policies.parse import policy_of
from longreach.policies.values import AttentionPolicy, Dynamic

DENSE = "dense"
POLICIES = (DENSE, "window:4096:4", "dynamic:0.95", '{"policy": "dynamic", "density": 0.1}')
_WARM_SHARE = 0.05
_NAMED = 14  # kernels of a profile
_TIMEOUT = 600.0


def parsed(text: str) -> AttentionPolicy:
    """A policy by its short form or its JSON."""
    return policy_of(json.loads(text) if text.startswith("{") else text).resolve()


def as_field(policy: AttentionPolicy) -> dict[str, Any]:
    """A policy as the field `attention` of a request."""
    return {"policy": policy.name} | {
        name: list(value) if isinstance(value, tuple) else value for name, value in policy.parameters.items()
    }


def warmer(policy: AttentionPolicy) -> AttentionPolicy | None:
    """The policy that launches the same kernels at a length and reads less; None where lengths make no difference."""
    if not isinstance(policy, Dynamic) or not policy.chooses_tiles:
        return None
    given = "recall" if policy.recall is not None else "density"
    return msgspec.structs.replace(policy, **{given: _WARM_SHARE, "speedup": None})


class Prompts:
    """Random prompts, no two of which begin alike."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._generator = torch.Generator().manual_seed(1)

    def of(self, length: int) -> list[int]:
        """The next one."""
        return torch.randint(3, self._vocab_size, (length,), generator=self._generator).tolist()


def first_token(client: httpx.Client, model: str, prompt: list[int], policy: AttentionPolicy) -> dict[str, Any]:
    """Seconds to an answer of one token, and its `usage.attention`.

    Raises:
        httpx.HTTPStatusError: the request was refused or failed.
    """
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "attention": as_field(policy)}
    since = time.perf_counter()
    answer = client.post("/v1/completions", json=body).raise_for_status()
    return {"seconds": time.perf_counter() - since, "usage": answer.json()["usage"].get("attention")}


def measure(
    url: str,
    vocab_size: int,
    lengths: tuple[int, ...],
    texts: list[str],
    turns: int,
    end: float,
    save: Callable[[list[dict[str, Any]]], object],
) -> None:
    """Rows by length and policy, which `save` is given after each turn at a length; no turn after the first begins that
    would not be over at `end`, by the clock of `time.monotonic`."""
    prompts, policies = Prompts(vocab_size), {text: parsed(text) for text in texts}
    times: dict[tuple[int, str], list[float]] = {(length, text): [] for length in lengths for text in texts}
    usages: dict[tuple[int, str], Any] = {}
    with httpx.Client(base_url=url, timeout=_TIMEOUT) as client:
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        for policy in policies.values():
            first_token(client, model, prompts.of(lengths[0]), policy)
        for turn in range(turns):
            for length in lengths:
                took = sum(times[length, text][-1] for text in texts) if turn else 0.0
                if turn and time.monotonic() + took > end:
                    continue
                for text, policy in policies.items():
                    if not turn and (like := warmer(policy)) is not None:
                        first_token(client, model, prompts.of(length), like)
                    found = first_token(client, model, prompts.of(length), policy)
                    times[length, text].append(found["seconds"])
                    usages[length, text] = found["usage"]
                    print(f"{length:>7} {text:<40} {found['seconds']:.3f} s", file=sys.stderr, flush=True)
                rows = [row(*key, found, usages[key], times) for key, found in times.items() if found]
                save(rows)


def row(
    length: int, text: str, found: list[float], usage: dict[str, Any] | None, times: dict[tuple[int, str], list[float]]
) -> dict[str, Any]:
    """What is kept of a policy at a length."""
    median, dense = statistics.median(found), times.get((length, DENSE))
    tiles = None if usage is None else usage["tiles_visited"] + usage["tiles_skipped"]
    return {
        "tokens": length,
        "policy": text,
        "ttft_s": median,
        "all_s": found,
        "of_dense": median / statistics.median(dense) if dense else None,
        "density": None if usage is None else usage["density"],
        "unchosen": usage["tiles_unchosen"] / tiles if usage and tiles and "tiles_unchosen" in usage else None,
        "kept_mass": usage["kept_mass"]["mean"] if usage and usage["kept_mass"] else None,
    }


def profiled(
    target: str, layers: int | None, length: int, texts: list[str], save: Callable[[dict[str, Any]], object]
) -> None:
    """What a GPU computes for the first token under each policy: its kernels by time, and how long it waits."""
    with model_of(target) as model:
        engine, started = build_engine(
            EngineConfig(
                model=model.source,
                random_weights=model.random_weights,
                max_model_len=length + 128,
                max_num_seqs=4,
                kv_cache_bytes=None if torch.cuda.is_available() else 1 << 28,
                hf_overrides={} if layers is None else {"num_hidden_layers": layers},
            )
        )
        prompts = Prompts(started.vocab_size)
        for text in texts:
            policy = parsed(text)
            computed(engine, f"warm {text}", prompts.of(length), policy)
            save(profile_of(engine, text, prompts.of(length), policy))
        engine.close()


def computed(engine: Engine, name: str, prompt: list[int], policy: AttentionPolicy) -> float:
    """Seconds to the first token in this process.

    Raises:
        RuntimeError: the request failed.
    """
    how = Sampling(temperature=0.0)
    asked = Generate(request_id=name, prompt=prompt, max_tokens=1, sampling=how, attention=policy)
    since = time.perf_counter()
    if (failed := engine.submit(asked)) is not None:
        raise RuntimeError(failed.message)
    while engine.has_work:
        for news in engine.step():
            if isinstance(news, Failed):
                raise RuntimeError(news.message)
    return time.perf_counter() - since


def profile_of(engine: Engine, text: str, prompt: list[int], policy: AttentionPolicy) -> dict[str, Any]:
    """The kernels of a prompt, longest first."""
    activities = torch.profiler.ProfilerActivity
    watched = activities.CUDA if torch.cuda.is_available() else activities.CPU
    with torch.profiler.profile(activities=[watched]) as profile:
        seconds = computed(engine, text, prompt, policy)
    kernels = [
        {"name": event.key[:70], "ms": event.self_device_time_total / 1e3, "count": event.count}
        for event in profile.key_averages()
        if event.self_device_time_total > 0
    ]
    kernels.sort(key=lambda kernel: -kernel["ms"])
    busy = sum(kernel["ms"] for kernel in kernels)
    print(f"{len(prompt)} {text}: {1e3 * seconds:.0f} ms, of which the GPU computes {busy:.0f} ms", flush=True)
    for kernel in kernels[:_NAMED]:
        print(f"  {kernel['ms']:9.2f} ms {kernel['count']:6d} x {kernel['name']}", flush=True)
    return {"tokens": len(prompt), "policy": text, "ms": 1e3 * seconds, "busy_ms": busy, "kernels": kernels[:40]}


def table(result: dict[str, Any]) -> str:
    """The rows as Markdown, with what was measured where."""
    lines = [
        ["tokens", "attention", "TTFT (s)", "of dense", "density", "of it not chosen", "mean kept mass", "prompts"]
    ]
    lines.append(["---:", "---", *["---:"] * 6])
    for one in result["rows"]:
        shares = (one[name] for name in ("of_dense", "density", "unchosen", "kept_mass"))
        cells = ["" if share is None else f"{share:.3f}" for share in shares]
        text = f"`{one['policy']}`"
        lines.append([f"{one['tokens']:,}", text, f"{one['ttft_s']:.3f}", *cells, str(len(one["all_s"]))])
    where, model = result["environment"], result["model"]
    caption = f"{model.get('shape') or model['name']}; {where['device']}; torch {where['versions']['torch']}; "
    caption += f"{where['date']}."
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + f"\n\n{caption}\n"


def lengths_of(text: str) -> tuple[int, ...]:
    """Numbers of tokens such as 64k, with commas."""
    return tuple(load_of(lengths=text).lengths)


def main() -> None:
    """Measure, write the JSON after each turn at a length, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.policy_cost", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("target", nargs="?", default="llama-8b", help="a URL, a shape (llama-8b, tiny) or a directory")
    parser.add_argument("--layers", type=int, help="that many layers in place of all")
    parser.add_argument("--lengths", default="16k,64k,126k", help="tokens of the prompts, with commas; none for none")
    parser.add_argument("--policy", action="append", dest="policies", help="short form or JSON; repeat for more")
    parser.add_argument("--turns", type=int, default=3, help="prompts of a length under each policy")
    parser.add_argument("--seconds", type=float, default=1e9, help="no turn but the first begins that ends later")
    parser.add_argument("--vocab-size", type=int, default=32000, help="token ids of the prompts are below this")
    parser.add_argument("--profile", help="tokens of a prompt whose kernels are listed for each policy")
    parser.add_argument("--serve-flags", default="", help="flags of `longreach serve`, in one argument")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server that it has started ends with it
    texts: list[str] = arguments.policies or [*POLICIES]
    lengths = lengths_of(arguments.lengths) if arguments.lengths else ()
    flags = shlex.split(arguments.serve_flags)
    if arguments.layers is not None:
        flags += ["--hf-overrides", json.dumps({"num_hidden_layers": arguments.layers})]
    result: dict[str, Any] = {
        "environment": environment(),
        "model": described(arguments.target),
        "flags": shlex.join(flags),
        "rows": [],
        "kernels": [],
    }

    def save() -> None:
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")

    def keep(rows: list[dict[str, Any]]) -> None:
        result["rows"] = rows
        save()

    def add(profile: dict[str, Any]) -> None:
        result["kernels"].append(profile)
        save()

    if lengths:
        with served(arguments.target, flags) as running:
            print(f"ready after {running.start_s or 0:.1f} s", file=sys.stderr, flush=True)
            measure(running.url, arguments.vocab_size, lengths, texts, arguments.turns, end, keep)
        print(table(result))
    if arguments.profile is not None:
        profiled(arguments.target, arguments.layers, lengths_of(arguments.profile)[0], texts, add)


if __name__ == "__main__":
    main()
