"""The documents that are coming at this moment: whoever wants one waits for its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


class Uploads:
    """All uploads of a server that have not ended."""

    def __init__(self) -> None:
        self._ended: dict[str, asyncio.Event] = {}

    @contextlib.contextmanager
    def going_on(self, document_id: str) -> Iterator[None]:
        """A document comes until this is left, however that ends."""
        ended = self._ended[document_id] = asyncio.Event()
        try:
            yield
        finally:
            del self._ended[document_id]
            ended.set()

    def __contains__(self, document_id: str) -> bool:
        return document_id in self._ended

    async def wait(self, document_id: str) -> None:
        """Wait until a document does not come any more; no time where it does not come."""
        if (ended := self._ended.get(document_id)) is not None:
            await ended.wait()
