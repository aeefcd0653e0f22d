"""The state that all requests share: the engine, the tokenizer, and whether requests can be taken at this moment."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
import time
from collections.abc import Iterator
from typing import Any, NoReturn, Protocol

import msgspec

from longreach import gguf_source, hub
from longreach.api.http.auth import ApiKeys
from longreach.api.http.event_record import EventMemory
from longreach.api.service.background import BackgroundRuns
from longreach.api.service.chat_prompt import Chat
from longreach.api.service.document_reader import DocumentReader
from longreach.api.service.engine_protocol import StartedEngine, StartEngine
from longreach.api.service.grammar_check import Kind
from longreach.api.service.grammar_compiler import GrammarCompiler
from longreach.api.service.identified import IdentifiedRuns
from longreach.api.service.kept_responses import KeptResponses
from longreach.api.service.mask_pictures import MaskPictures
from longreach.api.service.metered_engine import MeteredEngine
from longreach.api.service.model_check import refuse_unsupported
from longreach.api.service.pdf_reader import PdfReader
from longreach.api.service.recent_prompts import RecentPrompts
from longreach.api.service.sampling_defaults import sampling_defaults
from longreach.config import Settings
from longreach.documents.beginnings import Beginnings
from longreach.documents.counts import DocumentCounts
from longreach.documents.documents import Documents
from longreach.documents.uploads import Uploads
from longreach.engine.client import EngineClient
from longreach.engine.errors import EngineDeadError
from longreach.engine.messages import Sampling, Started
from longreach.engine.stats import Stats
from longreach.errors import ModelNotFoundError, TokenizerError, UnavailableError
from longreach.metrics import Metrics, ServerState
from longreach.text.end_tokens import end_token_ids
from longreach.text.tokenizer import Tokenizer
from longreach.util.shared_bytes import SharedBytes
from longreach.util.work_pool import WorkPool

log = logging.getLogger(__name__)

_RETRY_WHILE_LOADING = 2
_READING_THREADS = 2
_WRITING_THREADS = 1  # its work holds the interpreter's lock nearly all the time
_ENCODING_THREADS = max(2, min(4, os.cpu_count() or 1))


class Formed(Protocol):
    """A request whose answer may have to follow a grammar."""

    @property
    def form(self) -> tuple[Kind, str | dict[str, Any]] | None:
        """The grammar's kind and text."""
        ...

    @property
    def form_field(self) -> str:
        """The field that it comes from."""
        ...


class Phase(enum.Enum):
    """The life of a server; only in `READY` are requests taken."""

    LOADING = "loading"
    READY = "ready"
    STALLED = "stalled"
    RESTARTING = "restarting"
    DRAINING = "draining"
    DEAD = "dead"


