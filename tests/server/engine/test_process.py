"""The engine in its own process: stream, cancel, and the ways in which either side can go away."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import socket
from pathlib import Path

import msgspec
import pytest
from longreach.engine.admission import Place
from longreach.engine.client import EngineClient
from longreach.engine.errors import (
    EngineDeadError,
    EngineStartError,
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
            looks = await asyncio.gather(*(client.look(spec("e", length=50).prompt, salt) for salt in ("", "s")))
            assert [(found.total, found.gpu) for found in looks] == [(50, 16), (50, 0)], (
                "one page of 16 tokens is cached"
            )
            assert looks[1].seconds_alone is not None
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
