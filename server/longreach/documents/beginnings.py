"""The token ids of documents in memory, so that a question about a long one does not tokenize it again."""

from __future__ import annotations

from collections import OrderedDict

from longreach.text.beginning import Beginning

# 64 MiB, at four bytes a token.
MOST_TOKENS = 16 << 20


class Beginnings:
    """What prompts with a document begin with, by the document's id; the one that was used longest ago makes room.

    Attributes:
        num_tokens: of all that are kept.
    """

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most_tokens = most_tokens
        self._kept: OrderedDict[str, Beginning] = OrderedDict()
        self.num_tokens = 0

    def keep(self, document_id: str, beginning: Beginning) -> None:
        """Prompts with this document begin so. One that is too long for all the room is not kept."""
        self.forget(document_id)
        if len(beginning.ids) > self._most_tokens:
            return
        self._kept[document_id] = beginning
        self.num_tokens += len(beginning.ids)
        while self.num_tokens > self._most_tokens:
            self.forget(next(iter(self._kept)))

    def get(self, document_id: str) -> Beginning | None:
        """What prompts with a document begin with, if that is kept."""
        if (found := self._kept.get(document_id)) is not None:
            self._kept.move_to_end(document_id)
        return found

    def forget(self, document_id: str) -> None:
        """A document is gone."""
        if (gone := self._kept.pop(document_id, None)) is not None:
            self.num_tokens -= len(gone.ids)
