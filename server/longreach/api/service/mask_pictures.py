"""Pictures of static policies: the masks that the kernels use, drawn and counted, in a process of their own.

What is drawn needs torch, which this process does not hold, and takes processor time, which its event loop does not
have. The process is started with the first picture and serves one at a time; what it takes is bounded, since long
sequences are sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from longreach.api.schema.answers.attention_policies import MaskPicture
from longreach.api.service.turns import TooManyWaitingError, Turns
from longreach.errors import OverloadedError, UnavailableError
from longreach.policies.values import AttentionPolicy
from longreach.sizes import TILE
from longreach.util.descriptors import require_descriptors
from longreach.util.safe_path import environment

log = logging.getLogger(__name__)

MAX_LENGTH = 2**22
MAX_CELLS = 128

_MOST_WAITING = 32
_MOST_OF_ONE = 16
_REMEMBERED = 64
_RETRY_AFTER = 2
_TRIES = 2
# Rows of tiles that are counted: all of up to 128K positions. Beyond, so many are a sample, evenly spread, and the
# fewer the longer they are.
_COUNTED_ROWS = 1024
_COUNTED_TILES = 1 << 22


class MaskPictures:
    """Draws masks; `stop` ends the process."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._turns = Turns(self._remember, slots=1, waiting=_MOST_WAITING, waiting_of_one=_MOST_OF_ONE)
        self._known: OrderedDict[tuple[AttentionPolicy, int], tuple[MaskPicture, bytes]] = OrderedDict()

    async def draw(self, policy: AttentionPolicy, length: int, caller: str) -> tuple[MaskPicture, bytes]:
        """The picture of a policy over a prompt of `length` tokens, as numbers and as PNG; callers take turns.

        Raises:
            OverloadedError: too many pictures are asked for at once.
            UnavailableError: there is no process to draw it, or two have ended while they drew it.
        """
        name = policy, length
        if name in self._known:
            self._known.move_to_end(name)
            return self._known[name]
        try:
            return await self._turns.result(name, caller)
        except TooManyWaitingError:
            raise OverloadedError("Too many masks are being drawn.", _RETRY_AFTER, code="busy_drawing") from None

    async def _remember(self, name: tuple[AttentionPolicy, int]) -> tuple[MaskPicture, bytes]:
        self._known[name] = drawn = await self._run(*name)
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return drawn

    async def _run(self, policy: AttentionPolicy, length: int) -> tuple[MaskPicture, bytes]:
        for _ in range(_TRIES):  # the process may have been killed for somebody else's memory, and long ago
            try:
                return await self._submit(policy, length)
            except BrokenProcessPool:
                self._pool = None  # the next picture gets another process
                log.warning("the process that draws masks ended; it was to draw %s of %d tokens", policy.name, length)
        raise UnavailableError(
            "The process that draws masks ended twice at this one; it may need more memory than there is.",
            code="drawing_failed",
            retry=False,
        )

    def _submit(self, policy: AttentionPolicy, length: int) -> asyncio.Future[tuple[MaskPicture, bytes]]:
        before = set(multiprocessing.active_children())
        try:
            with _safe_environment():
                if self._pool is None:
                    require_descriptors()
                    context = multiprocessing.get_context("spawn")  # a fork would copy this process's threads' locks
                    self._pool = ProcessPoolExecutor(1, context, initializer=_leave_signals_to_the_owner)
                return asyncio.get_running_loop().run_in_executor(self._pool, picture, policy, length)
        except BrokenProcessPool:
            raise
        except (OSError, RuntimeError) as error:  # no descriptor, process or thread is left
            self.stop()
            for process in set(multiprocessing.active_children()) - before:  # nobody would ever end it
                process.kill()
            log.warning("the process that draws masks cannot be started: %s", error)
            raise UnavailableError(
                "The process that draws masks cannot be started now.", code="drawing_failed", retry_after=_RETRY_AFTER
            ) from None

    def stop(self) -> None:
        """End the process, if it was ever started."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


@contextlib.contextmanager
def _safe_environment() -> Iterator[None]:
    """This process's environment is `safe_path`'s: `multiprocessing` starts its children in it, by `python -c`."""
    changed = {name: value for name, value in environment(os.environ).items() if os.environ.get(name) != value}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _leave_signals_to_the_owner() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def picture(policy: AttentionPolicy, length: int) -> tuple[MaskPicture, bytes]:
    """Draw and count a policy's mask; runs in the process of its own."""
    from longreach_kernels.masks.draw import grey_png
    from longreach_kernels.masks.tile_counts import sampled_coverage, tile_count

    from longreach.policies.masks import mask_of

    mask = mask_of(policy)
    tiles = -(-length // TILE)
    rows = min(_COUNTED_ROWS, _COUNTED_TILES // tiles)
    count = tile_count(mask, 0, length, most_rows=rows)
    cells = sampled_coverage(mask, length, size=MAX_CELLS)
    total = tiles * (tiles + 1) // 2
    share = count.tiles / count.causal_tiles
    told = MaskPicture(
        policy=policy.name,
        parameters=policy.parameters,
        length=length,
        block=TILE,
        exact=tiles <= rows,
        density=count.density,
        tiles_visited=round(share * total),
        tiles_total=total,
        flops_saved_share=1 - share,
        grid=(cells * 100).round().int().tolist(),
    )
    return told, grey_png(cells)
