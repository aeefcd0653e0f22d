"""The rows of kept documents: the tables, and the values in a row."""

from __future__ import annotations

import sqlite3
from typing import Any

import msgspec

from longreach.documents.document import Document
from longreach.policies.values import AttentionPolicy

VERSION = 1
TABLES = """
PRAGMA auto_vacuum = INCREMENTAL;
PRAGMA secure_delete = ON;
PRAGMA foreign_keys = ON;
CREATE TABLE IF NOT EXISTS documents (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    name TEXT,
    kind TEXT NOT NULL,
    use TEXT NOT NULL,
    state TEXT NOT NULL,
    problem TEXT,
    created REAL NOT NULL,
    used REAL NOT NULL,
    uses INTEGER NOT NULL,
    ttl REAL,
    renews INTEGER NOT NULL,
    expires REAL,
    pinned INTEGER NOT NULL,
    cache_salt TEXT NOT NULL,
    attention BLOB,
    tokenizer TEXT NOT NULL,
    metadata BLOB NOT NULL,
    bytes INTEGER NOT NULL,
    tokens INTEGER,
    digest TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS by_owner ON documents (owner, bytes);
CREATE INDEX IF NOT EXISTS by_name ON documents (owner, name);
CREATE INDEX IF NOT EXISTS by_digest ON documents (owner, digest);
CREATE INDEX IF NOT EXISTS by_expiry ON documents (expires);
CREATE TABLE IF NOT EXISTS pieces (
    number INTEGER PRIMARY KEY,
    document INTEGER NOT NULL REFERENCES documents ON DELETE CASCADE,
    body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS of_document ON pieces (document);
"""

# What a row takes beside the contents, about.
ROW_BYTES = 1024
COLUMNS = (
    "id, owner, name, kind, use, state, problem, created, used, uses, ttl, renews, expires, pinned, cache_salt,"
    " attention, tokenizer, metadata, bytes, tokens, digest"
)
_policy_decoder = msgspec.json.Decoder(AttentionPolicy)
_metadata_decoder = msgspec.json.Decoder(dict[str, str])


def packed(policy: AttentionPolicy | None) -> bytes | None:
    """An attention policy as a row has it."""
    return None if policy is None else msgspec.json.encode(policy, order="sorted")


def document_of(row: tuple[Any, ...]) -> Document:
    """The document of a row with these columns.

    Raises:
        sqlite3.DatabaseError: it is not what was written.
    """
    members = dict(zip(COLUMNS.replace(",", "").split(), row, strict=True))
    try:
        policy, metadata = members["attention"], members["metadata"]
        members["attention"] = None if policy is None else _policy_decoder.decode(policy)
        members["metadata"] = _metadata_decoder.decode(metadata)
    except (msgspec.DecodeError, TypeError):
        raise sqlite3.DatabaseError("a row cannot be read; the file is damaged") from None
    for name in ("renews", "pinned"):
        members[name] = bool(members[name])
    return Document(**members)
