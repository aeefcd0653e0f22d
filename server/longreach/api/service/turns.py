"""Work that many callers want done, a few pieces at a time: callers take turns, and a piece is done once for all."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class TooManyWaitingError(Exception):
    """A piece was not taken, since too many wait."""


@dataclass(eq=False)
class _Piece(Generic[K, T]):
    """A piece of work: who waits for it, how often; its result; and its task, once it has begun."""

    key: K
    done: asyncio.Future[T]
    wanted: Counter[str] = field(default_factory=Counter)
    task: asyncio.Task[T] | None = None


class Turns(Generic[K, T]):
    """Runs `work(key)`, at most `slots` pieces at once and one of each caller.

    At most `waiting` pieces wait, and `waiting_of_one` of a caller. A piece goes on as long as anybody waits for it.
    Who comes while another caller's many pieces wait is next but for those of other callers.
    """

    def __init__(
        self, work: Callable[[K], Coroutine[Any, Any, T]], *, slots: int, waiting: int, waiting_of_one: int
    ) -> None:
        self._work = work
        self._slots = slots
        self._most_waiting = waiting
        self._most_of_one = waiting_of_one
        self._pieces: dict[K, _Piece[K, T]] = {}
        self._queues: OrderedDict[str, dict[K, _Piece[K, T]]] = OrderedDict()  # of pieces that have not begun
        self._busy: set[str] = set()  # whose turn each running piece is

    async def result(self, key: K, caller: str) -> T:
        """The result of `work(key)`; what it raises is raised. Cancelling this cancels the work nobody else waits for.

        Raises:
            TooManyWaitingError: too many pieces wait, of all or of this caller.
        """
        piece = self._pieces.get(key)
        if piece is None or (piece.task is None and caller not in piece.wanted):
            waiting = sum(piece.task is None for piece in self._pieces.values())
            of_one = len(self._queues.get(caller, ()))
            if of_one >= self._most_of_one or (piece is None and waiting >= self._most_waiting):
                raise TooManyWaitingError
        if piece is None:
            piece = self._pieces[key] = _Piece(key, asyncio.get_running_loop().create_future())
        piece.wanted[caller] += 1
        if piece.task is None:
            self._queues.setdefault(caller, {})[key] = piece
            self._begin()
        try:
            return await asyncio.shield(piece.done)
        finally:
            self._left(piece, caller)

    async def stop(self) -> None:
        """Cancel all work that has begun, and wait until it has ended."""
        tasks = [piece.task for piece in self._pieces.values() if piece.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _left(self, piece: _Piece[K, T], caller: str) -> None:
        piece.wanted[caller] -= 1
        if piece.wanted[caller]:
            return
        del piece.wanted[caller]
        self._unqueue(piece, caller)
        if not piece.wanted:
            self._forget(piece)
            if piece.task is not None:
                piece.task.cancel()

    def _begin(self) -> None:
        """Begin pieces as long as there are slots, of the callers in turn."""
        while len(self._busy) < self._slots:
            caller = next((caller for caller in self._queues if caller not in self._busy), None)
            if caller is None:
                return
            piece = next(iter(self._queues[caller].values()))
            for other in piece.wanted:
                self._unqueue(piece, other)
            self._busy.add(caller)
            piece.task = asyncio.create_task(self._work(piece.key))
            piece.task.add_done_callback(partial(self._ended, piece, caller))

    def _ended(self, piece: _Piece[K, T], caller: str, task: asyncio.Task[T]) -> None:
        self._busy.remove(caller)
        if caller in self._queues:
            self._queues.move_to_end(caller)
        self._forget(piece)
        if task.cancelled():
            piece.done.cancel()
        elif (error := task.exception()) is None:
            piece.done.set_result(task.result())
        elif piece.wanted:
            piece.done.set_exception(error)
        self._begin()

    def _unqueue(self, piece: _Piece[K, T], caller: str) -> None:
        queue = self._queues.get(caller, {})
        queue.pop(piece.key, None)
        if not queue:
            self._queues.pop(caller, None)

    def _forget(self, piece: _Piece[K, T]) -> None:
        if self._pieces.get(piece.key) is piece:
            del self._pieces[piece.key]
