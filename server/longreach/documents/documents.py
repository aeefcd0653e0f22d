"""The documents of a server, for the event loop: what the store does, done in its one thread."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from longreach.config import Settings
from longreach.documents.document import Document, NewDocument, State
from longreach.documents.errors import NONE_KEPT, DocumentNotFoundError
from longreach.documents.room import Limits
from longreach.documents.store import DocumentStore, Page, Totals
from longreach.errors import InvalidRequestError, UnavailableError, quoted
from longreach.util.handover import AwaitedStore
from longreach.util.work_pool import WorkPool

log = logging.getLogger(__name__)

T = TypeVar("T")

_SECONDS_A_DAY = 86400.0


class Documents:
    """The store of `--documents`; nothing is kept where that is `none`. Nothing of one owner is found by another.

    Methods raise an `UnavailableError` where the store cannot be read or written, and an `InvalidRequestError` where
    nothing is kept.

    Attributes:
        on_gone: called with each document that has left: deleted, expired, or evicted for others.
        totals: what is kept, as of the last change.
        most_bytes: what they may take.
        expired, evicted: documents that left by themselves, since the start.
        uses: requests that have used one, since the start.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        self._kept: AwaitedStore[DocumentStore] | None = None
        self._pool = WorkPool("documents", 1)
        self.on_gone: Callable[[Document], None] | None = None
        self.totals = Totals()
        self.expired = self.evicted = self.uses = 0
        self.most_bytes = settings.documents_bytes
        if settings.documents == "none":
            return
        path = None if settings.documents == "memory" else Path(settings.documents)
        own = settings.documents_bytes_per_key
        limits = Limits(
            settings.documents_bytes,
            settings.documents_bytes if own is None else min(own, settings.documents_bytes),
            settings.documents_per_key,
            settings.documents_days * _SECONDS_A_DAY,
        )
        self._kept = AwaitedStore(
            lambda: DocumentStore(path, limits), "--documents", settings.documents, waits=settings.handover
        )
        if self._kept.store is not None:
            self.totals = self._kept.store.totals

    @property
    def enabled(self) -> bool:
        """Whether anything is kept."""
        return self._kept is not None

    async def put(
        self, owner: str, new: NewDocument, contents: bytes, tokens: int | None = None
    ) -> tuple[Document, bool]:
        """As `DocumentStore.put`."""
        return await self._do(lambda store: store.put(owner, new, contents, tokens), owner)

    async def begin(self, owner: str, new: NewDocument) -> DocumentWriter:
        """As `DocumentStore.begin`; the document is written by what is returned."""
        document = await self._do(lambda store: store.begin(owner, new), owner)
        return DocumentWriter(self, document)

    async def add(self, document: Document, part: bytes) -> None:
        """As `DocumentStore.add`."""
        await self._do(lambda store: store.add(document.owner, document.id, part), document.owner)

    async def finish(self, document: Document, tokens: int | None = None) -> tuple[Document, bool]:
        """As `DocumentStore.finish`."""
        return await self._do(lambda store: store.finish(document.owner, document.id, tokens), document.owner)

    async def get(self, owner: str, document_id: str) -> Document:
        """A document by its id.

        Raises:
            DocumentNotFoundError: this owner has no such document.
        """
        if self._kept is None:
            raise DocumentNotFoundError(document_id)

        def get(store: DocumentStore) -> Document:
            store.expire()
            return store.get(owner, document_id)

        return await self._do(get, owner)

    async def find(self, owner: str, reference: str, param: str = "document") -> Document:
        """The document that a reference means: an id, or a name that only one document has.

        Raises:
            DocumentNotFoundError: this owner has no such document.
            InvalidRequestError: several have this name.
        """
        found = await self._do(lambda store: store.find(owner, reference), owner)
        if not found:
            raise DocumentNotFoundError(reference, param)
        if len(found) > 1:
            ids = ", ".join(document.id for document in found)
            raise InvalidRequestError(
                f"`{param}`: several documents are named {quoted(reference)}. Refer to one by its id: {ids}.",
                param=param,
                code="ambiguous_document",
            )
        return found[0]

    async def page(
        self,
        owner: str,
        limit: int,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
        name: str | None = None,
    ) -> Page:
        """As `DocumentStore.page`."""
        if self._kept is None:
            return Page([], more=False)
        return await self._do(lambda store: store.page(owner, limit, order, after, name), owner)

    async def contents(self, document: Document) -> bytes:
        """What was uploaded: of a text its UTF-8, of messages their JSON, of token ids little-endian int32.

        Raises:
            DocumentNotFoundError: it is gone.
        """
        return await self._do(lambda store: store.contents(document.owner, document.id), document.owner)

    async def use(self, document: Document) -> tuple[Document, bytes]:
        """A document that a request refers to, and its contents; renews its life.

        Raises:
            DocumentNotFoundError: it is gone.
        """

        def use(store: DocumentStore) -> tuple[Document, bytes]:
            used = store.use(document.owner, document.id)
            return used, store.contents(document.owner, document.id)

        used = await self._do(use, document.owner)
        self.uses += 1
        return used

    async def change(self, document: Document, new: NewDocument) -> Document:
        """As `DocumentStore.change`."""
        return await self._do(lambda store: store.change(document.owner, document.id, new), document.owner)

    async def tell(
        self, document: Document, state: State, tokens: int | None = None, problem: str | None = None
    ) -> bool:
        """As `DocumentStore.tell`."""
        return await self._do(lambda store: store.tell(document.id, state, tokens, problem), document.owner)

    async def delete(self, owner: str, document_id: str) -> Document:
        """As `DocumentStore.delete`."""
        if self._kept is None:
            raise DocumentNotFoundError(document_id)
        return await self._do(lambda store: store.delete(owner, document_id), owner)

    async def unread(self) -> list[Document]:
        """As `DocumentStore.unread`; none where nothing is kept."""
        if self._kept is None:
            return []
        await self._kept.wait()
        return await self._do(lambda store: store.unread(), "")

    async def stop(self) -> None:
        """Close the store once what was begun has been written."""
        if self._kept is not None:
            self._kept.stop()
            if self._kept.store is not None:
                await self._do(lambda store: store.close(), "", look=False)
            self._kept = None
        self._pool.close()

    async def _do(self, function: Callable[[DocumentStore], T], owner: str, *, look: bool = True) -> T:
        if self._kept is None:
            raise InvalidRequestError(
                f"`document`: {NONE_KEPT}; send the text itself, or start the server with --documents memory.",
                param="document",
                code="unsupported_value",
            )
        store = await self._kept.get()

        def work() -> tuple[T | Exception, list[Document], Totals]:
            result: T | Exception
            try:
                result = function(store)
            except Exception as error:  # noqa: BLE001 - raised below, behind what has left
                result = error
            gone, store.gone = store.gone, []
            return result, gone, store.totals if look else self.totals

        try:
            result, gone, self.totals = await self._pool.call(work, caller=owner)
            self.expired, self.evicted = store.expired, store.evicted
            for document in gone:
                if self.on_gone is not None:
                    self.on_gone(document)
            if isinstance(result, Exception):
                raise result
        except sqlite3.Error as error:
            log.error("the store of documents failed: %s", error)
            raise UnavailableError(
                "The store of documents cannot be read or written at this moment.", code="store_failed"
            ) from None
        return result


class DocumentWriter:
    """A document while it comes, in parts.

    Attributes:
        document: as it was when it began.
    """

    def __init__(self, documents: Documents, document: Document) -> None:
        self.document = document
        self._documents = documents
        self._ended = False

    async def add(self, part: bytes) -> None:
        """Another part of the contents.

        Raises:
            DocumentNotFoundError: the document was deleted.
            DocumentTooLargeError, DocumentQuotaError: there is no room for it.
        """
        await self._documents.add(self.document, part)

    async def finish(self, tokens: int | None = None) -> tuple[Document, bool]:
        """All parts have come: the document, and whether it is a new one. It is another one where its owner has all of
        it already.

        Raises:
            DocumentNotFoundError: the document was deleted.
        """
        done = await self._documents.finish(self.document, tokens)
        self._ended = True
        return done

    async def drop(self) -> None:
        """Let go of a document that will not be whole; nothing happens to one that is, or that is gone."""
        if self._ended:
            return
        self._ended = True
        try:
            await self._documents.delete(self.document.owner, self.document.id)
        except DocumentNotFoundError:
            return
