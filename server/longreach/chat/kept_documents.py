"""The documents that a server keeps, as the chat uses them: listed, found, uploaded once, and forgotten."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx

from longreach.chat.errors import ChatError, refusal
from longreach.chat.files import is_pdf_file, read_file
from longreach.documents.plain_text import NotTextError, TextDecoder
from longreach.errors import quoted

_PATH = "/v1/documents"
_PAGE = 100
_CHUNK_BYTES = 1 << 16
_NONE = "this server keeps no documents; /file PATH puts a text itself in front of the next message"
# How a server that has no such URL answers, and one that keeps nothing.
_NO_SUCH_URL = frozenset({404, 405, 501})


@dataclass(frozen=True)
class KeptDocument:
    """A document that is kept.

    Attributes:
        tokens: None until they are known.
        expires: in seconds since 1970; None for never.
        sha256: of its text, in hex; None where the server does not tell it.
    """

    id: str
    name: str | None
    state: str
    bytes: int
    tokens: int | None
    expires: int | None
    sha256: str | None

    @classmethod
    def of(cls, told: dict[str, Any]) -> KeptDocument:
        """A document as the server tells of it."""
        return cls(
            told["id"],
            told.get("name"),
            told.get("state", ""),
            told.get("bytes", 0),
            told.get("tokens"),
            told.get("expires_at"),
            told.get("sha256"),
        )

    @property
    def shown(self) -> str:
        """Its name, or its id where it has none."""
        return self.name or self.id


class KeptDocuments:
    """What a server keeps, asked over `http`. Methods raise a `ChatError` with what the server says."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def all(self) -> list[KeptDocument]:
        """All of them, the newest first."""
        return [*self._listed({})]

    def find(self, reference: str) -> KeptDocument:
        """The one with this id, or else the newest with this name."""
        if reference.startswith("doc-"):
            return KeptDocument.of(self._json("GET", f"{_PATH}/{reference}"))
        found = next(self._listed({"name": reference}), None)
        if found is None:
            raise ChatError(f"no document is named {quoted(reference, 256)}; /documents lists them")
        return found

    def upload(self, path: Path, told: Callable[[int, int], None]) -> tuple[KeptDocument, bool]:
        """Keep a text file or a PDF's text under its name, and whether it was sent: one that is kept with the same
        contents is not.

        `told` is given the bytes that have been sent, and all of them.
        """
        shown = quoted(str(path), 256)
        try:
            if is_pdf_file(path):
                return self._upload_text(path.name, read_file(path).text.encode(), told)
            digest, size = _digest(path)
            if (kept := self._same(path.name, digest)) is not None:
                return kept, False
            with path.open("rb") as file:
                return self._send(path.name, _chunks(file, size, told)), True
        except NotTextError as error:
            raise ChatError(str(error)) from None
        except OSError as error:
            raise ChatError(f"{shown}: {error.strerror}") from None

    def _upload_text(self, name: str, text: bytes, told: Callable[[int, int], None]) -> tuple[KeptDocument, bool]:
        if (kept := self._same(name, hashlib.sha256(text).hexdigest())) is not None:
            return kept, False
        return self._send(name, _chunks(io.BytesIO(text), len(text), told)), True

    def _same(self, name: str, digest: str) -> KeptDocument | None:
        """What is kept already under this name, with this text."""
        for kept in self._listed({"name": name}):
            if kept.sha256 == digest and kept.state != "failed":
                return kept
        return None

    def _send(self, name: str, chunks: Iterator[bytes]) -> KeptDocument:
        headers = {"content-type": "text/plain"}
        return KeptDocument.of(self._json("POST", _PATH, params={"name": name}, content=chunks, headers=headers))

    def forget(self, document: KeptDocument) -> None:
        """Let the server delete it."""
        self._json("DELETE", f"{_PATH}/{document.id}")

    def _listed(self, params: dict[str, Any]) -> Iterator[KeptDocument]:
        page = self._json("GET", _PATH, params={**params, "limit": _PAGE})
        while True:
            yield from map(KeptDocument.of, page["data"])
            if not page.get("has_more"):
                return
            page = self._json("GET", _PATH, params={**params, "limit": _PAGE, "after": page["last_id"]})

    def _json(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        try:
            answer = self._http.request(method, path, **more)
        except httpx.HTTPError as error:
            raise ChatError(f"the server went away: {error or type(error).__name__}") from None
        try:
            told = answer.json()
        except ValueError:
            told = None
        if answer.status_code in _NO_SUCH_URL and path == _PATH:
            raise ChatError(_NONE)
        if answer.status_code >= 400:
            raise ChatError(refusal(answer))
        if not isinstance(told, dict):
            raise ChatError(_NONE)
        return told


def _digest(path: Path) -> tuple[str, int]:
    """The SHA-256 of the text in a file, in hex, and the file's bytes.

    Raises:
        OSError: it cannot be read.
        NotTextError: it is no text.
    """
    decoder, digest, size = TextDecoder(path.name), hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(decoder.feed(chunk).encode())
            size += len(chunk)
    digest.update(decoder.end().encode())
    return digest.hexdigest(), size


def _chunks(file: Any, size: int, told: Callable[[int, int], None]) -> Iterator[bytes]:
    sent = 0
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk
        sent += len(chunk)
        told(sent, size)
