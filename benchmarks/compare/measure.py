"""One model, several contestants, one run: ours is measured first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longreach.bench.launch import Model, Running, described, is_url, longreach, model_of
from longreach.bench.load import Load, Report
from longreach.bench.suites import OURS, Suites, measured
from longreach.bench.summary import environment

from benchmarks.compare import contestants
from benchmarks.compare.suites import SUITES


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
    runs: list[dict[str, Any]] = []
    result: dict[str, Any] = {"environment": environment(), "model": described(target), "runs": runs}
    chosen = {name: SUITES[name] for name in suites}

    def add(run: dict[str, Any]) -> None:
        runs.append(run)
        if save is not None:
            save(result)

    if is_url(target):
        add(measured(OURS, Running(target, None), chosen, load, report))
        for peer in peers:
            add(_at_url(peer, chosen, load, report))
        return result
    with model_of(target) as model:
        with longreach(model, flags or []) as running:
            add(measured(OURS, running, chosen, load, report, flags or []))
        for peer in peers:
            if "=" in peer:
                add(_at_url(peer, chosen, load, report))
            elif peer == "transformers":
                report("transformers:")
                rows = contestants.transformers_rows(model, load.lengths, load.repeats, load.max_tokens)
                add({"name": "transformers (sdpa)", "start_s": None, "rows": rows})
            else:
                with _vllm(model, suites, load, vllm_packages, vllm_flags or []) as running:
                    add(measured(peer, running, chosen, load, report, vllm_flags or []))
    return result


def _at_url(peer: str, chosen: Suites, load: Load, report: Report) -> dict[str, Any]:
    name, _, url = peer.partition("=")
    return measured(name, Running(url, None), chosen, load, report)


def _vllm(
    model: Model, suites: list[str], load: Load, packages: Path | None, flags: list[str]
) -> contextlib.AbstractContextManager[Running]:
    longest = max(load.long_prompt if {"fairness", "reuse"} & set(suites) else 0, *load.lengths)
    return contestants.vllm(model, packages, longest + max(load.max_tokens, load.batch_tokens) + 128, flags)


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
