"""The documents that are coming at this moment: whoever wants one waits for its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


class Upload:
    """A document that comes.

    Attributes:
        kept_as: the id under which it is kept: another one where its owner had all of it already.
    """

    def __init__(self, document_id: str) -> None:
        self.kept_as = document_id
        self._ended = asyncio.Event()

    def end(self) -> None:
        """It does not come any more."""
        self._ended.set()

    async def wait(self) -> str:
        """Wait until it has ended, however that was: the id under which it is kept, if it is."""
        await self._ended.wait()
        return self.kept_as


class Uploads:
    """All uploads of a server that have not ended, by their documents' ids."""

    def __init__(self) -> None:
        self._going_on: dict[str, Upload] = {}

    @contextlib.contextmanager
    def going_on(self, document_id: str) -> Iterator[Upload]:
        """A document comes until this is left."""
        upload = self._going_on[document_id] = Upload(document_id)
        try:
            yield upload
        finally:
            del self._going_on[document_id]
            upload.end()

    def get(self, document_id: str) -> Upload | None:
        """The upload of a document, if it goes on."""
        return self._going_on.get(document_id)
