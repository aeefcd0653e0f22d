"""How long a server's event loop does one thing, in seconds of its thread's processor: others' load does not count."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

from tests.server.api.conftest import LiveServer


class LoopWatch:
    """Looks at the event loop of a server as often as it lets somebody look.

    Attributes:
        longest: the longest that it was busy between two looks; known when the watch has ended.
        looks: how often it let somebody look.
    """

    def __init__(self, server: LiveServer) -> None:
        self.longest = 0.0
        self.looks = 0
        self._server = server
        self._over = False

    def __enter__(self) -> LoopWatch:
        self._looking = asyncio.run_coroutine_threadsafe(self._look(), self._server.loop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._looking.result(20)

    async def _look(self) -> None:
        last = time.thread_time()
        while not self._over:
            await asyncio.sleep(0.001)
            now = time.thread_time()
            self.longest = max(self.longest, now - last)
            self.looks += 1
            last = now
