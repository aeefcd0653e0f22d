"""The documents that are kept: rows of a SQLite database in memory or in a file, with their contents in pieces.

A document is found by its owner alone. What is full lets go of the unpinned documents that have not been used for
longest, of the owner who keeps the most. Using a document renews its life.
"""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from longreach.documents.document import Document, NewDocument, State, is_id, new_id, own_id
from longreach.documents.errors import DocumentNotFoundError
from longreach.documents.room import Limits, rows_that_make_room
from longreach.documents.tables import COLUMNS, TABLES, VERSION, document_of, packed
from longreach.util.database_file import DatabaseFile, file_error

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Totals:
    """What is kept now: documents, those of them that are pinned, their bytes, and tokens that are read ahead."""

    documents: int = 0
    pinned: int = 0
    bytes: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Page:
    """Some of an owner's documents; `more` follow."""

    documents: Sequence[Document]
    more: bool


class DocumentStore:
    """The documents of one server. Not for several threads at once.

    Attributes:
        gone: documents that have left, whatever the reason, until somebody takes them away.
        expired: documents whose time has come, since the start.
        evicted: documents that have made room for others, since the start.

    Raises:
        StoreFileError: the file is not a store, is another server's, or cannot be opened.
    """

    def __init__(self, path: Path | None, limits: Limits, clock: Callable[[], float] = time.time) -> None:
        self._limits = limits
        self._clock = clock
        self.gone: list[Document] = []
        self.expired = 0
        self.evicted = 0
        self._db = DatabaseFile(path, TABLES, VERSION, "documents")
        try:
            self._end_uploads()
            self.expire()
        except sqlite3.Error as error:
            self._db.close()
            raise file_error(error) from None

    @property
    def totals(self) -> Totals:
        """What is kept now."""
        row = self._db.execute(
            "SELECT count(*), coalesce(sum(pinned), 0), coalesce(sum(bytes), 0), coalesce(sum(tokens), 0)"
            " FROM documents"
        ).fetchone()
        return Totals(*row)

    def put(self, owner: str, new: NewDocument, contents: bytes, tokens: int | None = None) -> tuple[Document, bool]:
        """Keep a whole document, and whether it is a new one.

        One with the same contents, name, use, salt and policy is the same document: its life is renewed, and `ttl`,
        `renews`, `pinned` and `metadata` are as given now.

        Raises:
            DocumentTooLargeError, DocumentQuotaError: there is no room for it; nothing has changed.
        """
        self.expire()
        digest = digest_of([contents])
        if (known := self._same(owner, new, digest)) is not None:
            return self._taken_up(known, new), False
        with self._db.change():
            self._make_room(owner, len(contents), new_document=True)
            number, document_id = self._insert(owner, new, "reading")
            for start in range(0, len(contents), _PIECE_BYTES):
                self._add_piece(number, contents[start : start + _PIECE_BYTES])
            self._db.execute(
                "UPDATE documents SET bytes = ?, digest = ?, tokens = ? WHERE number = ?",
                (len(contents), digest, tokens, number),
            )
        return self.get(owner, document_id), True

    def begin(self, owner: str, new: NewDocument) -> Document:
        """Keep a document that is to come in parts; see `add`, `finish` and `delete`.

        Raises:
            DocumentQuotaError: its owner has too many.
        """
        self.expire()
        with self._db.change():
            self._make_room(owner, 0, new_document=True)
            _, document_id = self._insert(owner, new, "uploading")
        return self.get(owner, document_id)

    def add(self, owner: str, document_id: str, part: bytes) -> None:
        """Another part of a document that is being uploaded.

        Raises:
            DocumentNotFoundError: it was deleted.
            DocumentTooLargeError, DocumentQuotaError: there is no room for it; the parts before stay.
        """
        number, held = self._uploading(owner, document_id)
        with self._db.change():
            self._make_room(owner, len(part), held=held)
            for start in range(0, len(part), _PIECE_BYTES):
                self._add_piece(number, part[start : start + _PIECE_BYTES])
            self._db.execute("UPDATE documents SET bytes = bytes + ? WHERE number = ?", (len(part), number))

    def finish(self, owner: str, document_id: str, tokens: int | None = None) -> tuple[Document, bool]:
        """All parts have come: the document, and whether it is a new one, as of `put`.

        Raises:
            DocumentNotFoundError: it was deleted.
        """
        number, _ = self._uploading(owner, document_id)
        document = self.get(owner, document_id)
        pieces = self._db.execute("SELECT body FROM pieces WHERE document = ? ORDER BY number", (number,))
        digest = digest_of(body for (body,) in pieces)
        if (known := self._same(owner, document, digest)) is not None:
            self._remove("number = ?", number)
            self._db.checkpoint()
            return self._taken_up(known, document), False
        with self._db.change():
            self._db.execute(
                "UPDATE documents SET state = 'reading', digest = ?, tokens = ? WHERE number = ?",
                (digest, tokens, number),
            )
        return self.get(owner, document_id), True

    def get(self, owner: str, document_id: str) -> Document:
        """A document by its id, or by that of its file.

        Raises:
            DocumentNotFoundError: this owner has no such one.
        """
        found = self._select("owner = ? AND id = ?", owner, own_id(document_id))
        if not found:
            raise DocumentNotFoundError(document_id)
        return found[0]

    def find(self, owner: str, reference: str, most: int = 8) -> list[Document]:
        """The documents that a reference may mean: the one with this id, or the newest `most` with this name."""
        self.expire()
        if is_id(reference):
            return self._select("owner = ? AND id = ?", owner, own_id(reference))
        return self._select("owner = ? AND name = ? ORDER BY number DESC LIMIT ?", owner, reference, most)

    def page(
        self,
        owner: str,
        limit: int,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
        name: str | None = None,
    ) -> Page:
        """So many documents behind the one with the id `after`, in the order in which they came.

        Raises:
            DocumentNotFoundError: there is no `after`.
        """
        self.expire()
        which, values = "owner = ?", [owner]
        if name is not None:
            which, values = which + " AND name = ?", [*values, name]
        if after is not None:
            row = self._db.execute(
                "SELECT number FROM documents WHERE owner = ? AND id = ?", (owner, own_id(after))
            ).fetchone()
            if row is None:
                raise DocumentNotFoundError(after, "after")
            which, values = which + f" AND number {'<' if order == 'desc' else '>'} ?", [*values, row[0]]
        found = self._select(f"{which} ORDER BY number {order} LIMIT ?", *values, limit + 1)
        return Page(found[:limit], len(found) > limit)

    def contents(self, owner: str, document_id: str) -> bytes:
        """What was uploaded.

        Raises:
            DocumentNotFoundError: this owner has no such document.
        """
        document = self.get(owner, document_id)
        rows = self._db.execute(
            "SELECT body FROM pieces WHERE document = (SELECT number FROM documents WHERE id = ?) ORDER BY number",
            (document.id,),
        )
        return b"".join(body for (body,) in rows)

    def use(self, owner: str, document_id: str) -> Document:
        """Note that a request refers to a document, which renews its life.

        Raises:
            DocumentNotFoundError: this owner has no such document.
        """
        document = self.get(owner, document_id)
        now = self._clock()
        with self._db.change():
            self._db.execute(
                "UPDATE documents SET used = ?, uses = uses + 1, expires = ? WHERE id = ?",
                (now, self._expiry(document, document.created, now), document.id),
            )
        return self.get(owner, document_id)

    def change(self, owner: str, document_id: str, new: NewDocument) -> Document:
        """Give a document the name, `ttl`, `renews`, `pinned` and metadata of another value.

        A name is part of a text's prompt: with another one the document is to be read again.

        Raises:
            DocumentNotFoundError: this owner has no such document.
        """
        document = self.get(owner, document_id)
        state = "reading" if new.name != document.name and document.state in ("ready", "failed") else document.state
        with self._db.change():
            self._db.execute(
                "UPDATE documents SET name = ?, state = ?, ttl = ?, renews = ?, pinned = ?, metadata = ?, expires = ?"
                " WHERE id = ?",
                (
                    new.name,
                    state,
                    new.ttl,
                    new.renews,
                    new.pinned,
                    msgspec.json.encode(new.metadata),
                    self._expiry(new, document.created, document.used),
                    document.id,
                ),
            )
        return self.get(owner, document_id)

    def tell(self, document_id: str, state: State, tokens: int | None = None, problem: str | None = None) -> bool:
        """A document is in another state; `tokens` are read ahead of it, if that is news. False if it is gone."""
        with self._db.change():
            changed = self._db.execute(
                "UPDATE documents SET state = ?, tokens = coalesce(?, tokens), problem = ? WHERE id = ?",
                (state, tokens, problem, document_id),
            ).rowcount
        return changed > 0

    def delete(self, owner: str, document_id: str) -> Document:
        """Let go of a document, whose text is then gone from the file.

        Raises:
            DocumentNotFoundError: this owner has no such document.
        """
        document = self.get(owner, document_id)
        self._remove("id = ?", document.id)
        self._db.checkpoint()  # what was overwritten is gone from the file, too
        return document

    def unread(self) -> list[Document]:
        """What a server has to read when its engine starts: pinned documents, then others that were being read."""
        return self._select("state = 'reading' OR (pinned AND state = 'ready') ORDER BY pinned DESC, number")

    def expire(self) -> None:
        """Let go of what has expired."""
        now = self._clock()
        if self._db.execute("SELECT 1 FROM documents WHERE expires <= ? LIMIT 1", (now,)).fetchone() is not None:
            self.expired += self._remove("expires <= ? AND state != 'uploading'", now)
            self._db.checkpoint()

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def _expiry(self, new: NewDocument, created: float, used: float) -> float | None:
        if new.ttl is None:
            return None if new.pinned else used + self._limits.max_seconds
        return (used if new.renews else created) + new.ttl

    def _insert(self, owner: str, new: NewDocument, state: State) -> tuple[int, str]:
        now, document_id = self._clock(), new_id()
        values = {
            "id": document_id,
            "owner": owner,
            "name": new.name,
            "kind": new.kind,
            "use": new.use,
            "state": state,
            "problem": None,
            "created": now,
            "used": now,
            "uses": 0,
            "ttl": new.ttl,
            "renews": new.renews,
            "expires": self._expiry(new, now, now),
            "pinned": new.pinned,
            "cache_salt": new.cache_salt,
            "attention": packed(new.attention),
            "tokenizer": new.tokenizer,
            "metadata": msgspec.json.encode(new.metadata),
            "bytes": 0,
            "tokens": None,
            "digest": "",
        }
        marks = ", ".join(f":{name}" for name in values)
        cursor = self._db.execute(f"INSERT INTO documents ({COLUMNS}) VALUES ({marks})", values)  # noqa: S608
        assert cursor.lastrowid is not None
        return cursor.lastrowid, document_id

    def _add_piece(self, number: int, body: bytes) -> None:
        self._db.execute("INSERT INTO pieces (document, body) VALUES (?, ?)", (number, body))

    def _uploading(self, owner: str, document_id: str) -> tuple[int, int]:
        """The number of a document that is being uploaded, and its bytes so far."""
        row = self._db.execute(
            "SELECT number, bytes FROM documents WHERE owner = ? AND id = ? AND state = 'uploading'",
            (owner, own_id(document_id)),
        ).fetchone()
        if row is None:
            raise DocumentNotFoundError(document_id)
        return row

    def _same(self, owner: str, new: NewDocument, digest: str) -> Document | None:
        """The document that has all of this already."""
        found = self._select(
            "owner = ? AND digest = ? AND kind = ? AND tokenizer = ? AND name IS ? AND use = ? AND cache_salt = ?"
            " AND attention IS ? AND state != 'uploading' LIMIT 1",
            owner,
            digest,
            new.kind,
            new.tokenizer,
            new.name,
            new.use,
            new.cache_salt,
            packed(new.attention),
        )
        return found[0] if found else None

    def _taken_up(self, known: Document, new: NewDocument) -> Document:
        now = self._clock()
        self._db.execute("UPDATE documents SET used = ? WHERE id = ?", (now, known.id))
        if known.state == "failed":
            self.tell(known.id, "reading")
        return self.change(known.owner, known.id, new)

    def _make_room(self, owner: str, size: int, *, new_document: bool = False, held: int = 0) -> None:
        """As `rows_that_make_room`, which leave; in a transaction."""
        for number in rows_that_make_room(self._db, self._limits, owner, size, new_document=new_document, held=held):
            self.evicted += self._forget("number = ?", number)

    def _remove(self, which: str, *values: object) -> int:
        with self._db.change():
            return self._forget(which, *values)

    def _forget(self, which: str, *values: object) -> int:
        """Delete documents; in a transaction."""
        documents = self._select(which, *values)
        self._db.execute(f"DELETE FROM documents WHERE {which}", values)  # noqa: S608
        self.gone += documents
        return len(documents)

    def _end_uploads(self) -> None:
        """Nobody will finish what was being uploaded when the server ended."""
        self._remove("state = 'uploading'")
        self.gone.clear()

    def _select(self, which: str, *values: object) -> list[Document]:
        rows = self._db.execute(f"SELECT {COLUMNS} FROM documents WHERE {which}", values)  # noqa: S608
        return [document_of(row) for row in rows]


def digest_of(parts: Iterable[bytes]) -> str:
    """SHA-256 of a document's contents in hex."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
