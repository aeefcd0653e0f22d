"""The server with the embedded model: a real engine process behind real sockets."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx2
from longreach.api import server as server_module
from longreach.api.service.service import Service
from longreach.config import load_settings
from longreach.engine.client import EngineClient
from longreach.engine.messages import EngineConfig

from tests.server.api.conftest import NO_CERTIFICATES, eventually, openai_client


class EmbeddedServer:
    """As `LiveServer`, with the embedded model on the CPU; leaving it asserts that it was one engine throughout.

    `engine` is the client of the engine's process, without the measurements around it.
    """

    engine: EngineClient

    def __init__(self, **settings: Any) -> None:
        self.service = Service(load_settings(port=0, device="cpu", **settings))
        listener = server_module._bind(self.service.settings)
        self._server = server_module._Server(server_module._uvicorn_config(self.service))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.http = httpx2.Client(base_url=self.url, timeout=60, verify=NO_CERTIFICATES)
        self.openai = openai_client(self.url, timeout=60)
        self._failures: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(listener,), name="embedded-server")

    def __enter__(self) -> EmbeddedServer:
        self._thread.start()
        eventually(lambda: self._server.started or bool(self._failures), timeout=120)
        assert not self._failures, self._failures
        self._pid = self.engine.pid
        return self

    def __exit__(self, *_: object) -> None:
        alive, pid = self.engine.alive, self.engine.pid
        self.http.close()
        self.openai.close()
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._failures, self._failures
        assert alive
        assert pid == self._pid

    @property
    def idle(self) -> bool:
        """Whether no request is in the engine."""
        return not self.engine.requests_in_flight

    def _run(self, listener: Any) -> None:
        async def start(config: EngineConfig) -> EngineClient:
            self.engine = await EngineClient.start(config)
            return self.engine

        async def live() -> None:
            await self.service.load(start)
            await self._server.serve([listener])
            await self.service.stop()

        try:
            asyncio.run(live())
        except BaseException as error:  # noqa: BLE001 - the test asserts that there is none
            self._failures.append(error)
