"""How a PDF is read in a process of its own (`pdf_child`): its command, and what has come of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess

from longreach.documents.pdf import (
    CHILD_MEMORY_BYTES,
    CHILD_SECONDS,
    EncryptedPdfError,
    NoTextInPdfError,
    PdfError,
    PdfText,
    PdfTooLargeError,
)
from longreach.util.safe_path import environment, module_command

# A busy machine may take so many times the processor's time that is allowed.
PATIENCE = 10
OUT_OF_MEMORY = 3  # exit status
_ASKED_TO_END = {signal.SIGINT, signal.SIGHUP, signal.SIGTERM}  # these say nothing of the file
_ERRORS = {kind.code: kind for kind in (PdfError, EncryptedPdfError, NoTextInPdfError, PdfTooLargeError)}


def command(most_bytes: int, seconds: int = CHILD_SECONDS) -> list[str]:
    """The command of the process, which may find so many bytes of text in so many seconds of a processor's time; start
    it with `safe_path.environment`."""
    return module_command("longreach.documents.pdf_child", str(most_bytes), str(seconds))


def outcome(status: int, answer: bytes, seconds: int = CHILD_SECONDS) -> PdfText:
    """What the process has found, by its exit status and its stdout.

    Raises:
        PdfError: the file cannot be read.
        RuntimeError: the process has failed, which says nothing of the file.
    """
    if status == 0:
        found = json.loads(answer)
        if "code" in found:
            raise _ERRORS[found["code"]](found["error"])
        return PdfText(**found)
    if status == OUT_OF_MEMORY or (status < 0 and -status not in _ASKED_TO_END):  # ended by one of its limits
        raise PdfTooLargeError(
            f"takes more than {seconds} s or {CHILD_MEMORY_BYTES >> 20} MiB to read; send a part of it, or its text"
        )
    raise RuntimeError(f"the process that reads PDFs ended with status {status}")


def read_apart(data: bytes, most_bytes: int, seconds: int = CHILD_SECONDS) -> PdfText:
    """The text of a PDF, read in a process of its own while this one waits.

    Raises:
        PdfError: it cannot be read.
        RuntimeError: the process has failed.
        OSError: it cannot be started.
    """
    try:
        ended = subprocess.run(  # noqa: S603 - our own module
            command(most_bytes, seconds),
            input=data,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment(os.environ),
            timeout=seconds * PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PdfTooLargeError("takes too long to read; send a part of it, or its text") from None
    return outcome(ended.returncode, ended.stdout, seconds)
