"""What an engine process has of the one that starts it: environment, descriptors, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import uvloop
from longreach.engine.client import EngineClient
from longreach.engine.device.ranks.leader import Ranks
from longreach.engine.engine_connection import child_environment
from longreach.engine.errors import (
    EngineStartError,
    HostShortageError,
)
from longreach.engine.messages import EngineConfig

from tests.server.engine.test_process import config


def test_threads_of_an_engine_wait_briefly_unless_told_otherwise(model_dir: Path) -> None:
    assert child_environment({"PATH": "x"}) == {"PATH": "x", "GOMP_SPINCOUNT": "5000"}
    for chosen in ({"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "ACTIVE"}):
        assert child_environment(chosen) == chosen

    async def scenario() -> bytes:
        client = await EngineClient.start(EngineConfig(model=str(model_dir), device="cpu"))
        try:
            return await asyncio.to_thread(Path(f"/proc/{client.pid}/environ").read_bytes)
        finally:
            await client.stop()

    expected = child_environment(os.environ)
    variables = dict(entry.split("=", 1) for entry in asyncio.run(scenario()).decode().split("\0") if entry)
    assert variables.get("GOMP_SPINCOUNT") == expected.get("GOMP_SPINCOUNT")


@pytest.fixture
def few_descriptors() -> Iterator[Callable[[int], None]]:
    """Sets how many more descriptors this process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def allow(more: int) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        # The limit is a number, and tests before this one may have left gaps among the numbers that are taken.
        free = [number for number in range(min(soft, 4096)) if not is_open(number)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[more], hard))

    yield allow
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_an_engine_without_descriptors_is_an_error_that_leaves_none_open(
    tmp_path: Path, few_descriptors: Callable[[int], None], run: Callable[..., None]
) -> None:
    async def scenario() -> None:
        few_descriptors(64)
        process = await asyncio.create_subprocess_exec("true")  # what a loop opens with its first child stays open
        await process.wait()
        before = open_descriptors()
        more = 0
        for more in range(20):
            few_descriptors(more)
            with pytest.raises(EngineStartError) as failed:
                await EngineClient.start(config(tmp_path / "none"))
            few_descriptors(64)
            if not isinstance(failed.value, HostShortageError):
                break
            assert "the engine process cannot be started: Too many open files; raise the limit" in str(failed.value)
            assert open_descriptors() == before
        assert 2 < more < 19, "there was no shortage, or never an end of it"

    run(scenario())


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def open_descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def test_a_rank_without_descriptors_is_an_error_and_ends_the_others(
    tmp_path: Path, few_descriptors: Callable[[int], None]
) -> None:
    before = open_descriptors()
    for more in (0, 1, 2, 4):
        few_descriptors(more)
        for disk in (None, str(tmp_path)):
            with pytest.raises(HostShortageError, match=r"rank [12] cannot be started: Too many open files"):
                Ranks(msgspec.structs.replace(config(tmp_path), kv_disk=disk), 3)
        few_descriptors(64)
        assert open_descriptors() == before


def test_no_engine_outlives_its_parent(model_dir: Path) -> None:
    owner = textwrap.dedent(f"""
        import asyncio
        from longreach.engine.client import EngineClient
        from longreach.engine.messages import EngineConfig

        async def main():
            client = await EngineClient.start(EngineConfig(model={str(model_dir)!r}, device="cpu"))
            print(client.pid, flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
    """)
    with subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        engine = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 10
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(engine, 0)
            if Path(f"/proc/{engine}/stat").read_text().split()[2] == "Z":
                break  # dead, and waiting for an init process that does not collect it
            time.sleep(0.1)
        else:
            pytest.fail("the engine is still there ten seconds after its parent was killed")
