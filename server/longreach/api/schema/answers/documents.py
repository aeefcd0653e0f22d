"""The answers of `/v1/documents`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from longreach.documents.document import Document
from longreach.engine.looks import Looked


class DocumentProblem(msgspec.Struct, frozen=True):
    """Why a document could not be read."""

    message: str


class TierUse(msgspec.Struct, frozen=True):
    """What a tier of the cache has of a document: tokens of its beginning, and bytes of their pages and states."""

    tokens: int
    bytes: int


class DocumentCache(msgspec.Struct, frozen=True, kw_only=True):
    """What is cached of a document now.

    A prompt with it would take so many tokens from each tier. `seconds_to_read` is how long reading all of it again
    would take, `seconds_to_first_token` how long a question's first token takes, both on an idle server; null before
    the server has read anything.
    """

    gpu: TierUse
    host: TierUse
    disk: TierUse
    seconds_to_read: float | None
    seconds_to_first_token: float | None


class DocumentObject(msgspec.Struct, frozen=True, kw_only=True):
    """A kept document.

    `state` is `uploading` until all of it has come, `reading` until it has been read into the prefix cache once, then
    `ready`, or `failed`. `sha256` is the digest of the contents in hex, of a text in UTF-8; null while they come.
    `tokens` are those that prompts with it begin with. Times are seconds since 1970.
    `cache` is told of one document alone; null where the engine cannot be asked at this moment.
    """

    id: str
    object: Literal["document"] = "document"
    created_at: int
    name: str | None
    kind: Literal["text", "messages", "tokens"]
    use: Literal["chat", "completion"]
    state: Literal["uploading", "reading", "ready", "failed"]
    error: DocumentProblem | None
    bytes: int
    sha256: str | None
    tokens: int | None
    pinned: bool
    ttl_seconds: float | None
    expires_at: int | None
    last_used_at: int
    uses: int
    cache_salt: str
    attention: dict[str, Any] | None
    cache: DocumentCache | UnsetType | None = UNSET


class DocumentList(msgspec.Struct, frozen=True):
    """A page of the documents."""

    data: list[DocumentObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class DeletedDocument(msgspec.Struct, frozen=True):
    """The document is no longer kept."""

    id: str
    object: Literal["document"] = "document"
    deleted: bool = True


def document_object(document: Document) -> DocumentObject:
    """A document as it is told."""
    return DocumentObject(
        id=document.id,
        created_at=int(document.created),
        name=document.name,
        kind=document.kind,
        use=document.use,
        state=document.state,
        error=None if document.problem is None else DocumentProblem(document.problem),
        bytes=document.bytes,
        sha256=document.digest or None,
        tokens=document.tokens,
        pinned=document.pinned,
        ttl_seconds=document.ttl,
        expires_at=None if document.expires is None else int(document.expires),
        last_used_at=int(document.used),
        uses=document.uses,
        cache_salt=document.cache_salt,
        attention=None if document.attention is None else msgspec.to_builtins(document.attention),
    )


def document_cache(looked: Looked) -> DocumentCache:
    """What is cached of a document, as it is told."""
    return DocumentCache(
        gpu=TierUse(looked.gpu, looked.gpu_bytes),
        host=TierUse(looked.host, looked.host_bytes),
        disk=TierUse(looked.disk, looked.disk_bytes),
        seconds_to_read=looked.seconds_whole,
        seconds_to_first_token=looked.seconds_alone,
    )
