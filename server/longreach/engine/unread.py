"""Updates that their reader has not taken yet: bounded, since the engine never waits for a reader."""

from __future__ import annotations

import asyncio
from collections import deque

import msgspec

from longreach.engine.errors import EngineError, SlowReaderError
from longreach.engine.updates import Logprob, Update
from longreach.util.shared_bytes import SharedBytes

# So many updates wait as they came. Those of a reader that is further behind are joined, which changes no answer: by
# itself an update takes ten times the bytes of its token.
_AS_THEY_CAME = 64
# Bytes of what one reader may leave unread, and all of them. The first are 1.6 million tokens, or a hundred thousand
# with five log-probabilities each.
MOST_OF_ONE = 64 << 20
MOST_OF_ALL = 512 << 20

_UPDATE_BYTES, _TOKEN_BYTES, _LOGPROB_BYTES, _TOP_BYTES = 512, 40, 200, 70


class Unread:
    """The updates of one request, or the error that it ends with; `total` counts their bytes under `caller`."""

    def __init__(self, caller: str, total: SharedBytes) -> None:
        self._caller = caller
        self._total = total
        self._updates: deque[tuple[Update, int]] = deque()
        self._bytes = 0
        self._error: EngineError | None = None
        self._news = asyncio.Event()

    def put(self, update: Update) -> None:
        """Another update has come. Of a reader that would leave too much, all are dropped.

        Raises:
            SlowReaderError: it would. Reading raises it, too.
        """
        size = _size(update)
        if self._bytes + size > MOST_OF_ONE or (self._updates and not self._total.fits(self._caller, size)):
            error = SlowReaderError(self._bytes)
            self.fail(error)
            raise error
        if len(self._updates) >= _AS_THEY_CAME:
            last, of_last = self._updates.pop()
            self._updates.append((_joined(last, update), of_last + size - _UPDATE_BYTES))
            size -= _UPDATE_BYTES
        else:
            self._updates.append((update, size))
        self._count(size)
        self._news.set()

    def fail(self, error: EngineError) -> None:
        """The request has ended in an error. What a slow reader has not read is of no use to it."""
        self._error = error
        if isinstance(error, SlowReaderError):
            self.close()
        self._news.set()

    async def get(self) -> Update:
        """The next update.

        Raises:
            EngineError: the request has ended in it, and nothing is left before.
        """
        while not self._updates:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        update, size = self._updates.popleft()
        self._count(-size)
        return update

    def close(self) -> None:
        """Let go of what is left."""
        self._updates.clear()
        self._count(-self._bytes)

    def _count(self, size: int) -> None:
        self._bytes += size
        self._total.add(self._caller, size)


def _joined(first: Update, second: Update) -> Update:
    """Two updates as one, whose lists are those of the first."""
    for name in ("tokens", "logprobs", "prompt_logprobs", "attended"):
        getattr(first, name).extend(getattr(second, name))
    return msgspec.structs.replace(
        second,
        tokens=first.tokens,
        logprobs=first.logprobs,
        prompt_logprobs=first.prompt_logprobs,
        attended=first.attended,
        attention=second.attention or first.attention,
        decode=second.decode or first.decode,
    )


def _size(update: Update) -> int:
    """About what an update takes."""
    scores = _scores(update.logprobs) + _scores(update.prompt_logprobs)
    blocks = sum(len(told.blocks) for told in update.attended)
    return _UPDATE_BYTES + _TOKEN_BYTES * len(update.tokens) + scores + _TOP_BYTES * blocks


def _scores(scores: list[Logprob]) -> int:
    return len(scores) * (_LOGPROB_BYTES + _TOP_BYTES * len(scores[0].top_tokens)) if scores else 0
