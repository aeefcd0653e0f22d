"""The token ids that prompts with a document begin with: made of its contents, and held for a while."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from longreach.api.service.document_prompt import Prefix, prefix_of
from longreach.api.service.encode import TextEncoder
from longreach.api.service.loaded_document import LoadedDocument
from longreach.documents.document import Document

if TYPE_CHECKING:
    from longreach.api.service.service import Service

# Of all that are held: 16 MiB.
_MOST_TOKENS = 4 << 20


class DocumentPrefixes:
    """The prefixes of the documents that were used last, of at most `most_tokens` tokens together."""

    def __init__(self, service: Service, most_tokens: int = _MOST_TOKENS) -> None:
        self._service = service
        self._most_tokens = most_tokens
        self._held: OrderedDict[tuple[str, str | None], array[int]] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """Tokens of all that are held."""
        return sum(map(len, self._held.values()))

    async def of(self, document: Document) -> list[int]:
        """The prefix of a document, as `prefix_of` has it.

        Raises:
            DocumentNotFoundError: it is gone.
            ApiError: it does not fit into the context any more, the chat template refuses it, it is of another
                tokenizer, or no model is loaded at this moment.
        """
        held = self._held.get(_key(document))
        if held is not None:
            self._held.move_to_end(_key(document))
            return held.tolist()
        service, owner = self._service, document.owner
        engine, tokenizer = service.require_ready()
        contents = await service.documents.contents(document)
        loaded = await service.reading.call(LoadedDocument.of, document, contents, caller=owner, size=len(contents))
        encoder = TextEncoder(service, tokenizer, engine.info, owner)
        prefix = await prefix_of(service, encoder, loaded, "document")
        self.keep(document, prefix)
        return prefix.ids

    def keep(self, document: Document, prefix: Prefix) -> None:
        """Hold the prefix of a document, and what its text was encoded to."""
        self.hold(document, prefix.ids)
        if prefix.beginning is not None:
            self._service.beginnings.keep(document.id, prefix.beginning)

    def hold(self, document: Document, prefix: Sequence[int]) -> None:
        """Hold the prefix of a document in place of those that were used longest ago."""
        self._held[_key(document)] = array("I", prefix)
        self._held.move_to_end(_key(document))
        while self._held and self.num_tokens > self._most_tokens:
            self._held.popitem(last=False)

    def forget(self, document: Document) -> None:
        """The document is gone."""
        self._held.pop(_key(document), None)


def _key(document: Document) -> tuple[str, str | None]:
    """A prefix depends on the document's name, which its owner may change."""
    return document.id, document.name
