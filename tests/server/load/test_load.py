"""The scenarios in small, on the embedded model: `make soak` runs them in large."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.server.load import scenarios, slow_reading
from tests.server.load.process import ServerProcess


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """One server for all scenarios that it survives: what one leaves behind, the next finds."""
    with ServerProcess(*scenarios.ARGUMENTS, "--shutdown-grace-seconds", "1") as process:
        process.until_ready()
        yield process


def test_streams_are_held(server: ServerProcess) -> None:
    asyncio.run(scenarios.hold(server, 16))


def test_clients_that_leave(server: ServerProcess) -> None:
    result = asyncio.run(scenarios.storm(server, 60, seconds=1.5))
    assert result["ends"]["cut"] > 10


def test_readers_that_do_not_read(server: ServerProcess) -> None:
    asyncio.run(scenarios.slow_readers(server, 20, tokens=100))


def test_readers_that_read_slowly() -> None:
    result = asyncio.run(slow_reading.trickling_readers(20, tokens=200, bytes_per_second=16384))
    assert result["seconds"] > result["bytes_each"] / 16384 / 2, "they were not slow"


def test_headers_without_an_end(server: ServerProcess) -> None:
    assert asyncio.run(scenarios.slowloris(server, 50))["seconds_held_at_most"] < 10


def test_an_engine_that_is_stopped(server: ServerProcess) -> None:
    asyncio.run(scenarios.engine_stopped(server))


def test_an_engine_that_is_killed(server: ServerProcess) -> None:
    asyncio.run(scenarios.engine_killed(server, 8))


def test_memory_and_ends_of_many_requests(server: ServerProcess) -> None:
    result = asyncio.run(scenarios.steady(server, 60))
    assert result["ends"]["cut"] > 0


def test_sigterm(server: ServerProcess) -> None:
    asyncio.run(scenarios.terminated(server, 8))
    assert "Traceback" not in server.log


def test_a_server_that_is_killed_leaves_no_engine() -> None:
    with ServerProcess(*scenarios.ARGUMENTS) as process:
        process.until_ready()
        asyncio.run(scenarios.api_killed(process))
