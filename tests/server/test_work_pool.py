"""Work beside the event loop: in steps, bounded, fair by caller, and dropped with its caller."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Generator

import pytest
from longreach.util.work_pool import WorkPool, WorkPoolFullError


def steps(
    name: str,
    count: int,
    order: list[str],
    gate: threading.Event | None = None,
    begun: threading.Event | None = None,
) -> Generator[None, None, str]:
    for _ in range(count):
        if begun is not None:
            begun.set()
        if gate is not None:
            assert gate.wait(10)
        order.append(name)
        yield
    return name


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_results_and_errors_reach_their_callers() -> None:
    async def main() -> None:
        pool = WorkPool("test", 2)
        assert await pool.run(steps("a", 3, [])) == "a"
        assert await pool.call(pow, 2, 5) == 32
        with pytest.raises(ZeroDivisionError):
            await pool.call(divmod, 1, 0)
        assert pool.waiting_bytes == 0
        pool.close()

    asyncio.run(main())


def test_callers_take_turns_and_so_does_the_work_of_each() -> None:
    order: list[str] = []

    async def main() -> None:
        pool, gate = WorkPool("test", 1), threading.Event()
        flood = [asyncio.create_task(pool.run(steps("flood", 50, order, gate), caller="alice")) for _ in range(20)]
        await settle()
        short = asyncio.create_task(pool.run(steps("bob", 2, order), caller="bob"))
        own = asyncio.create_task(pool.run(steps("alice", 1, order), caller="alice"))
        await settle()
        gate.set()
        await asyncio.gather(short, own)
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)

    asyncio.run(main())
    # Bob's two steps alternate with Alice's; her own short work comes once each of her twenty others had a step.
    assert order[: order.index("bob") + 3].count("flood") <= 3
    assert order.index("alice") <= 24


def test_work_whose_caller_has_gone_is_not_begun_and_not_taken_up_again() -> None:
    order: list[str] = []

    async def main() -> None:
        pool, gate, begun = WorkPool("test", 1), threading.Event(), threading.Event()
        running = asyncio.create_task(pool.run(steps("running", 1000, order, gate, begun), size=10))
        waiting = asyncio.create_task(pool.run(steps("waiting", 1, order), size=20))
        await settle()
        assert begun.wait(10)
        assert pool.waiting_bytes == 30
        waiting.cancel()
        running.cancel()
        await settle()
        assert pool.waiting_bytes == 0
        gate.set()
        assert await pool.call(len, "abc") == 3

    asyncio.run(main())
    assert order == ["running"]


def test_what_waits_is_bounded() -> None:
    async def main() -> None:
        pool, gate = WorkPool("test", 1, max_bytes=100), threading.Event()
        large = asyncio.create_task(pool.run(steps("large", 1, [], gate), size=1000))  # an empty pool takes anything
        await settle()
        with pytest.raises(WorkPoolFullError, match="1000 bytes are waiting already"):
            await pool.call(len, "a", size=1)
        gate.set()
        await large
        assert await pool.call(len, "a", size=100) == 1

    asyncio.run(main())


def test_a_process_ends_while_its_pool_is_at_work() -> None:
    """Python's executors would keep it until their work is done."""
    program = """
import asyncio, sys, time
from longreach.util.work_pool import WorkPool

async def main():
    task = asyncio.create_task(WorkPool("test", 1).call(time.sleep, 600))
    await asyncio.sleep(0.05)
    task.cancel()

asyncio.run(main())
print("ended")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "ended\n"
