"""The answers of `/v1/documents`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from longreach.documents.document import Document


class DocumentProblem(msgspec.Struct, frozen=True):
    """Why a document could not be read."""

    message: str


class DocumentObject(msgspec.Struct, frozen=True, kw_only=True):
    """A kept document.

    `state` is `uploading` until all of it has come, `reading` until it has been read into the prefix cache once, then
    `ready`, or `failed`. `tokens` are those that prompts with it begin with. Times are seconds since 1970.
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
    tokens: int | None
    pinned: bool
    ttl_seconds: float | None
    expires_at: int | None
    last_used_at: int
    uses: int
    cache_salt: str
    attention: dict[str, Any] | None


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
        tokens=document.tokens,
        pinned=document.pinned,
        ttl_seconds=document.ttl,
        expires_at=None if document.expires is None else int(document.expires),
        last_used_at=int(document.used),
        uses=document.uses,
        cache_salt=document.cache_salt,
        attention=None if document.attention is None else msgspec.to_builtins(document.attention),
    )
