"""The whole server process around a fake engine: `serve_fake MODEL PORT SCENARIO [SETTING=VALUE ...]`.

Scenarios: `ok`; `slow_load` (never becomes ready); `bad_load`; `stuck` (no request ends by itself); `dies` (the engine
dies when a request has been running for a moment).
"""

from __future__ import annotations

import asyncio
import sys

import uvloop
from longreach.api.server import configure_logging, serve
from longreach.config import load_settings
from longreach.engine.errors import EngineStartError
from longreach.engine.messages import EngineConfig

from tests.server.api.fake_engine import EchoEngine


async def main(model: str, port: str, scenario: str, *settings: str) -> int:
    """Serve until the end; return the exit status."""

    async def start(config: EngineConfig) -> EchoEngine:
        if scenario == "slow_load":
            await asyncio.sleep(600)
        if scenario == "bad_load":
            raise EngineStartError("model.safetensors is cut short: download it again")
        engine = EchoEngine()
        if scenario in ("stuck", "dies"):
            engine.hold_decode_after = 2
        if scenario == "dies":
            dying = asyncio.create_task(die_when_busy(engine))
            dying.add_done_callback(lambda task: task.result())
        return engine

    async def die_when_busy(engine: EchoEngine) -> None:
        while len(engine.running) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        engine.die()

    configure_logging("info")
    return await serve(load_settings(model=model, port=port, **dict(s.split("=") for s in settings)), start)


if __name__ == "__main__":
    sys.exit(uvloop.run(main(*sys.argv[1:])))
