"""The database of the kept responses: its tables, and the objects in its rows."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import orjson

from longreach.util import exact_json
from longreach.util.database_file import DatabaseFile

_VERSION = 3
_READABLE = (2,)  # it has no requests
_TABLES = """
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
"""


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


class StoreDatabase(DatabaseFile):
    """As `DatabaseFile`, with the tables of the kept responses.

    Raises:
        StoreFileError: the file is not a store, is another server's, or cannot be opened.
    """

    def __init__(self, path: Path | None) -> None:
        super().__init__(path, _TABLES, _VERSION, "responses", _READABLE)
