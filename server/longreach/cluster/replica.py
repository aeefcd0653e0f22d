"""A replica: today's server without its socket. One engine, watched as ever; requests come through Serve.

Ray imports this class on a worker. What the HTTP application sends goes back as it is, message by message.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator
from typing import Any

from ray import serve
from starlette.types import Message

from longreach.api.app import create_app
from longreach.api.service.service import Phase, Service
from longreach.api.service.supervisor import keep_running
from longreach.cluster.forwarded import Forwarded
from longreach.cluster.prompt_key import PromptKey
from longreach.config import Settings
from longreach.engine.client import EngineClient
from longreach.util.log_lines import configure_logging

log = logging.getLogger(__name__)

# For what a request that was given up holds; the engine is told at once.
_ENDING_SECONDS = 10.0
# Of a report, which goes to every ingress each second: some 10 KB.
_RECENT_DIGESTS = 1024


class Replica:
    """One engine and the application in front of it. `settings` are the fields of `longreach.config.Settings`.

    Raises, when it is made:
        ConfigError: a setting is wrong on this host, such as a path that is not there.
        ModelFilesError, TokenizerError, EngineStartError: the model cannot be served.
    """

    async def __init__(self, settings: dict[str, Any]) -> None:
        self._name = serve.get_replica_context().replica_id.unique_id
        self._recent: OrderedDict[int, None] = OrderedDict()
        # The next request of a conversation may go to another replica, so none keeps it.
        self._settings = Settings(**settings).model_copy(update={"responses_store": "none", "documents": "none"})
        configure_logging(self._settings.log_level, self._settings.log_format)
        self._service = Service(self._settings)
        self._app = create_app(self._service)
        self._resources = contextlib.AsyncExitStack()
        await self._resources.enter_async_context(self._app.router.lifespan_context(self._app))
        loaded = asyncio.Event()
        self._running = asyncio.create_task(keep_running(self._service, EngineClient.start, loaded.set))
        waiting = asyncio.create_task(loaded.wait())
        await asyncio.wait((self._running, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._running.done():
            await self._resources.aclose()
            self._running.result()
        engine, _ = self._service.require_ready()
        info = engine.info
        log.info("loaded %s on %s; KV cache: %d tokens", self._settings.name, info.device, info.kv_tokens)
        log.info("attention: %s (%s)", info.attention_backend, info.backend_reason)

    async def answer(self, request: Forwarded) -> AsyncGenerator[list[Message], None]:
        """Yield what the application sends, as many messages at a time as are there. The first list is empty: it says
        that the request has been taken. Otherwise it has the one message `longreach.declined`, with the replica's name.

        A replica without an engine would be done with requests soonest, and so draw all of them before its report
        says what it is; those that carry a prompt it declines, and the ingress asks another.

        Closing the generator is what a caller's departure is to the application.
        """
        if request.scope["method"] == "POST" and self._service.phase is not Phase.READY:
            yield [{"type": "longreach.declined", "replica": self._name}]
            return
        yield []
        self._note(request.key)
        body: bytes | None = request.body
        gone = asyncio.Event()
        # Not bounded: Ray does not tell how far a reader is, and an answer is no longer than `max_tokens` let it be.
        outbox: asyncio.Queue[Message | None] = asyncio.Queue()

        async def receive() -> Message:
            nonlocal body
            if body is not None:
                message, body = {"type": "http.request", "body": body, "more_body": False}, None
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":  # who answered is what an operator looks for first
                message["headers"] = [*message["headers"], (b"x-replica", self._name.encode())]
            outbox.put_nowait(message)

        task = asyncio.create_task(self._app(request.scope, receive, send))
        task.add_done_callback(lambda _: outbox.put_nowait(None))
        try:
            while messages := await _next_messages(outbox):
                yield messages
            await task
        finally:
            gone.set()
            _, late = await asyncio.wait([task], timeout=_ENDING_SECONDS)
            for one in late:
                one.cancel()

    def _note(self, key: PromptKey) -> None:
        for digest in key.chain:
            self._recent[digest] = None
            self._recent.move_to_end(digest)
        while len(self._recent) > _RECENT_DIGESTS:
            self._recent.popitem(last=False)

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises: only when no engine will follow the last one. A long prefill, or
        an engine that is being replaced, is health."""
        if self._running.done():
            self._running.result()

    async def record_routing_stats(self) -> dict[str, Any]:
        """What `PrefixRouter` reads: prompt tokens that are not computed, open requests, whether it takes any, and the
        digests of the prompts that it was given last."""
        service = self._service
        return {
            "unread_tokens": service.unread_tokens,
            "open_requests": service.open_requests,
            "ready": service.phase is Phase.READY,
            "recent": list(self._recent),
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `longreach.cluster.autoscaling` reads."""
        return {"unread_tokens": float(self._service.unread_tokens)}

    async def metrics(self) -> tuple[str, bytes]:
        """The replica's name and its metrics, as Prometheus reads them."""
        return self._name, self._service.metrics.scrape()

    async def __del__(self) -> None:
        # Serve calls and awaits it when the replica's requests have ended.
        if hasattr(self, "_running"):
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
            await self._service.stop()
            await self._resources.aclose()


async def _next_messages(outbox: asyncio.Queue[Message | None]) -> list[Message]:
    """All messages that are there, at least one; none after the last."""
    messages = [await outbox.get()]
    while not outbox.empty() and messages[-1] is not None:
        messages.append(outbox.get_nowait())
    if messages[-1] is None and len(messages) > 1:
        outbox.put_nowait(None)
    return [message for message in messages if message is not None]
