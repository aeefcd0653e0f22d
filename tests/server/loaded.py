"""A service as it is once its model is loaded, without the engine."""

from __future__ import annotations

import asyncio
from typing import Any

from longreach.api.service.service import Service
from longreach.config import load_settings
from longreach.engine.messages import EngineConfig

from tests.server.api.fake_engine import EchoEngine, started


def load(**settings: Any) -> tuple[Service, EngineConfig]:
    """A service whose engine is a stub, and what that was told."""
    told: list[EngineConfig] = []

    async def start(config: EngineConfig) -> EchoEngine:
        told.append(config)
        return EchoEngine(started(64))

    async def run() -> Service:
        service = Service(load_settings(**settings))
        await service.load(start)
        return service

    return asyncio.run(run()), told[0]
