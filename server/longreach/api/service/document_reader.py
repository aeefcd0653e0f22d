"""Reading documents into the prefix cache in the background, behind everything else that the engine has to do.

One document is read at a time, and owners take turns. What an engine's death cuts off is read by the next engine. Pins
are sent to each engine that starts: they are its memory only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict, deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from longreach.api.service.document_prefixes import DocumentPrefixes
from longreach.documents.document import Document
from longreach.documents.errors import DocumentNotFoundError
from longreach.documents.read_ahead import ReadAhead
from longreach.engine.errors import EngineDeadError, EngineError
from longreach.engine.looks import Looked
from longreach.engine.rope_choice import factor_for
from longreach.errors import ApiError, OverloadedError, UnavailableError
from longreach.policies.values import AttentionPolicy

if TYPE_CHECKING:
    from longreach.api.service.service import Service

log = logging.getLogger(__name__)

# How often it is looked whether a server that takes no requests at this moment takes them again.
_PAUSE_SECONDS = 1.0
# How long an engine may be in a step before a document is told without what is cached of it.
_LOOK_SECONDS = 5.0


@dataclass(eq=False)
class _Reading:
    """A document that is to be read, as long as it is `wanted`; `ended` says that nobody will read it any more."""

    document: Document
    wanted: bool = True
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class DocumentReader:
    """Reads the documents of one service, from `start` on. All methods but `engine_started` are called in a running
    event loop.

    Attributes:
        reads: documents that were read, since the start.
        prefixes: the token ids that prompts with them begin with.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._queues: OrderedDict[str, deque[_Reading]] = OrderedDict()
        self._known: dict[str, _Reading] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.Task[None] | None = None
        self._stopped = False
        self._new_engine = False
        self.reads = 0
        self.prefixes = DocumentPrefixes(service)
        service.documents.on_gone = self.forget

    @property
    def waiting(self) -> int:
        """Documents that are to be read."""
        return len(self._known)

    def engine_started(self) -> None:
        """There is an engine that knows of no document: with `start`, pins are sent, and what is not read is read."""
        self._new_engine = True

    def start(self) -> None:
        """Go on with what there is to do, if that is not being done."""
        if self._loop is None and not self._stopped:
            self._loop = asyncio.create_task(self._run(), name="documents")

    def read(self, document: Document, prefix: Sequence[int] | None = None) -> None:
        """Read a document when its turn has come. `prefix` are the token ids of `LoadedDocument.prefix`, if they are
        known."""
        if prefix is not None:
            self.prefixes.hold(document, prefix)
        if self._stopped or document.id in self._known:
            return
        reading = self._known[document.id] = _Reading(document)
        self._queues.setdefault(document.owner, deque()).append(reading)
        self.start()

    async def has_read(self, document: Document, prefix: Sequence[int]) -> None:
        """Somebody else has read a document, whose prefix has these token ids."""
        self.reads += 1
        self.prefixes.hold(document, prefix)
        await self._service.documents.tell(document, "ready", len(prefix))
        if document.pinned:
            await self._pin(document, prefix)

    def change_pin(self, document: Document) -> None:
        """The document is pinned now, or is no longer."""
        if document.pinned:
            self.read(document)
        else:
            self._spawn(self._unpin(document), "a pin")

    def forget(self, document: Document) -> None:
        """The document is gone."""
        self.prefixes.forget(document)
        self._service.beginnings.forget(document.id)
        reading = self._known.get(document.id)
        if reading is not None:
            reading.wanted = False
            if reading.task is not None:
                reading.task.cancel()
        if not self._stopped:
            self._spawn(self._unpin(document), "a pin")

    async def look(self, document: Document) -> Looked | None:
        """What is cached of a document now, and how long reading it takes; None where that is not known.

        Raises:
            UnavailableError: the store cannot be read.
        """
        try:
            engine, _ = self._service.require_ready()
            prefix = await self.prefixes.of(document)
            async with asyncio.timeout(_LOOK_SECONDS):
                factor = factor_for(engine.info.rope_tables, len(prefix))
                return await engine.look(prefix, document.salt, self._policy(document), factor)
        except (ApiError, EngineError, TimeoutError):  # not a matter of the document, which is told without it
            return None

    async def wait(self, document_id: str) -> None:
        """Wait until a document has been read, or will not be; no time where it is not to be read."""
        reading = self._known.get(document_id)
        if reading is not None:
            await reading.ended.wait()

    async def stop(self) -> None:
        """Leave everything as it is."""
        self._stopped = True
        tasks = [*self._tasks, *([] if self._loop is None else [self._loop])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None], what: str) -> None:
        task = asyncio.create_task(_told(work, what))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self) -> None:
        try:
            while self._new_engine or self._queues:
                if self._new_engine:
                    self._new_engine = False
                    await _told(self._take_up(), "documents that are kept")
                else:
                    await self._read_next()
        finally:
            self._loop = None

    async def _read_next(self) -> None:
        reading = self._next()
        if reading.wanted:
            reading.task = asyncio.create_task(self._read(reading), name=f"document {reading.document.id}")
            try:
                await asyncio.wait([reading.task])
            except asyncio.CancelledError:
                reading.task.cancel()
                await asyncio.gather(reading.task, return_exceptions=True)
                raise
            if not reading.task.cancelled() and (error := reading.task.exception()) is not None:
                log.error("document %s was not read", reading.document.id, exc_info=error)
        del self._known[reading.document.id]
        reading.ended.set()

    def _next(self) -> _Reading:
        owner, queue = next(iter(self._queues.items()))
        reading = queue.popleft()
        self._queues.move_to_end(owner)
        if not queue:
            del self._queues[owner]
        return reading

    async def _take_up(self) -> None:
        for document in await self._service.documents.unread():
            self.read(document)

    async def _read(self, reading: _Reading) -> None:
        """Read a document, by as many engines as it takes."""
        documents = self._service.documents
        while reading.wanted:
            try:
                await self._read_once(reading)
            except DocumentNotFoundError:
                return
            except (OverloadedError, UnavailableError, EngineDeadError):
                await asyncio.sleep(_PAUSE_SECONDS)
            except (ApiError, EngineError) as error:
                told = error.message if isinstance(error, ApiError) else "The engine failed to read the document."
                log.warning("document %s cannot be read: %s", reading.document.id, error)
                await documents.tell(reading.document, "failed", problem=told)
                return
            else:
                return

    async def _read_once(self, reading: _Reading) -> None:
        service, document = self._service, reading.document
        prefix = await self.prefixes.of(document)
        if document.pinned:
            await self._pin(document, prefix)
        ahead = ReadAhead(
            service,
            attention=self._policy(document),
            cache_salt=document.salt,
            caller=document.owner,
            name=document.id,
        )
        async with ahead:
            ahead.feed(prefix)
            await ahead.end()
        self.reads += 1
        await service.documents.tell(document, "ready", len(prefix))

    async def _pin(self, document: Document, prefix: Sequence[int]) -> None:
        engine, _ = self._service.require_ready()
        factor = factor_for(engine.info.rope_tables, len(prefix))
        await engine.pin(document.id, [*prefix], document.salt, self._policy(document), factor)

    def _policy(self, document: Document) -> AttentionPolicy:
        return self._service.settings.default_policy if document.attention is None else document.attention

    async def _unpin(self, document: Document) -> None:
        with contextlib.suppress(UnavailableError, EngineDeadError):  # another engine knows no pins
            engine, _ = self._service.require_ready()
            await engine.unpin(document.id)


async def _told(work: Coroutine[Any, Any, None], what: str) -> None:
    try:
        await work
    except (ApiError, EngineError) as error:
        log.error("%s: %s", what, error)
