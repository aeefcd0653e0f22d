"""Keeping an engine running: the first start, and another engine for each one that dies, up to a point."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from typing import NoReturn

from longreach.api.service.engine_protocol import StartEngine
from longreach.api.service.service import Service
from longreach.engine.errors import EngineDeadError, EngineStartError, HostShortageError

log = logging.getLogger(__name__)

# A machine that is short of descriptors is asked again after so many seconds, then twice as many, up to the last.
_PAUSES = (1.0, 2.0, 4.0, 8.0)

# An engine that has run for so long was sound: its death is the first in a row.
_STEADY_SECONDS = 60.0


async def keep_running(
    service: Service,
    start_engine: StartEngine,
    announce: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Load the model, `announce` that it is ready, and replace engines that die. Ends only by raising.

    Raises:
        ModelFilesError: a file of the model cannot be had or used.
        TokenizerError: the tokenizer cannot be used.
        EngineStartError: the first engine never became ready.
        EngineDeadError: more than `--max-engine-restarts` died one after the other.
    """
    await service.load(start_engine)
    announce()
    with service.replacing():
        await _replace_engines(service, start_engine, clock)


async def _replace_engines(service: Service, start_engine: StartEngine, clock: Callable[[], float]) -> NoReturn:
    deaths, ready_at = 0, clock()
    while True:
        await service.died.wait()
        deaths = 1 if clock() - ready_at >= _STEADY_SECONDS else deaths + 1
        limit = service.settings.max_engine_restarts
        if deaths > limit:
            service.give_up()
            raise EngineDeadError(f"the engine process has died {deaths} times in a row; giving up")
        log.error("the engine process has died; starting another (%d of at most %d in a row)", deaths, limit)
        try:
            await _restart(service, start_engine)
        except EngineStartError as error:
            log.error("the engine cannot start: %s", error)
            continue  # `died` is still set: this counts as another death
        ready_at = clock()
        log.info("ready again")


async def _restart(service: Service, start_engine: StartEngine) -> None:
    """Start another engine, however long the machine is short of what a process takes: that is no engine's death.

    Raises:
        EngineStartError: it never became ready, for another reason.
    """
    pauses = itertools.chain(_PAUSES, itertools.repeat(_PAUSES[-1]))
    while True:
        try:
            await service.restart(start_engine)
        except HostShortageError as error:
            pause = next(pauses)
            log.error("%s; trying again in %.0f s", error, pause)
            await asyncio.sleep(pause)
        else:
            return
