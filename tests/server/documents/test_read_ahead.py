"""A prompt that still comes is read, piece by piece, and its reading ends in success, an error, or a cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
from longreach.api.service.metered_engine import MeteredEngine
from longreach.documents import read_ahead as read_ahead_module
from longreach.documents.read_ahead import ReadAhead
from longreach.engine.errors import QueueFullError, RequestFailedError
from longreach.engine.rope_choice import RopeTable
from longreach.errors import UnavailableError
from longreach.metrics import Metrics
from longreach.policies.values import Dynamic, Window

from tests.server.api.fake_engine import EchoEngine, started

PAGE = CHUNK = 64


class Engines:
    """As `Service`: the engine that there is, or why there is none."""

    def __init__(self) -> None:
        self.metrics = Metrics("owl", lambda: None)
        self.use(EchoEngine())

    def use(self, engine: EchoEngine) -> None:
        self.echo = engine
        self.metered = MeteredEngine(engine, self.metrics)
        self.absent: UnavailableError | None = None
        engine.on_death = lambda: None

    def require_ready(self) -> tuple[MeteredEngine, None]:
        if self.absent is not None:
            raise self.absent
        return self.metered, None

    @property
    def lengths(self) -> list[int]:
        return [len(request.prompt) for request in self.echo.requests]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead_module, "_WITHOUT_ENGINE_SECONDS", 0.002)
    monkeypatch.setattr(read_ahead_module, "_LONGEST_PAUSE", 0.002)
    monkeypatch.setattr(read_ahead_module, "_OF_CHUNK", 1.0)


def run(test: Callable[[Engines], Coroutine[Any, Any, None]]) -> None:
    engines = Engines()
    asyncio.run(asyncio.wait_for(test(engines), 20))
    assert not engines.echo.running
    assert not engines.echo.places


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def test_what_comes_meanwhile_is_read_by_the_next_request() -> None:
    async def test(engines: Engines) -> None:
        echo = engines.echo
        echo.hold_prefill = True
        async with ReadAhead(engines, attention=Window(), cache_salt="salt", caller="anna") as ahead:
            ahead.feed(range(CHUNK - 1))
            await asyncio.sleep(0.01)
            assert not echo.requests  # less than a chunk
            ahead.feed(range(CHUNK - 1, 100))
            await until(lambda: engines.lengths == [PAGE])
            for start in range(100, 700, 100):
                ahead.feed(range(start, start + 100))
            await asyncio.sleep(0.01)
            assert engines.lengths == [PAGE]  # one at a time
            assert ahead.read_tokens == 8  # the first chunk of the fake engine
            echo.hold_prefill = False
            await until(lambda: ahead.read_tokens == 640)
            await ahead.end()
            assert ahead.is_done
        assert engines.lengths == [PAGE, 640]  # whole pages of 700
        last = echo.requests[-1]
        assert (last.prompt, last.max_tokens) == ([*range(640)], 1)
        assert last.flexible
        assert last.sampling.is_greedy
        assert (last.cache_salt, last.attention, last.caller) == ("salt", Window(), "anna")
        assert set(echo.callers) == {"anna"}
        assert len({request.request_id for request in echo.requests}) == 2

    run(test)


def test_a_longer_prompt_grows_by_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead_module, "_OF_PROMPT", 1 / 4)

    async def test(engines: Engines) -> None:
        async with ReadAhead(engines) as ahead:
            for _ in range(100):
                ahead.feed([7] * PAGE)
                await until(lambda: not engines.echo.running)
                await asyncio.sleep(0.001)
            await ahead.end()
        assert len(engines.lengths) < 25
        assert engines.lengths[-1] == 100 * PAGE

    run(test)


def test_nothing_is_read_beyond_the_context() -> None:
    async def test(engines: Engines) -> None:
        engines.use(EchoEngine(started(max_model_len=4 * PAGE)))
        async with ReadAhead(engines) as ahead:
            ahead.feed([7] * 10 * PAGE)
            await until(lambda: ahead.is_done)
            ahead.feed([7])
            await ahead.end()
        assert engines.lengths == [3 * PAGE]  # a fourth page would leave no room for an answer

    run(test)


def test_whole_tiles_are_read_where_keys_are_chosen_for_tiles() -> None:
    async def test(engines: Engines) -> None:
        async with ReadAhead(engines, attention=Dynamic()) as ahead:
            ahead.feed([7] * 5 * PAGE)
            await ahead.end()
        assert engines.lengths == [4 * PAGE]

    run(test)


def test_rotary_tables_go_by_the_length_and_what_another_read_is_read_again() -> None:
    async def test(engines: Engines) -> None:
        tables = [RopeTable(1.0, 256), RopeTable(2.0, 512), RopeTable(4.0, 1024)]
        engines.echo.info = msgspec.structs.replace(engines.echo.info, rope_tables=tables)
        async with ReadAhead(engines) as ahead:
            ahead.feed(range(128))  # and a quarter of 256 for an answer
            await until(lambda: ahead.read_tokens == 128)
            ahead.expect(400)  # as the sender says
            ahead.feed(range(128, 192))
            await until(lambda: ahead.read_tokens == 192)
            ahead.feed(range(192, 520))
            await ahead.end()
        assert [(len(one.prompt), one.rope_factor) for one in engines.echo.requests] == [(128, 1), (192, 2), (512, 4)]
        async with ReadAhead(engines) as ahead:
            ahead.expect(1000)
            ahead.feed(range(64))
            await until(lambda: ahead.read_tokens == 64)
            await ahead.end()  # shorter than was expected: nobody asks under the other table
        assert [(len(one.prompt), one.rope_factor) for one in engines.echo.requests[3:]] == [(64, 4), (64, 1)]

    run(test)


def test_leaving_cancels_what_is_read() -> None:
    async def test(engines: Engines) -> None:
        engines.echo.hold_prefill = True
        async with ReadAhead(engines) as ahead:
            ahead.feed([7] * 3 * PAGE)
            await until(lambda: bool(engines.echo.running))
        assert engines.echo.cancelled == [engines.echo.requests[0].request_id]
        assert len(engines.lengths) == 1

    run(test)


def test_another_engine_reads_everything_again() -> None:
    async def test(engines: Engines) -> None:
        first = engines.echo
        async with ReadAhead(engines) as ahead:
            ahead.feed([7] * 2 * PAGE)
            await until(lambda: ahead.read_tokens == 2 * PAGE)
            first.hold_prefill = True
            ahead.feed([8] * 2 * PAGE)
            await until(lambda: bool(first.running))
            engines.absent = UnavailableError("It is restarted.", code="engine_restarting", retry_after=2)
            first.die()
            await until(lambda: not first.running)
            await asyncio.sleep(0.01)
            engines.use(EchoEngine())
            await ahead.end()
            assert ahead.read_tokens == 4 * PAGE
        assert engines.lengths == [4 * PAGE]

    run(test)


def test_a_queue_that_is_full_is_waited_for() -> None:
    async def test(engines: Engines) -> None:
        engines.echo.full = QueueFullError("too many", retry_after=30)
        async with ReadAhead(engines) as ahead:
            ahead.feed([7] * PAGE)
            await asyncio.sleep(0.01)
            assert not engines.echo.requests
            engines.echo.full = None
            await ahead.end()
        assert engines.lengths == [PAGE]

    run(test)


@pytest.mark.parametrize(
    ("break_it", "error"),
    [
        (lambda engines: setattr(engines.echo, "failure", RequestFailedError("no", "internal")), RequestFailedError),
        (
            lambda engines: setattr(engines, "absent", UnavailableError("It ends.", code="shutting_down")),
            UnavailableError,
        ),
    ],
)
def test_what_cannot_be_read_is_told(break_it: Callable[[Engines], None], error: type[Exception]) -> None:
    async def test(engines: Engines) -> None:
        break_it(engines)
        async with ReadAhead(engines) as ahead:
            ahead.feed([7] * PAGE)
            with pytest.raises(error):
                await ahead.end()
            assert ahead.is_done

    run(test)


def test_what_is_read_counts_by_itself() -> None:
    async def test(engines: Engines) -> None:
        engines.echo.cached = PAGE
        async with ReadAhead(engines) as ahead:
            ahead.feed([7] * 3 * PAGE)
            await ahead.end()
        told = engines.metrics.scrape().decode()
        assert f'longreach:read_ahead_tokens_total{{engine="0",model_name="owl"}} {2.0 * PAGE}' in told
        assert "vllm:request_success_total{" not in told

    run(test)
