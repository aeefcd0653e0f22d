"""The whole server process around a fake engine: `serve_fake MODEL PORT SCENARIO [SETTING=VALUE ...]`.

Scenarios: `ok`; `slow_load` (never becomes ready); `bad_load`; `stuck` (no request ends by itself). In the others the
first engine is stuck, too, and dies when two requests have been running for a moment: `dies_once` (the next is sound),
`short_once` (so is the next, after a shortage of descriptors), `never_again` (no other can start), `dies` (the next
ones are stuck, too, and die when they have just started).
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import sys

import uvloop
from longreach.api.server import serve
from longreach.api.service.output_pipe import unblocked_output
from longreach.config import load_settings
from longreach.engine.errors import EngineStartError, not_started
from longreach.engine.messages import EngineConfig
from longreach.util.log_lines import configure_logging

from tests.server.api.fake_engine import EchoEngine

log = logging.getLogger(__name__)

DYING = ("dies_once", "short_once", "never_again", "dies")


async def main(model: str, port: str, scenario: str, *settings: str) -> int:
    """Serve until the end; return the exit status."""
    count = itertools.count(1)

    async def start(config: EngineConfig) -> EchoEngine:
        number = next(count)
        log.info("engine %d starts", number)
        if scenario == "slow_load":
            await asyncio.sleep(600)
        if scenario == "bad_load" or (scenario == "never_again" and number > 1):
            raise EngineStartError("model.safetensors is cut short: download it again")
        if scenario == "short_once" and number == 2:
            raise not_started("the engine process", OSError(errno.EMFILE, "Too many open files"))
        engine = EchoEngine()
        if scenario == "dies" or (number == 1 and scenario in ("stuck", *DYING)):
            engine.hold_decode_after = 2
        if scenario == "dies" or (number == 1 and scenario in DYING):
            dying = asyncio.create_task(die(engine, when_running=2 if number == 1 else 0))
            dying.add_done_callback(lambda task: task.result())
        return engine

    async def die(engine: EchoEngine, when_running: int) -> None:
        while len(engine.running) < when_running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        engine.die()

    configure_logging("info")
    return await serve(load_settings(model=model, port=port, **dict(s.split("=") for s in settings)), start)


if __name__ == "__main__":
    with unblocked_output(buffer_bytes=1 << 16):
        status = uvloop.run(main(*sys.argv[1:]))
    sys.exit(status)
