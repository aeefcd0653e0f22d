"""What `POST /v1/text` answers."""

from __future__ import annotations

from typing import Literal

import msgspec


class FileText(msgspec.Struct, frozen=True, kw_only=True):
    """The text of a file.

    `pages` is how many pages a PDF has, and `pages_without_text` how many of them have none. Both are null for text.
    """

    object: Literal["text"] = "text"
    text: str
    pages: int | None
    pages_without_text: int | None
