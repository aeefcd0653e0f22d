"""The process that reads one PDF: bytes on stdin, its text as JSON on stdout, bounded in time and memory.

`python -m longreach.documents.pdf_child MOST_TEXT_BYTES SECONDS`. `pdf_process` and `api.service.pdf_reader` start it,
and nothing else imports pypdf.
"""

from __future__ import annotations

import io
import json
import resource
import signal
import sys
from dataclasses import asdict

from pypdf import PdfReader
from pypdf.errors import DependencyError, LimitReachedError

from longreach.documents.pdf import (
    CHILD_MEMORY_BYTES,
    EncryptedPdfError,
    NoTextInPdfError,
    PdfError,
    PdfText,
    PdfTooLargeError,
)
from longreach.documents.pdf_process import OUT_OF_MEMORY

# Letters that fonts draw as one; words with them would not be found.
_LIGATURES = str.maketrans(
    {"\ufb00": "ff", "\ufb01": "fi", "\ufb02": "fl", "\ufb03": "ffi", "\ufb04": "ffl", "\ufb05": "st", "\ufb06": "st"}
)


def read_pdf(data: bytes, most_bytes: int) -> PdfText:
    """The text of a PDF, which may have `most_bytes` in UTF-8. Call this in a process that may be ended.

    Raises:
        PdfError: it cannot be read, or there is no text in it.
        MemoryError: it takes too much memory.
    """
    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise EncryptedPdfError("needs a password; save a copy without one, as `qpdf --decrypt a.pdf b.pdf` does")
        pages = len(reader.pages)
    except DependencyError:
        raise EncryptedPdfError(
            "is encrypted with AES, for which the Python package cryptography is missing here; install that, or save a "
            "copy without encryption, as `qpdf --decrypt a.pdf b.pdf` does"
        ) from None
    except (PdfError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - pypdf raises anything for a broken file
        raise _damaged(error) from None
    written: list[str] = []
    size = without = 0
    broken: Exception | None = None
    for number in range(pages):
        found, problem = _page(reader, number)
        broken, without = broken or problem, without + (not found)
        kind = ": cannot be read" if problem is not None else "" if found else ": no text"
        part = f"[page {number + 1}{kind}]\n{found}\n" if found else f"[page {number + 1}{kind}]\n"
        size += len(part.encode()) + 1
        if size > most_bytes:
            raise PdfTooLargeError(f"has more than {most_bytes} bytes of text; send a part of it")
        written.append(part)
    if without < pages:
        return PdfText("\n".join(written), pages, without)
    if isinstance(broken, LimitReachedError):
        raise PdfTooLargeError("has pages that unpack to more than can be read; send its text instead")
    if broken is not None:
        raise _damaged(broken)
    raise NoTextInPdfError(
        "has no text in it: its pages were scanned, or are empty. OCR it first, as `ocrmypdf a.pdf b.pdf` does"
    )


def _page(reader: PdfReader, number: int) -> tuple[str, Exception | None]:
    """The text of a page; or none, and why the page cannot be read."""
    try:
        found = reader.pages[number].extract_text()
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - as in `read_pdf`
        return "", error
    clean = found.translate(_LIGATURES).replace("\0", "").encode("utf-8", "replace").decode()
    clean = "\n".join(line.rstrip() for line in clean.splitlines()).strip("\n")
    return clean if any(character.isalnum() for character in clean) else "", None


def _damaged(error: Exception) -> PdfError:
    return PdfError(
        f"is a damaged PDF ({type(error).__name__}); mend it, as `qpdf a.pdf b.pdf` does, or export it anew"
    )


def main() -> None:
    """The process; see the module."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    most_bytes, seconds = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    if sys.platform == "linux":  # elsewhere it is not kept, or refused
        resource.setrlimit(resource.RLIMIT_AS, (CHILD_MEMORY_BYTES, CHILD_MEMORY_BYTES))
    try:
        answer = asdict(read_pdf(sys.stdin.buffer.read(), most_bytes))
    except PdfError as error:
        answer = {"error": str(error), "code": error.code}
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)
    sys.stdout.buffer.write(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
