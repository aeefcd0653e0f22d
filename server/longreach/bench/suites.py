"""The suites by name, and running some of them against a server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from longreach.bench.arrivals import arrivals
from longreach.bench.load import Load, Report, fairness, latency, reuse, throughput
from longreach.bench.stream import Target

SUITES: dict[str, Callable[[Target, Load, Report], Awaitable[Any]]] = {
    "latency": latency,
    "throughput": throughput,
    "fairness": fairness,
    "reuse": reuse,
    "arrivals": arrivals,
}


async def measure(
    url: str,
    suites: list[str],
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
        return {suite: await SUITES[suite](target, load, report) for suite in suites}
