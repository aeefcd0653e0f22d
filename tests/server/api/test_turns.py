"""Callers take turns at work that is done a few pieces at a time, and nobody works for those who have left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from longreach.api.service.turns import TooManyWaitingError, Turns


class _Work:
    """Work that goes on until it is told to end, in the order in which it began."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.cancelled: list[str] = []
        self._ends: dict[str, asyncio.Future[str]] = {}

    async def __call__(self, key: str) -> str:
        self.begun.append(key)
        self._ends[key] = asyncio.get_running_loop().create_future()
        try:
            return await self._ends[key]
        except asyncio.CancelledError:
            self.cancelled.append(key)
            raise

    async def end(self, key: str, error: Exception | None = None) -> None:
        if error is None:
            self._ends[key].set_result(key.upper())
        else:
            self._ends[key].set_exception(error)
        await settle()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def run(scenario: Callable[[_Work, Turns[str, str]], Awaitable[None]], **bounds: int) -> None:
    async def main() -> None:
        work = _Work()
        turns = Turns(work, **{"slots": 2, "waiting": 6, "waiting_of_one": 4, **bounds})
        await asyncio.wait_for(scenario(work, turns), 10)
        await turns.stop()
        await settle()
        assert not turns._pieces
        assert not turns._queues
        assert not turns._busy

    asyncio.run(main())


async def ask(turns: Turns[str, str], *wanted: str) -> list[asyncio.Task[str]]:
    """Tasks of `caller:key` each."""
    tasks = []
    for each in wanted:
        caller, _, key = each.partition(":")
        tasks.append(asyncio.create_task(turns.result(key, caller)))
        await settle()
    return tasks


def test_callers_take_turns_each_with_one_piece_at_a_time() -> None:
    async def scenario(work: _Work, turns: Turns[str, str]) -> None:
        tasks = await ask(turns, "alice:a1", "alice:a2", "alice:a3", "bob:b1", "carol:c1", "bob:b2")
        assert work.begun == ["a1", "b1"]
        for key in ("a1", "c1", "b1", "a2", "b2", "a3"):
            await work.end(key)
        assert work.begun == ["a1", "b1", "c1", "a2", "b2", "a3"]
        assert [await task for task in tasks] == ["A1", "A2", "A3", "B1", "C1", "B2"]

    run(scenario)


def test_a_piece_is_done_once_for_all_who_want_it_in_the_turn_of_whoever_is_first() -> None:
    async def scenario(work: _Work, turns: Turns[str, str]) -> None:
        tasks = await ask(turns, "alice:a1", "alice:a2", "alice:same", "bob:same", "bob:same", "carol:same")
        assert work.begun == ["a1", "same"], "bob waits for alice's other pieces"
        await work.end("same")
        await work.end("a1")
        await work.end("a2")
        assert [await task for task in tasks[2:]] == ["SAME"] * 4
        assert work.begun == ["a1", "same", "a2"]

    run(scenario)


def test_what_nobody_waits_for_any_more_is_cancelled_or_never_begun() -> None:
    async def scenario(work: _Work, turns: Turns[str, str]) -> None:
        tasks = await ask(turns, "alice:a1", "alice:a2", "alice:a3", "bob:a2", "carol:a1")
        tasks[0].cancel()
        await settle()
        assert not work.cancelled, "carol waits for it"
        for task in tasks:
            task.cancel()
        await settle()
        assert work.begun == ["a1", "a2"]
        assert sorted(work.cancelled) == ["a1", "a2"]
        [again] = await ask(turns, "alice:a1")
        await work.end("a1")
        assert await again == "A1"

    run(scenario)


def test_a_cancelled_piece_that_has_not_ended_yet_is_not_what_the_next_gets() -> None:
    async def scenario(work: _Work, turns: Turns[str, str]) -> None:
        first = asyncio.create_task(turns.result("a", "alice"))
        await asyncio.sleep(0)  # its work has not begun
        first.cancel()
        await asyncio.sleep(0)
        [second] = await ask(turns, "bob:a")
        await work.end("a")
        assert await second == "A"
        assert first.cancelled()

    run(scenario)


def test_what_fails_fails_for_all_who_want_it_and_frees_its_slot() -> None:
    async def scenario(work: _Work, turns: Turns[str, str]) -> None:
        tasks = await ask(turns, "alice:a", "bob:a", "alice:b")
        await work.end("a", ZeroDivisionError())
        for task in tasks[:2]:
            with pytest.raises(ZeroDivisionError):
                await task
        await work.end("b")
        assert await tasks[2] == "B"

    run(scenario, slots=1)


def test_as_many_wait_as_may_of_one_and_of_all() -> None:
    async def scenario(work: _Work, turns: Turns[str, str]) -> None:
        tasks = await ask(turns, "a:1", "a:2", "a:3", "a:4", "a:5")  # one has begun
        with pytest.raises(TooManyWaitingError):
            await turns.result("6", "a")
        tasks += await ask(turns, "b:10", "b:11", "c:12")
        with pytest.raises(TooManyWaitingError):
            await turns.result("13", "d")
        tasks += await ask(turns, "d:12", "d:1", "a:5")  # what waits already, or has begun, is nothing more
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(scenario)


def test_stopping_cancels_what_has_begun() -> None:
    async def scenario(work: _Work, turns: Turns[str, str]) -> None:
        tasks = await ask(turns, "alice:a", "bob:b")
        await turns.stop()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert sorted(work.cancelled) == ["a", "b"]

    run(scenario)
