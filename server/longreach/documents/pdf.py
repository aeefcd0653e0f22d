"""The text of a PDF, page by page, as pypdf finds it: what a caller gets, and what can be wrong with the file.

    [page 1]
    The text of the first page.

    [page 2: no text]

A model can name the page that an answer comes from, and somebody who reads the text sees which pages have none. A PDF
from a stranger can take any time and memory, so it is read in a process of its own: by `pdf_process` for one user, by
`api.service.pdf_reader` for a server.
"""

from __future__ import annotations

from dataclasses import dataclass

MEDIA_TYPES = frozenset({"application/pdf", "application/x-pdf"})
MARK = b"%PDF-"
# What a child may take.
CHILD_SECONDS = 60
CHILD_MEMORY_BYTES = 1 << 30


class PdfError(Exception):
    """A PDF cannot be read. The message goes on behind the file's name; `code` says what is wrong to programs."""

    code = "damaged_pdf"


class EncryptedPdfError(PdfError):
    """It asks for a password, or is encrypted in a way that needs another package."""

    code = "encrypted_pdf"


class NoTextInPdfError(PdfError):
    """No page has text: it was scanned."""

    code = "no_text_in_pdf"


class PdfTooLargeError(PdfError):
    """It takes too much time or memory, or has too much text."""

    code = "pdf_too_large"


@dataclass(frozen=True)
class PdfText:
    """What was found in a PDF.

    Attributes:
        text: of all pages, each behind a line with its number.
        pages: how many there are.
        pages_without_text: how many of them have none, or cannot be read.
    """

    text: str
    pages: int
    pages_without_text: int


def is_pdf(head: bytes | bytearray, media_type: str | None = None) -> bool:
    """Whether a file is a PDF, by its first bytes or by what its sender says."""
    kind = (media_type or "").partition(";")[0].strip().lower()
    return kind in MEDIA_TYPES or head[: len(MARK)] == MARK
