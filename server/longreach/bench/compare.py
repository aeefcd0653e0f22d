"""`longreach bench latency`, `throughput` and `compare`: one model, one or several contestants, in one run."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from longreach.bench import contestants, shapes
from longreach.bench.contestants import Model, Running
from longreach.bench.load import Load, Report
from longreach.bench.suites import SUITES, measure
from longreach.bench.summary import environment

OURS = "longreach"


def compare(
    target: str,
    peers: list[str],
    suites: list[str],
    load: Load,
    report: Report,
    *,
    flags: list[str] | None = None,
    vllm_packages: Path | None = None,
    vllm_flags: list[str] | None = None,
    save: Callable[[dict[str, Any]], object] | None = None,
) -> dict[str, Any]:
    """Measure `target` (a URL, a shape, a model's directory or hub id) and then each of `peers` with the same load.

    A peer is "vllm", "transformers" (latency alone), or NAME=URL. A shape is served with random weights; `flags` are
    for our own server, `vllm_flags` for vLLM's. After each contestant `save` is given the result so far.

    Returns:
        What goes to JSON: the environment, the model, and a run a contestant: `start_s`, `rows` (latency) and the other
        suites by name.

    Raises:
        ValueError: an argument makes no sense, or a contestant cannot be started or fails.
    """
    _check(target, peers, suites)
    if "vllm" not in peers and (vllm_packages or vllm_flags):
        raise ValueError("vLLM takes no part: name it with --peers vllm, or leave its packages and flags out")
    result: dict[str, Any] = {"environment": environment(), "model": described(target), "runs": []}

    def add(name: str, start_s: float | None, results: dict[str, Any], flags: list[str] | None = None) -> None:
        rows = results.pop("latency", [])
        told = {"flags": shlex.join(flags)} if flags else {}
        result["runs"].append({"name": name, "start_s": start_s, "rows": rows, **results, **told})
        if save is not None:
            save(result)

    with started(target) as model:
        if model is None:
            add(OURS, None, asyncio.run(measure(target, suites, load, report)))
        else:
            with contestants.longreach(model, flags or []) as running:
                add(OURS, running.start_s, _measured(OURS, running, suites, load, report), flags)
        for peer in peers:
            name, _, url = peer.partition("=")
            if url:
                add(name, None, _measured(name, Running(url, None), suites, load, report))
                continue
            assert model is not None
            if name == "transformers":
                report("transformers:")
                rows = contestants.transformers_rows(model, load.lengths, load.repeats, load.max_tokens)
                add("transformers (sdpa)", None, {"latency": rows})
                continue
            longest = max(load.long_prompt if {"fairness", "reuse"} & set(suites) else 0, *load.lengths)
            longest += max(load.max_tokens, load.batch_tokens) + 128
            with contestants.vllm(model, vllm_packages, longest, vllm_flags or []) as running:
                add(name, running.start_s, _measured(name, running, suites, load, report), vllm_flags)
    return result


def _measured(name: str, running: Running, suites: list[str], load: Load, report: Report) -> dict[str, Any]:
    report(f"{name}:" if running.start_s is None else f"{name}: ready after {running.start_s:.1f} s")
    return asyncio.run(measure(running.url, suites, load, report))


def _check(target: str, peers: list[str], suites: list[str]) -> None:
    for suite in suites:
        if suite not in SUITES:
            raise ValueError(f"suites are {', '.join(SUITES)}; got {suite!r}")
    for peer in peers:
        if "=" not in peer and peer not in ("vllm", "transformers"):
            raise ValueError(f"peers are vllm, transformers and NAME=URL; got {peer!r}")
        if "=" not in peer and is_url(target):
            raise ValueError(f"{peer} is started for a model; give a model or a shape in place of {target}")
        if peer == "transformers" and "latency" not in suites:
            raise ValueError("transformers takes part in the latency suite alone; add it, or leave transformers out")


def is_url(target: str) -> bool:
    """Whether a target is a server that runs already."""
    return target.startswith(("http://", "https://"))


def described(target: str) -> dict[str, str]:
    """What goes to JSON about the model."""
    if target in shapes.SHAPES:
        return {"shape": target, "weights": "random", "dtype": "bfloat16"}
    return {"name": target}


@contextlib.contextmanager
def started(target: str) -> Iterator[Model | None]:
    """The model to serve, a shape's in a directory of its own; None where a server runs already."""
    if is_url(target):
        yield None
    elif target in shapes.SHAPES:
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch) / target
            shapes.write(target, directory)
            yield Model(str(directory), random_weights=True)
    else:
        yield Model(target, random_weights=False)
