"""Files that a person names: their text, PDFs among them, and folders joined to one text under their paths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from longreach.chat.errors import ChatError
from longreach.documents.pdf import MARK, PdfError, is_pdf
from longreach.documents.pdf_process import read_apart
from longreach.documents.plain_text import NotTextError, text_of
from longreach.errors import quoted

MAX_FILE_BYTES = 32 * 2**20
MAX_PDF_BYTES = 64 * 2**20
# The rules of folders are the playground's, in `files.js`.
_LARGEST_IN_FOLDER = 1_000_000
_HEAD_BYTES = 4096
_GENERATED = frozenset({"node_modules", "__pycache__"})
_LOCKS = frozenset({"package-lock.json", "npm-shrinkwrap.json", "pnpm-lock.yaml", "bun.lockb", "go.sum"})
_ARCHIVE = b"PK\x03\x04"
_MOST_FILES = 20_000


@dataclass(frozen=True)
class FileText:
    """A file's text, and what is to be said of it in a few words."""

    text: str
    told: str


def is_pdf_file(path: Path) -> bool:
    """Whether a file begins as a PDF does.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return is_pdf(file.read(len(MARK)))


def read_file(path: Path) -> FileText:
    """The text of a file or of a PDF.

    Raises:
        ChatError: it cannot be read, is no text, or is too long for a request.
    """
    shown = quoted(str(path), 256)
    try:
        if path.is_dir():
            raise ChatError(f"{shown} is a folder; /folder joins the files in it")
        most = MAX_PDF_BYTES if (is_document := is_pdf_file(path)) else MAX_FILE_BYTES
        if path.stat().st_size > most:
            raise ChatError(f"{shown} has more than {most} bytes")
        if not is_document:
            text = text_of(path.read_bytes(), str(path))
            return FileText(text, f"{len(text):,} characters")
        found = read_apart(path.read_bytes(), MAX_FILE_BYTES)
    except NotTextError as error:
        raise ChatError(str(error)) from None
    except PdfError as error:
        raise ChatError(f"{shown} {error}") from None
    except OSError as error:
        raise ChatError(f"{shown}: {error.strerror}") from None
    without = f", {found.pages_without_text:,} of them without text" if found.pages_without_text else ""
    return FileText(found.text, f"{found.pages:,} pages{without}, {len(found.text):,} characters")


def read_folder(folder: Path) -> FileText:
    """The files below a folder as one text, sorted by path, each behind a line `=== path ===`.

    Files that are no text, lock files, those over 1 MB, and folders that are hidden or generated are left out, and
    counted in what is told.

    Raises:
        ChatError: it is no folder, cannot be read, or has no text.
    """
    shown = quoted(str(folder), 256)
    if not folder.is_dir():
        raise ChatError(f"{shown} is no folder" + ("; /file takes a single file" if folder.is_file() else ""))
    parts: list[str] = []
    skipped: Counter[str] = Counter()
    size = 0
    try:
        root = folder.resolve()
        for path in sorted(_below(root, skipped), key=lambda one: one.relative_to(root).as_posix()):
            named = (Path(root.name) / path.relative_to(root)).as_posix()
            kind, text = _judged(path)
            if text is None:
                skipped[kind] += 1
                continue
            parts.append(f"=== {named} ===\n{text.rstrip(chr(10))}\n\n")
            size += len(text)
            if size > MAX_FILE_BYTES or len(parts) > _MOST_FILES:
                raise ChatError(f"{shown} has more than {MAX_FILE_BYTES} bytes of text; take a folder inside")
    except OSError as error:
        raise ChatError(f"{quoted(error.filename or str(folder), 256)}: {error.strerror}") from None
    left_out = ", ".join(f"{count:,} {kind}" for kind, count in sorted(skipped.items()))
    if not parts:
        raise ChatError(f"there is no text in {shown}" + (f"; left out: {left_out}" if left_out else ""))
    text = "".join(parts)
    told = f"{len(parts):,} files, {len(text):,} characters"
    return FileText(text, told + (f"; left out: {left_out}" if left_out else ""))


def _below(folder: Path, skipped: Counter[str]) -> Iterator[Path]:
    for entry in folder.iterdir():
        if entry.is_symlink():  # it may lead out of the folder, or round in a circle
            skipped["links"] += 1
        elif not entry.is_dir():
            yield entry
        elif entry.name.startswith("."):
            skipped["hidden folders"] += 1
        elif entry.name in _GENERATED:
            skipped[entry.name] += 1
        else:
            yield from _below(entry, skipped)


def _judged(path: Path) -> tuple[str, str | None]:
    """Why a file in a folder is left out, or its text."""
    if path.name.endswith(".lock") or path.name in _LOCKS:
        return "lock files", None
    if not path.is_file():
        return "special files", None
    if path.stat().st_size > _LARGEST_IN_FOLDER:
        return "files over 1 MB", None
    data = path.read_bytes()
    if b"\0" in data[:_HEAD_BYTES] or data.startswith((MARK, _ARCHIVE)):
        return "binary files", None
    try:
        return "", data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return "", data.decode("cp1252", "replace")
