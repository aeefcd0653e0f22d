"""A SQLite database in memory or in a file that one process has open, and changes that happen whole or not at all."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class StoreFileError(Exception):
    """The database's file cannot be used; the message says why."""


class FileInUseError(StoreFileError):
    """Another process has the database's file open."""


def file_error(error: Exception) -> StoreFileError:
    """What the operator is told of an error at the start."""
    if "locked" in str(error):
        return FileInUseError("another server has it open")
    cure = "; without the file, the server makes a new one" if isinstance(error, sqlite3.DatabaseError) else ""
    return StoreFileError(f"{error}{cure}")


class DatabaseFile:
    """A connection to the database in memory (`path` None) or in a file, which no other process may have open.

    Not for several threads at once.

    Arguments:
        tables: statements that make the tables where there are none.
        version: of the tables; another one's file is refused.
        what: what the file keeps, for messages.
        readable: older versions, to whose files `tables` adds what they lack.

    Raises:
        StoreFileError: the file is not of this kind, is another server's, or cannot be opened.
    """

    def __init__(self, path: Path | None, tables: str, version: int, what: str, readable: tuple[int, ...] = ()) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        try:
            if path is not None:
                # Nobody but the server's user may read prompts; SQLite gives its other files the same mode.
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
                self._file = _identity(path)
            self._db = _connected(path, tables, version, what, (version, *readable))
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


def _connected(
    path: Path | None, tables: str, version: int, what: str, readable: tuple[int, ...]
) -> sqlite3.Connection:
    # The store belongs to one worker thread, which need not be the one that opened it.
    db = sqlite3.connect(":memory:" if path is None else path, timeout=0, isolation_level=None, check_same_thread=False)
    try:
        if path is not None:
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
            found = db.execute("PRAGMA user_version").fetchone()[0]
            others = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if others and found not in readable:
                raise sqlite3.DatabaseError(f"it is no store of {what}, or one of another version")
        db.executescript(f"{tables}\nPRAGMA user_version = {version};")
        if path is not None:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
    except BaseException:
        db.close()
        raise
    return db
