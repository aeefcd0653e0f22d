"""What is counted of documents."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DocumentCounts:
    """What is kept now, and what has happened since the start.

    Attributes:
        documents, pinned: those that are kept, and those of them that are pinned.
        bytes, most_bytes: what they take, and may take.
        tokens: that prompts with them begin with.
        waiting: that wait to be read.
        reads: documents that were read ahead.
        uses: requests that began with a document.
        evicted, expired: documents that made room, and whose time had come.
    """

    documents: int
    pinned: int
    bytes: int
    most_bytes: int
    tokens: int
    waiting: int
    reads: int
    uses: int
    evicted: int
    expired: int
