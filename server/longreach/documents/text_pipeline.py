"""From the bytes of a text, as they come, to token ids in order: cut in the event loop, encoded in several threads."""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections import deque
from typing import NoReturn

from longreach.documents.read_ahead import ReadAhead
from longreach.text.beginning import Beginning
from longreach.text.growing_text import GrowingText, Piece
from longreach.util.work_pool import WorkPool, WorkPoolFullError

# Pieces of one text that are encoded side by side, or wait for it. Each has at least 32K characters.
_SIDE_BY_SIDE = 4
_FULL_SECONDS = 0.05


class TextPipeline:
    """Encodes one text in `pool`, and feeds its ids to `ahead` if there is one. An `async with` ends its work.

    No more of the text is held than a few pieces; `feed` waits where the pool is behind.

    Attributes:
        ids: int32, those that are certain so far.
    """

    def __init__(self, text: GrowingText, pool: WorkPool, *, caller: str = "", ahead: ReadAhead | None = None) -> None:
        self.ids = array("i")
        self._text = text
        self._pool = pool
        self._caller = caller
        self._ahead = ahead
        self._encoding: deque[asyncio.Task[list[int]]] = deque()
        self._error: Exception | None = None
        self._failed = asyncio.Event()

    async def __aenter__(self) -> TextPipeline:
        """Nothing is begun yet."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Give up what is still being encoded."""
        left = [*self._encoding]
        self._encoding.clear()
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def feed(self, text: str) -> None:
        """The text goes on so.

        Raises:
            TooManyTokensError: there are more tokens than there may be.
            UnbrokenTextError: there is no cut in too long a stretch.
        """
        for piece in self._text.cut(text):
            await self._begin(piece)

    async def failed(self) -> NoReturn:
        """Wait until the text cannot be taken, which may be while nothing more comes.

        Raises:
            TooManyTokensError: there are more tokens than there may be.
        """
        await self._failed.wait()
        assert self._error is not None
        raise self._error

    async def settle(self) -> Beginning | None:
        """No more is known of the text, which may go on: all ids that are certain are given out.

        Returns:
            What it is as the beginning of other texts; None where nothing of it is certain.

        Raises:
            TooManyTokensError: there are more tokens than there may be.
        """
        if (piece := self._text.settled()) is not None:
            await self._begin(piece)
        await self._take_down_to(0)
        return self._text.beginning(self.ids[:])

    async def last(self) -> list[int]:
        """The text has ended, after `settle`: its last token ids, which are not given out.

        Raises:
            TooManyTokensError: there are more tokens than there may be.
        """
        while True:
            try:
                size = self._text.held_characters
                return await self._pool.run(self._text.ending(), caller=self._caller, size=size)
            except WorkPoolFullError:
                await asyncio.sleep(_FULL_SECONDS)

    async def _begin(self, piece: Piece) -> None:
        await self._take_down_to(_SIDE_BY_SIDE - 1)
        task = asyncio.create_task(self._encoded(piece))
        self._encoding.append(task)
        task.add_done_callback(self._take)  # also while nothing more comes

    async def _encoded(self, piece: Piece) -> list[int]:
        while True:
            try:
                size = sys.getsizeof(piece.text)
                return await self._pool.call(self._text.encode, piece, caller=self._caller, size=size)
            except WorkPoolFullError:  # what has come of an upload is not lost for that: its sender waits
                await asyncio.sleep(_FULL_SECONDS)

    async def _take_down_to(self, most: int) -> None:
        while len(self._encoding) > most:
            await asyncio.wait([self._encoding[0]])
            self._take()
        if self._error is not None:
            raise self._error

    def _take(self, _: object = None) -> None:
        """Give out the ids of the pieces that are encoded, in their order."""
        while self._encoding and self._encoding[0].done() and not self._encoding[0].cancelled():
            piece = self._encoding.popleft()
            if self._error is not None:
                continue
            try:
                ids = self._text.count(piece.result())
            except Exception as error:  # noqa: BLE001 - raised where more is fed, and by `failed`
                self._error = error
                self._failed.set()
            else:
                self.ids.extend(ids)
                if self._ahead is not None:
                    self._ahead.feed(ids)
