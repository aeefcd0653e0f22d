"""The scenarios in large: `python -m tests.server.load.soak [--out results.json] [SCENARIO ...]`; `make soak` runs it.

Each result is written when it is there. What a scenario must show is asserted in it; the first that fails ends the run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from longreach import __version__

from tests.server.load import scenarios, slow_reading
from tests.server.load.process import ServerProcess

Scenario = Callable[[ServerProcess], Coroutine[Any, Any, dict[str, Any]]]

# In this order, on one server up to the one that ends it.
SCENARIOS: dict[str, Scenario] = {
    "hold": lambda server: scenarios.hold(server, 64),
    "storm": lambda server: scenarios.storm(server, 1000, seconds=30),
    "slowloris": lambda server: scenarios.slowloris(server, 500),
    "overload": lambda server: scenarios.overload(server, 2.0),
    "stopped": scenarios.engine_stopped,
    "engine_killed": lambda server: scenarios.engine_killed(server, 32),
    "steady": lambda server: scenarios.steady(server, 10_000),
    "slow_readers": lambda server: scenarios.slow_readers(server, 200, tokens=50),
    "blocked_readers": lambda server: scenarios.slow_readers(server, 16, tokens=1000),
    "trickling_readers": lambda _: slow_reading.trickling_readers(200, tokens=1000, bytes_per_second=512),
    "long_prefill": lambda _: scenarios.long_prefill(40_000),
    "terminated": lambda server: scenarios.terminated(server, 64),
    "api_killed": scenarios.api_killed,
}
MAX_MB_PER_1000_REQUESTS = 1.0


def main() -> None:
    """Run the scenarios that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenario", nargs="*", choices=[*SCENARIOS, []])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {
        "longreach": __version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "server": " ".join(scenarios.ARGUMENTS),
        "scenarios": {},
    }
    if options.scenario and options.out is not None and options.out.exists():
        results["scenarios"] = json.loads(options.out.read_text())["scenarios"]  # some are run again, the rest stays
    server: ServerProcess | None = None
    try:
        for name in options.scenario or SCENARIOS:
            if server is None or server.process.poll() is not None:
                server = ServerProcess(*scenarios.ARGUMENTS, "--shutdown-grace-seconds", "2")
                server.until_ready()
            start = time.monotonic()
            result = asyncio.run(SCENARIOS[name](server))
            print(f"{name}: {time.monotonic() - start:.0f} s: {result}", flush=True)  # noqa: T201
            assert result.get("mb_per_1000_requests", 0) < MAX_MB_PER_1000_REQUESTS, "memory grows"
            results["scenarios"][name] = result
            if options.out is not None:
                options.out.write_text(json.dumps(results, indent=1) + "\n")
    finally:
        if server is not None:
            server.__exit__()


if __name__ == "__main__":
    main()
