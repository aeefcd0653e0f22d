"""A reader that is slow keeps its answer, within bounds; beyond them it loses it, and nobody else does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from longreach.engine import unread as unread_module
from longreach.engine.admission import Admission, Place
from longreach.engine.client import EngineClient
from longreach.engine.engine_connection import EngineConnection
from longreach.engine.errors import EngineDeadError, SlowReaderError
from longreach.engine.messages import (
    LENGTH_BYTES,
    Cancel,
    EngineConfig,
    Generate,
    Sampling,
    encode_frame,
    to_engine_decoder,
)
from longreach.engine.unread import Unread
from longreach.engine.updates import Logprob, Update, Updates
from longreach.util.shared_bytes import SharedBytes


def update(number: int, name: str = "a", **more: Any) -> Update:
    score = Logprob(number, -1.0, [number, 1], [-1.0, -2.0])
    return Update(request_id=name, prompt_tokens=9, computed=number, tokens=[number], logprobs=[score], **more)


def put_many(inbox: Unread) -> None:
    for number in range(1_000):
        inbox.put(update(number))


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def test_nothing_is_lost_of_what_waits() -> None:
    async def main() -> None:
        total = SharedBytes(None)
        inbox = Unread("ann", total)
        for number in range(500):
            inbox.put(update(number, finish_reason="stop" if number == 499 else None))
        read = [await inbox.get()]
        while read[-1].finish_reason is None:
            read.append(await inbox.get())
        assert [one.tokens for one in read[:60]] == [[number] for number in range(60)], "the next come by themselves"
        assert len(read) < 70
        assert [token for one in read for token in one.tokens] == [*range(500)]
        assert [score.token for one in read for score in one.logprobs] == [*range(500)]
        assert read[-1].computed == 499
        assert total.total == 0

    run(main)


def test_what_is_told_once_survives_joining(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread_module, "_AS_THEY_CAME", 1)

    async def main() -> None:
        inbox = Unread("ann", SharedBytes(None))
        scores = [Logprob(number, 0.0) for number in range(4)]
        used: Any = object()
        inbox.put(Update(request_id="a", prompt_tokens=9, computed=4, prompt_logprobs=scores[:2], attention=used))
        inbox.put(Update(request_id="a", prompt_tokens=9, computed=9, prompt_logprobs=scores[2:], decode=used))
        inbox.put(update(9, cached=3))
        read = await inbox.get()
        assert read.prompt_logprobs == scores
        assert (read.attention, read.decode, read.cached, read.tokens) == (used, used, 3, [9])

    run(main)


def test_one_reader_is_bounded_and_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread_module, "MOST_OF_ONE", 20_000)

    async def main() -> None:
        alone, total = SharedBytes(None), SharedBytes(30_000)
        slow, other = Unread("ann", alone), Unread("bob", total)
        with pytest.raises(SlowReaderError):
            put_many(slow)
        assert alone.total == 0, "what nobody can use is let go of"
        with pytest.raises(SlowReaderError, match="bytes of the answer"):
            await slow.get()
        for one in [Unread("ann", total) for _ in range(40)]:
            one.put(update(1))  # the first always fits: whoever reads at once is never refused
        assert total.total > 30_000
        other.put(update(1))
        with pytest.raises(SlowReaderError):
            put_many(other)

    run(main)


def test_errors_come_behind_what_was_told_before() -> None:
    async def main() -> None:
        inbox = Unread("ann", SharedBytes(None))
        inbox.put(update(1))
        inbox.fail(EngineDeadError("gone"))
        assert (await inbox.get()).tokens == [1]
        with pytest.raises(EngineDeadError):
            await inbox.get()

    run(main)


class _Process:
    returncode = None


class _Written:
    def __init__(self) -> None:
        self.messages: list[Any] = []

    def write(self, frame: bytes) -> None:
        self.messages.append(to_engine_decoder.decode(frame[LENGTH_BYTES:]))

    async def drain(self) -> None:
        pass


def test_the_request_of_a_slow_reader_is_cancelled_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread_module, "MOST_OF_ONE", 20_000)

    async def main() -> None:
        reader, written = asyncio.StreamReader(), _Written()
        connection = EngineConnection(_Process(), reader, written)  # type: ignore[arg-type]
        client = EngineClient(EngineConfig(model="m"), connection)
        client._admission = Admission(9, 10**6, 64)
        client._admission.enter({"slow": Place(1), "quick": Place(1)})
        listening = asyncio.create_task(client._listen())

        def request(name: str) -> Generate:
            return Generate(request_id=name, prompt=[1], max_tokens=9, stop_token_ids=[], sampling=Sampling())

        slow, quick = client.generate(request("slow")), client.generate(request("quick"))
        first = asyncio.create_task(anext(slow)), asyncio.create_task(anext(quick))
        await asyncio.sleep(0.01)  # until the client waits for their news
        for number in range(300):
            both = [update(number, "slow"), update(number, "quick")]
            reader.feed_data(encode_frame(Updates(both)))
            got = await anext(quick) if number else await first[1]
            assert got.tokens == [number]
        assert (await first[0]).tokens == [0]
        with pytest.raises(SlowReaderError):
            await anext(slow)
        await quick.aclose()
        assert [one for one in written.messages if isinstance(one, Cancel)] == [Cancel("slow"), Cancel("quick")]
        assert client._unread.total == 0
        listening.cancel()

    run(main)
