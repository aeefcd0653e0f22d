"""An engine process that says nothing for a while: when it is waited for, and when it is replaced."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import pytest
from longreach.engine.client import EngineClient
from longreach.engine.errors import EngineDeadError

from tests.server.engine.test_process import config, spec, tokens_of


def test_a_stopped_engine_is_seen_at_once_and_replaced_in_the_end(model_dir: Path) -> None:
    async def scenario() -> None:
        client = await EngineClient.start(msgspec.structs.replace(config(model_dir), silence_timeout=3))
        died = asyncio.Event()
        client.on_death = died.set
        assert len(await tokens_of(client, spec("a"))) == 5
        assert client.responsive
        os.kill(client.pid, signal.SIGSTOP)
        stuck = asyncio.create_task(tokens_of(client, spec("b")))
        await asyncio.sleep(2)
        assert not client.responsive
        assert client.alive
        os.kill(client.pid, signal.SIGCONT)
        assert len(await asyncio.wait_for(stuck, 10)) == 5
        assert client.responsive
        os.kill(client.pid, signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await asyncio.wait_for(tokens_of(client, spec("c")), 20)
        await asyncio.wait_for(died.wait(), 5)
        await client.stop()

    asyncio.run(scenario())


SLOW_STEPS = """
import sys, time
from longreach.engine.device import runner
from longreach.engine.startup import engine_process
plain = runner.Runner.launch
def slow(self, plan):
    time.sleep(3)
    return plain(self, plan)
runner.Runner.launch = slow
engine_process.main()
"""


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine processes whose steps take three seconds."""
    plain = asyncio.create_subprocess_exec

    async def start(program: str, *arguments: str, **more: object) -> asyncio.subprocess.Process:
        return await plain(program, "-c", SLOW_STEPS, arguments[-1], **more)  # type: ignore[arg-type]

    monkeypatch.setattr("longreach.engine.engine_connection.asyncio.create_subprocess_exec", start)


@pytest.mark.usefixtures("slow_steps")
def test_an_engine_in_a_long_step_responds(model_dir: Path) -> None:
    async def scenario() -> None:
        client = await EngineClient.start(config(model_dir))
        task = asyncio.create_task(tokens_of(client, spec("a", max_tokens=2)))
        responses = set()
        while not task.done():
            await asyncio.sleep(0.1)
            responses.add(client.responsive)
        assert responses == {True}
        assert len(task.result()) == 2
        await client.stop()

    asyncio.run(scenario())


@pytest.mark.usefixtures("slow_steps")
def test_a_step_without_end_is_ended(model_dir: Path) -> None:
    async def scenario() -> None:
        client = await EngineClient.start(msgspec.structs.replace(config(model_dir), step_timeout=1))
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await asyncio.wait_for(tokens_of(client, spec("a", max_tokens=2)), 10)
        await client.stop()

    asyncio.run(scenario())
