"""What rank 0 knows of the copies that the other ranks were told to make: whether they are made.

Rank 0 asks all of them at once, in the order of what it tells them. Each answers in that order, with one byte.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from longreach.engine.errors import DeviceLostError


class Settling:
    """Questions to ranks 1 to `size` - 1, their answers, and threads that wait for these."""

    def __init__(self, size: int) -> None:
        self._changed = threading.Condition()
        self._asked = 0
        self._answers = [0] * (size - 1)
        self._lost = ""

    def asked(self) -> Callable[[], None]:
        """All ranks are about to be asked. What waits, in any thread, until all have answered.

        It raises `DeviceLostError` where one of them is lost and has not answered.
        """
        self._asked += 1
        number = self._asked

        def wait() -> None:
            with self._changed:
                self._changed.wait_for(lambda: self._lost or min(self._answers) >= number)
                if min(self._answers) < number:
                    raise DeviceLostError(self._lost)

        return wait

    def answered(self, rank: int, count: int) -> None:
        """A rank has answered its next `count` questions."""
        with self._changed:
            self._answers[rank - 1] += count
            assert self._answers[rank - 1] <= self._asked, f"rank {rank} answers what it was not asked"
            self._changed.notify_all()

    def lose(self, reason: str) -> None:
        """A rank is gone: nobody waits for it any longer."""
        with self._changed:
            self._lost = self._lost or reason
            self._changed.notify_all()
