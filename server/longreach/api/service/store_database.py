"""The database of the kept responses: its file, its tables, and changes that happen whole or not at all."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import orjson

from longreach.util import exact_json

_VERSION = 3
_READABLE = (2, 3)  # the former has no requests
_TABLES = f"""
PRAGMA auto_vacuum = INCREMENTAL;
PRAGMA secure_delete = ON;
PRAGMA foreign_keys = ON;
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    previous TEXT,
    created REAL NOT NULL,
    used REAL NOT NULL,
    bytes INTEGER NOT NULL,
    status TEXT NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS by_use ON responses (used);
CREATE INDEX IF NOT EXISTS by_owner ON responses (owner, used);
CREATE TABLE IF NOT EXISTS items (
    response INTEGER NOT NULL REFERENCES responses ON DELETE CASCADE,
    side TEXT NOT NULL,
    place INTEGER NOT NULL,
    owner TEXT NOT NULL,
    id TEXT NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (response, side, place)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS requests (
    response INTEGER PRIMARY KEY REFERENCES responses ON DELETE CASCADE,
    tries INTEGER NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS by_id ON items (owner, id, response);
PRAGMA user_version = {_VERSION};
"""


class StoreFileError(Exception):
    """The database's file cannot be used; the message says why."""


def file_error(error: Exception) -> StoreFileError:
    """What the operator is told of an error at the start."""
    if "locked" in str(error):
        return StoreFileError("another server has it open")
    cure = "; without the file, the server makes a new one" if isinstance(error, sqlite3.DatabaseError) else ""
    return StoreFileError(f"{error}{cure}")


def json_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a row.

    Raises:
        sqlite3.DatabaseError: it is not what was written.
    """
    try:
        value = exact_json.loads(body)
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise sqlite3.DatabaseError("a row cannot be read; the file is damaged")
    return value


def loaded(body: bytes, member: str, left: str | None = None) -> dict[str, Any]:
    """The JSON object of a row, which has an `id` and this other member; what is `left` is a `msgspec.Raw` as it is.

    Raises:
        sqlite3.DatabaseError: it is not what was written.
    """
    try:
        value = exact_json.loads(body) if left is None else _loaded_but(body, left)
    except (orjson.JSONDecodeError, msgspec.DecodeError, TypeError):
        value = None
    if not isinstance(value, dict) or not all(isinstance(value.get(name), str) for name in ("id", member)):
        raise sqlite3.DatabaseError("a row cannot be read; the file is damaged")
    return value


def _loaded_but(body: bytes, left: str) -> object:
    members = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    raw = members.pop(left, None)
    value = {name: exact_json.loads(bytes(member)) for name, member in members.items()}
    return value if raw is None else {**value, left: raw}


class StoreDatabase:
    """A connection to the database in memory or in a file, which no other process may have open.

    Not for several threads at once.

    Raises:
        StoreFileError: the file is not a store, is another server's, or cannot be opened.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        try:
            if path is not None:
                # Nobody but the server's user may read prompts; SQLite gives its other files the same mode.
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
                self._file = _identity(path)
            self._db = _connected(path)
        except (sqlite3.Error, OSError) as error:
            raise file_error(error) from None

    def execute(self, statement: str, values: Any = ()) -> sqlite3.Cursor:
        """As `sqlite3.Connection.execute`."""
        return self._db.execute(statement, values)

    def executemany(self, statement: str, rows: Any) -> None:
        """As `sqlite3.Connection.executemany`."""
        self._db.executemany(statement, rows)

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        """A transaction: all of it or nothing.

        Raises:
            sqlite3.OperationalError: the file is not where it was; what would be written now would be lost at the end.
        """
        if self._path is not None and _identity(self._path) != self._file:
            raise sqlite3.OperationalError("its file has been deleted or replaced; start the server again")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("PRAGMA incremental_vacuum").fetchall()

    def checkpoint(self) -> None:
        """Write all changes to the file itself now."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        """Close the connection."""
        self._db.close()


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file a path leads to; None if to none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _connected(path: Path | None) -> sqlite3.Connection:
    # The store belongs to one worker thread, which need not be the one that opened it.
    db = sqlite3.connect(":memory:" if path is None else path, timeout=0, isolation_level=None, check_same_thread=False)
    try:
        if path is not None:
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
            version = db.execute("PRAGMA user_version").fetchone()[0]
            tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if tables and version not in _READABLE:
                raise sqlite3.DatabaseError("it is no store of responses, or one of another version")
        db.executescript(_TABLES)
        if path is not None:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
    except BaseException:
        db.close()
        raise
    return db
