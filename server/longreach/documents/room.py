"""What documents may take, and which of them make room for others: those used longest ago, of who keeps the most."""

from __future__ import annotations

from dataclasses import dataclass

from longreach.documents.errors import DocumentQuotaError, DocumentTooLargeError
from longreach.documents.tables import ROW_BYTES
from longreach.util.database_file import DatabaseFile


@dataclass(frozen=True)
class Limits:
    """What may be kept: bytes in all and of one owner, documents of one owner, and seconds after the last use."""

    max_bytes: int
    owner_bytes: int
    owner_documents: int
    max_seconds: float


def rows_that_make_room(
    db: DatabaseFile, limits: Limits, owner: str, size: int, *, new_document: bool = False, held: int = 0
) -> list[int]:
    """The rows that have to go, so that `size` bytes more of a document that has `held` may be kept.

    Raises:
        DocumentTooLargeError, DocumentQuotaError: there is none.
    """
    more = size + (ROW_BYTES if new_document else 0)
    for most, flag in (
        (limits.owner_bytes, "--documents-bytes-per-key"),
        (limits.max_bytes, "--documents-bytes"),
    ):
        if held + size + ROW_BYTES > most:
            raise DocumentTooLargeError(held + size, most - ROW_BYTES, flag)
    count, own = _sizes(db, "owner = ?", owner)
    if new_document and count >= limits.owner_documents:
        raise DocumentQuotaError(
            f"{count} documents are kept for this key, as many as may be (--documents-per-key). DELETE one of them "
            "first."
        )
    # Where one key may have all, its own documents make room.
    if own + more > limits.owner_bytes and limits.owner_bytes < limits.max_bytes:
        raise DocumentQuotaError(
            f"{own} bytes of documents are kept for this key; {more} more are over the {limits.owner_bytes} that "
            "it may have (--documents-bytes-per-key). DELETE some of them first."
        )
    _, total = _sizes(db, "1")
    movable = "NOT pinned AND state != 'uploading'"
    _, evictable = _sizes(db, movable)
    if total - evictable + more > limits.max_bytes:
        raise DocumentQuotaError(
            f"{total - evictable} of {limits.max_bytes} bytes (--documents-bytes) are pinned documents, which make "
            f"no room for {more} more. Unpin or DELETE some of them first.",
            code="documents_pinned",
        )
    rows: list[int] = []
    while total + more > limits.max_bytes:
        left = f"{movable} AND number NOT IN ({','.join(map(str, rows))})"
        number, size_of_one = db.execute(
            f"SELECT number, bytes + {ROW_BYTES} FROM documents WHERE {left} AND owner = (SELECT owner FROM"  # noqa: S608
            f" documents WHERE {left} GROUP BY owner ORDER BY sum(bytes) DESC LIMIT 1) ORDER BY used, number"
        ).fetchone()
        rows.append(number)
        total -= size_of_one
    return rows


def _sizes(db: DatabaseFile, which: str, *values: object) -> tuple[int, int]:
    """Documents, and the bytes that they take."""
    row = db.execute(
        f"SELECT count(*), coalesce(sum(bytes + {ROW_BYTES}), 0) FROM documents WHERE {which}",  # noqa: S608
        values,
    ).fetchone()
    return row[0], row[1]
