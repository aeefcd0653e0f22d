"""The engine in its own process: start, stream, cancel, and every way in which either side can go away."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import uvloop
from longreach.engine.admission import Place
from longreach.engine.client import EngineClient, child_environment
from longreach.engine.device.ranks.leader import Ranks
from longreach.engine.errors import (
    EngineDeadError,
    EngineStartError,
    HostShortageError,
    QueueFullError,
    RequestFailedError,
)
from longreach.engine.messages import LENGTH_BYTES, Cancel, EngineConfig, Generate, Sampling, encode_frame
from longreach.engine.startup import engine_process as process

from tests.server.engine.conftest import ids
from tests.server.engine.places import admitted


def config(path: Path) -> EngineConfig:
    return EngineConfig(model=str(path), device="cpu", max_batched_tokens=64, page_size=16)


def spec(name: str, length: int = 20, max_tokens: int = 5) -> Generate:
    return Generate(
        request_id=name, prompt=ids(length, seed=1), max_tokens=max_tokens, sampling=Sampling(temperature=0)
    )


async def tokens_of(client: EngineClient, request: Generate) -> list[int]:
    return [token async for update in admitted(client, request) for token in update.tokens]


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


def test_requests_stream_side_by_side_and_errors_stay_with_their_request(model_dir: Path) -> None:
    async def scenario() -> None:
        client = await EngineClient.start(config(model_dir))
        try:
            assert client.alive
            alone = await tokens_of(client, spec("a"))
            several = await asyncio.gather(*(tokens_of(client, spec(f"b{i}")) for i in range(4)))
            assert several == [alone] * 4
            with pytest.raises(RequestFailedError, match="exceed the context") as failure:
                await tokens_of(client, spec("c", length=1000))
            assert failure.value.kind == "invalid"
            assert await tokens_of(client, spec("d")) == alone
            assert client.requests_in_flight == 0
        finally:
            await client.stop()
        assert not client.alive

    asyncio.run(scenario())


def test_what_exceeds_the_queue_is_refused_and_room_comes_back(model_dir: Path) -> None:
    async def scenario() -> None:
        small = msgspec.structs.replace(config(model_dir), max_queued_requests=2, max_queued_tokens=60)
        client = await EngineClient.start(small)
        try:
            client.admit({"giant": Place(200)})  # an empty queue takes what is longer than the bound
            client.release(["giant", "never was"])
            client.admit({"r0": Place(30)})  # its place is its own, whoever comes before it is sent
            streams = [
                admitted(client, spec("r1", length=30)),
                client.generate(spec("r0", length=30)),
                admitted(client, spec("r2", length=30)),
            ]
            firsts = [asyncio.create_task(anext(stream)) for stream in streams]
            await asyncio.sleep(0)  # two are sent, nothing has been heard of them
            with pytest.raises(QueueFullError, match="2 requests with 60 prompt tokens are waiting") as full:
                client.admit({"x": Place(1)})
            assert full.value.retry_after >= 1
            results = await asyncio.gather(*firsts, return_exceptions=True)
            assert [isinstance(result, QueueFullError) for result in results] == [False, False, True]
            client.admit({"x": Place(1)})
            client.release(["x"])
            client.release(["x"])
            for stream in streams:
                await stream.aclose()
            client.release(["r0"])
            assert client.unread_tokens == 0
            assert len(await tokens_of(client, spec("next"))) == 5
        finally:
            await client.stop()

    asyncio.run(scenario())


def test_a_caller_that_leaves_cancels_its_request(model_dir: Path) -> None:
    async def scenario() -> None:
        client = await EngineClient.start(config(model_dir))
        try:
            stream = admitted(client, spec("long", max_tokens=200))
            async for update in stream:
                if update.tokens:
                    break
            await stream.aclose()
            assert client.requests_in_flight == 0
            # The cancelled request would take two hundred steps; this one shares none of them.
            assert len(await tokens_of(client, spec("next"))) == 5
        finally:
            await client.stop()

    asyncio.run(scenario())


def test_a_killed_engine_ends_every_request_with_an_error(model_dir: Path) -> None:
    async def scenario() -> None:
        client = await EngineClient.start(config(model_dir))
        died = asyncio.Event()
        client.on_death = died.set
        streams = [asyncio.create_task(tokens_of(client, spec(f"r{i}", max_tokens=230))) for i in range(3)]
        await asyncio.sleep(0.05)
        os.kill(client.pid, signal.SIGKILL)
        results = await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), 10)
        assert all(isinstance(result, EngineDeadError) for result in results), results
        await asyncio.wait_for(died.wait(), 5)
        assert not client.alive
        with pytest.raises(EngineDeadError):
            await tokens_of(client, spec("late"))
        await client.stop()

    asyncio.run(scenario())


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

    monkeypatch.setattr("longreach.engine.client.asyncio.create_subprocess_exec", start)


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


def test_what_cannot_be_understood_ends_the_engine_and_its_requests(model_dir: Path) -> None:
    async def scenario() -> None:
        client = await EngineClient.start(config(model_dir))
        died = asyncio.Event()
        client.on_death = died.set
        client._deliver = None  # type: ignore[assignment,method-assign]
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(tokens_of(client, spec("a")), 10)
        await asyncio.wait_for(died.wait(), 5)
        await client.stop()

    asyncio.run(scenario())


def test_a_model_that_cannot_be_loaded_is_reported_in_one_line(tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(EngineStartError, match=r"config\.json: no such file") as failure:
            await EngineClient.start(config(tmp_path))
        assert "\n" not in str(failure.value)

    asyncio.run(scenario())


@pytest.fixture
def few_descriptors() -> Iterator[Callable[[int], None]]:
    """Sets how many more descriptors this process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def allow(more: int) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        free = os.dup(0)  # the lowest that is free: those above are counted as taken
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + more, hard))

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


def open_descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def test_a_rank_without_descriptors_is_an_error_and_ends_the_others(
    tmp_path: Path, few_descriptors: Callable[[int], None]
) -> None:
    before = open_descriptors()
    for more in (0, 1, 2, 4):
        few_descriptors(more)
        with pytest.raises(HostShortageError, match=r"rank [12] cannot be started: Too many open files"):
            Ranks(config(tmp_path), 3)
        few_descriptors(64)
        assert open_descriptors() == before


def test_stop_signals_do_not_end_the_engine_before_its_owner_does(model_dir: Path) -> None:
    async def scenario() -> None:
        client = await EngineClient.start(config(model_dir))
        os.kill(client.pid, signal.SIGTERM)
        os.kill(client.pid, signal.SIGINT)
        os.kill(client.pid, signal.SIGHUP)
        assert len(await tokens_of(client, spec("a"))) == 5
        await client.stop()
        with pytest.raises(ProcessLookupError):
            os.kill(client.pid, 0)

    asyncio.run(scenario())


def test_no_engine_outlives_its_parent(model_dir: Path) -> None:
    owner = textwrap.dedent(f"""
        import asyncio
        from longreach.engine.client import EngineClient, child_environment
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


def test_a_frame_that_says_nothing_ends_the_engine() -> None:
    """Its owner then tells every request; an engine that hears no more would keep them waiting for ever."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        frame = encode_frame(Cancel("a"))
        ours.sendall(frame + frame[:LENGTH_BYTES] + b"\xc1" * (len(frame) - LENGTH_BYTES))
        inbox: process.Inbox = queue.SimpleQueue()
        with pytest.raises(msgspec.DecodeError):
            process._read(theirs, inbox)
        assert inbox.get_nowait() == Cancel("a")
        assert inbox.get_nowait() is None