class Service:
    """One served model. Made before the model is loaded, so that the port can already answer that it is loading.

    Raises:
        ConfigError: the API keys, the store of responses or that of documents cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.keys = ApiKeys.of(settings)
        self.metrics = Metrics(settings.name, self._look, self._count_documents, self._state)
        self.bodies = SharedBytes(settings.max_total_body_bytes)  # of all open requests
        self.created = int(time.time())
        self.died = asyncio.Event()
        self._engine_config = settings.engine_config()
        self._draining = False
        self._gave_up = False
        self._stopping = False
        self._replaces = False  # whether an engine that dies is replaced
        self._changed = asyncio.Event()  # set, and replaced, with each engine and at the end of them
        self._engine: MeteredEngine | None = None
        self._tokenizer: Tokenizer | None = None
        self._chat: Chat | None = None
        self.grammars = GrammarCompiler(settings.max_grammar_bytes, settings.max_grammar_seconds)
        self.masks = MaskPictures()
        self.kept = KeptResponses(settings)
        self.documents = Documents(settings)
        self.uploads = Uploads()  # of documents
        self.beginnings = Beginnings()  # of prompts with documents
        self.document_reader = DocumentReader(self)
        self.background = BackgroundRuns()
        self.events = EventMemory()
        self.identified = IdentifiedRuns(settings.detached_seconds, self.events)
        self.recent_prompts = RecentPrompts()
        # Bodies and templates, which take milliseconds, do not wait behind the texts that are encoded.
        self.reading = WorkPool("reading", _READING_THREADS)
        self.pdfs = PdfReader(self.reading)
        self.encoding = WorkPool("encoding", _ENCODING_THREADS, settings.max_encoding_bytes)
        self.writing = WorkPool("writing", _WRITING_THREADS)  # long answers
        self.sampling_defaults = Sampling()  # of requests that do not say
        self._open_requests = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._cut = asyncio.Event()

    async def load(self, start_engine: StartEngine = EngineClient.start) -> None:
        """Load the tokenizer, which is quick to fail, then start the engine.

        Raises:
            ModelFilesError: a file of the model cannot be had, or its sampling defaults cannot be used.
            TokenizerError: the tokenizer cannot be used.
            EngineStartError: the engine never became ready.
        """
        source = self.settings.model_source
        other = self.settings.tokenizer
        gguf = await self.reading.call(gguf_source.find, source, self.settings.revision)
        if gguf is None:
            files = await self.reading.call(hub.small_files, source, self.settings.revision)
            commit = hub.commit_of(source, files)
        else:
            files = await self.reading.call(gguf_source.described, gguf, other is None, True)
            self._engine_config = msgspec.structs.replace(self._engine_config, model=str(files), gguf_file=str(gguf))
            commit = None
        spoken = files
        if other is not None:
            spoken = await self.reading.call(hub.tokenizer_files, other)
        try:
            tokenizer = await self.reading.call(Tokenizer.load, str(spoken))
        except TokenizerError:
            await self.reading.call(refuse_unsupported, str(files), self._engine_config)
            raise
        chat = await self.reading.call(
            Chat.load, str(spoken), self.settings.chat_template, self.settings.tool_call_format
        )
        if self.settings.chat_template is not None:
            log.info("chat template: that of --chat-template, instead of the model's")
        if chat.format.calls is not None:
            log.info("calls of tools: in the format %s", chat.format.calls.name)
        if other is not None:
            log.info("tokenizer: that of %s, with %d tokens", other, tokenizer.vocab_size)
        if self.settings.generation_config == "auto":
            self.sampling_defaults, news = sampling_defaults(files)
            log.info("%s", news)
        self._engine_config = msgspec.structs.replace(
            self._engine_config,
            revision=commit,
            tokenizer_file=str(spoken / "tokenizer.json"),
            tokenizer_eos_ids=end_token_ids(str(spoken), tokenizer),
            other_tokenizer=other,
            other_tokenizer_ids=0 if other is None else tokenizer.id_limit,
        )
        self.attach(await start_engine(self._engine_config), tokenizer, chat)
        self.document_reader.start()

    def attach(self, engine: StartedEngine, tokenizer: Tokenizer, chat: Chat) -> None:
        """Take requests from now on."""
        self._tokenizer, self._chat = tokenizer, chat
        self._adopt(engine)

    async def restart(self, start_engine: StartEngine) -> None:
        """Start another engine in place of the one that died.

        Raises:
            EngineStartError: it never became ready.
        """
        assert self._engine is not None
        await self._engine.stop()
        self._adopt(await start_engine(self._engine_config))
        self.metrics.engine_restarted()
        self.document_reader.start()

    def _adopt(self, engine: StartedEngine) -> None:
        self.died.clear()
        engine.on_death = self.died.set
        self._engine = MeteredEngine(engine, self.metrics)
        self.document_reader.engine_started()
        self._tell_change()

    @contextlib.contextmanager
    def replacing(self) -> Iterator[None]:
        """Inside, an engine that dies is replaced: what it had to do may wait for another."""
        self._replaces = True
        try:
            yield
        finally:
            self._replaces = False
            self._tell_change()

    async def successor(self, dead: MeteredEngine) -> MeteredEngine:
        """The engine that takes the place of one that has died, once it is ready.

        Raises:
            EngineDeadError: there will be no other.
        """
        while self._engine is None or self._engine is dead or not self._engine.alive:
            if not self._replaces or self._gave_up:
                raise EngineDeadError("no other engine is started")
            await self._changed.wait()
        return self._engine

    def _tell_change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def give_up(self) -> None:
        """There will be no other engine."""
        self._gave_up = True

    @property
    def chat(self) -> Chat:
        """How the model's chats are written and read; there once the service has been ready."""
        assert self._chat is not None
        return self._chat

    async def compile_form(self, body: Formed, caller: str) -> str | None:
        """The grammar that an answer has to follow, if it has to follow any; `caller` waits its turn.

        Raises:
            InvalidRequestError: it cannot be used.
            OverloadedError: too many wait.
        """
        if body.form is None:
            return None
        kind, source = body.form
        return await self.grammars.compile(kind, source, body.form_field, caller)

    @property
    def phase(self) -> Phase:
        """Where the server is in its life; reads state only, so that health never waits for work."""
        if self._gave_up:
            return Phase.DEAD
        if self._draining:
            return Phase.DRAINING
        if self._engine is None:
            return Phase.LOADING
        if not self._engine.alive:
            return Phase.RESTARTING
        return Phase.READY if self._engine.responsive else Phase.STALLED

    @property
    def leaves_unfinished(self) -> bool:
        """Whether the next server begins again what this one, which ends, does not finish in the background."""
        return self.kept.lasts and (self._stopping or self.phase in (Phase.DRAINING, Phase.DEAD))

    @property
    def open_requests(self) -> int:
        """HTTP requests whose answers have not ended."""
        return self._open_requests

    @property
    def unread_tokens(self) -> int:
        """Prompt tokens of open requests that are not computed yet; 0 without an engine."""
        return self._engine.unread_tokens if self._engine is not None and self._engine.alive else 0

    def require_ready(self) -> tuple[MeteredEngine, Tokenizer]:
        """The engine and the tokenizer.

        Raises:
            UnavailableError: requests cannot be taken; says why.
        """
        phase = self.phase
        if phase is Phase.READY:
            assert self._engine is not None
            assert self._tokenizer is not None
            return self._engine, self._tokenizer
        if phase is Phase.LOADING:
            raise UnavailableError("The model is still loading.", code="loading", retry_after=_RETRY_WHILE_LOADING)
        if phase is Phase.RESTARTING:
            raise UnavailableError(
                "The engine is being restarted.", code="engine_restarting", retry_after=_RETRY_WHILE_LOADING
            )
        if phase is Phase.STALLED:
            raise UnavailableError(
                "The engine does not respond.", code="engine_stalled", retry_after=_RETRY_WHILE_LOADING
            )
        if phase is Phase.DRAINING:
            raise UnavailableError("The server is shutting down.", code="shutting_down")
        raise UnavailableError("The engine has stopped.", code="engine_dead")

    def require_model(self, name: str) -> None:
        """Check the model that a request names.

        Raises:
            ModelNotFoundError: another one is served.
        """
        if name not in self.settings.names:
            raise ModelNotFoundError(name, self.settings.names)

    @contextlib.contextmanager
    def open_request(self) -> Iterator[None]:
        """Count a request from its first header to the last byte of its answer."""
        self._open_requests += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._open_requests -= 1
            if self._open_requests == 0:
                self._idle.set()

    async def drain(self, grace: float, hurry: asyncio.Event) -> None:
        """Take no more requests, let the open ones go on for `grace` seconds or until `hurry`, then end them."""
        self._draining = True
        if self._open_requests:
            log.info("finishing %d open requests, for at most %.0f s", self._open_requests, grace)
        await wait_any(self._idle, hurry, timeout=grace)
        if self._open_requests:
            log.warning("ending %d open requests", self._open_requests)
        self._cut.set()

    async def until_cut(self) -> NoReturn:
        """Wait until open requests have to end; then raise.

        Raises:
            UnavailableError: always, in the end.
        """
        await self._cut.wait()
        raise UnavailableError("The server is shutting down and cannot finish this request.", code="shutting_down")

    def _look(self) -> tuple[Started, Stats] | None:
        """What the engine says of itself, if there is one and it lives."""
        return (self._engine.info, self._engine.stats) if self._engine is not None and self._engine.alive else None

    def _state(self) -> ServerState:
        """How the server stands."""
        return ServerState(self.phase is Phase.READY, self._open_requests, self.unread_tokens)

    def _count_documents(self) -> DocumentCounts | None:
        """What is kept of documents, if they are."""
        documents, reader = self.documents, self.document_reader
        if not documents.enabled:
            return None
        totals = documents.totals
        return DocumentCounts(
            documents=totals.documents,
            pinned=totals.pinned,
            bytes=totals.bytes,
            most_bytes=documents.most_bytes,
            tokens=totals.tokens,
            waiting=reader.waiting,
            reads=reader.reads,
            uses=documents.uses,
            evicted=documents.evicted,
            expired=documents.expired,
        )

    async def stop(self) -> None:
        """Stop the engine, if it was ever started, and whatever else was."""
        self._stopping = True
        await self.background.stop()
        await self.identified.stop()
        await self.kept.stop()
        await self.document_reader.stop()
        await self.documents.stop()
        self.masks.stop()
        self.reading.close()
        self.encoding.close()
        self.writing.close()
        await self.grammars.stop()
        await self.pdfs.stop()
        if self._engine is not None:
            await self._engine.stop()


async def wait_any(*events: asyncio.Event, timeout: float | None = None) -> None:  # noqa: ASYNC109 - the events decide
    """Wait until one of `events` is set, or `timeout` seconds have passed."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
