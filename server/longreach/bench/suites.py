"""Running suites against a server, one that runs already or one that is started."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from longreach.bench.launch import Running, described, served
from longreach.bench.load import Load, Report
from longreach.bench.stream import Target
from longreach.bench.summary import environment

OURS = "longreach"
Suites = Mapping[str, Callable[[Target, Load, Report], Awaitable[Any]]]


async def measure(
    url: str,
    suites: Suites,
    load: Load,
    report: Report,
    *,
    attention: Any = None,
    api_key: str | None = None,
) -> dict[str, Any]:
    """Run some suites against the server at `url`, every request with `attention`; the results by suite.

    Raises:
        ValueError: there is no server, or a request was refused or failed.
    """
    async with Target(url, attention=attention, api_key=api_key) as target:
        return {name: await suite(target, load, report) for name, suite in suites.items()}


def measured(
    name: str, running: Running, suites: Suites, load: Load, report: Report, flags: Sequence[str] = ()
) -> dict[str, Any]:
    """What goes to JSON of one server: its `name`, `start_s`, the `flags` it was started with, `rows` (latency) and the
    other suites by name.

    Raises:
        ValueError: a request was refused or failed.
    """
    report(f"{name}:" if running.start_s is None else f"{name}: ready after {running.start_s:.1f} s")
    results = asyncio.run(measure(running.url, suites, load, report))
    rows = results.pop("latency", [])
    told = {"flags": shlex.join(flags)} if flags else {}
    return {"name": name, "start_s": running.start_s, "rows": rows, **results, **told}


def run(target: str, suites: Suites, load: Load, report: Report, flags: Sequence[str] = ()) -> dict[str, Any]:
    """Measure a server that runs at the URL `target`, or our own, started with `flags` for a model or a shape.

    Returns:
        What goes to JSON: the environment, the model, and a list `runs` with what `measured` gives.

    Raises:
        ValueError: the server cannot be started or reached, or it fails.
    """
    with served(target, flags) as running:
        started = flags if running.start_s is not None else ()
        return {
            "environment": environment(),
            "model": described(target),
            "runs": [measured(OURS, running, suites, load, report, started)],
        }
