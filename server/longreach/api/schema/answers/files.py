"""The answers of `/v1/files`: OpenAI's objects, and those of Anthropic's protocol."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

import msgspec

from longreach.documents.document import Document, file_id

_STATUS: dict[str, Literal["uploaded", "processed", "error"]] = {"ready": "processed", "failed": "error"}


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """A kept text as one of OpenAI's files.

    `status` is `processed` once it has been read into the prefix cache, and `error` where that failed. Times are
    seconds since 1970.
    """

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["uploaded", "processed", "error"]
    expires_at: int | None
    status_details: str | None


class FileList(msgspec.Struct, frozen=True):
    """A page of the files."""

    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class DeletedFile(msgspec.Struct, frozen=True):
    """The file is no longer kept."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class FileMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """A kept text as one of Anthropic's files."""

    id: str
    type: Literal["file"] = "file"
    filename: str
    mime_type: str
    size_bytes: int
    created_at: str
    downloadable: bool = True


class FileMetadataPage(msgspec.Struct, frozen=True):
    """A page of the files, in Anthropic's protocol."""

    data: list[FileMetadata]
    has_more: bool
    first_id: str | None
    last_id: str | None


class FileDeletion(msgspec.Struct, frozen=True):
    """The file is no longer kept, in Anthropic's protocol."""

    id: str
    type: Literal["file_deleted"] = "file_deleted"


def file_object(document: Document) -> FileObject:
    """A document as OpenAI's clients read it."""
    return FileObject(
        id=file_id(document.id),
        bytes=document.bytes,
        created_at=int(document.created),
        filename=_filename(document),
        purpose=document.metadata.get("purpose", "user_data"),
        status=_STATUS.get(document.state, "uploaded"),
        expires_at=None if document.expires is None else int(document.expires),
        status_details=document.problem,
    )


def file_metadata(document: Document) -> FileMetadata:
    """A document as Anthropic's clients read it."""
    return FileMetadata(
        id=file_id(document.id),
        filename=_filename(document),
        mime_type=document.metadata.get("media_type", "text/plain"),
        size_bytes=document.bytes,
        created_at=datetime.fromtimestamp(int(document.created), UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def _filename(document: Document) -> str:
    return document.name or f"{file_id(document.id)}.txt"
