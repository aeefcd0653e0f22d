"""Files in messages: as they come in a request, and as they stand in its texts until they are looked up.

A text that comes with the request is text at once. A file that is kept is named: its id stands in the message's text,
between marks of a character that no text can hold. A PDF that comes with the request stands there itself in Base64,
since reading it takes long. Whoever makes a prompt of the message puts the text in its place first. A mark that was
forgotten is no text either, and no tokenizer takes it.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

from longreach.api.schema.requests.fields import invalid
from longreach.documents.pdf import is_pdf
from longreach.documents.plain_text import NotTextError, text_of
from longreach.documents.wrapping import wrapped

# A lone surrogate, as `marks.GUARD` and those of `prompt_places`, and none of them is this one.
_MARK = "\ud803"
_MARKED = re.compile(f"{_MARK}([^{_MARK}]*){_MARK}")
_ID = re.compile(r"[A-Za-z0-9_-]{1,256}")
_MAX_NAME = 256
_PDF = ":"  # no id has one, and no Base64

FILE_MEMBERS: dict[str, Any] = {
    "file_id": {"type": "string"},
    "file_data": {"type": "string"},
    "filename": {"type": "string"},
}


def file_text(members: Mapping[str, Any], at: int | str | None = None) -> str:
    """What stands in a message for a file: its text, or the mark of a PDF or of one that is kept.

    `members` are `file_id`, or `file_data` (Base64, alone or in a data URL) and `filename`. Errors name the place `at`.

    Raises:
        PydanticCustomError: neither or both are there, or the data are no text.
    """
    given = {name: members[name] for name in FILE_MEMBERS if members.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, str):
            raise invalid(f"a file's `{name}` must be a string", "invalid_type", at=at)
    name = given.get("filename")
    if name is not None and len(name) > _MAX_NAME:
        raise invalid(f"a file's `filename` must have at most {_MAX_NAME} characters", at=at)
    if ("file_id" in given) == ("file_data" in given):
        raise invalid("a file needs `file_id` or `file_data`, and not both", "missing_required_parameter", at=at)
    if "file_id" in given:
        return reference(given["file_id"], at)
    return sent_file(given["file_data"], name, None, at)


def sent_file(given: str, name: str | None, media_type: str | None, at: int | str | None = None) -> str:
    """What stands in a message for a file that comes with it, in Base64 or in a data URL.

    Raises:
        PydanticCustomError: it is neither, or the data are no text.
    """
    try:
        declared, data = _decoded(given)
        media_type = declared or media_type
        if is_pdf(data, media_type):
            return pdf_mark(data, name)
        return wrapped(text_of(data, name, media_type), name)
    except NotTextError as error:
        raise invalid(str(error), "unsupported_file", at=at) from None
    except ValueError:
        raise invalid("`file_data` must be Base64, alone or in a data URL", at=at) from None


def reference(file_id: str, at: int | str | None = None) -> str:
    """What stands in a message for a file that is kept.

    Raises:
        PydanticCustomError: this is the id of no file.
    """
    if _ID.fullmatch(file_id) is None:
        raise invalid("`file_id` must be the id of a file: letters, digits, `_` and `-`", at=at)
    return f"{_MARK}{file_id}{_MARK}"


@dataclass(frozen=True)
class SentPdf:
    """A PDF that came with a request, and its name."""

    data: bytes
    name: str | None


def pdf_mark(data: bytes, name: str | None) -> str:
    """What stands in a message for a PDF that came with it."""
    return f"{_MARK}{_PDF}{json.dumps(name)}{_PDF}{base64.b64encode(data).decode()}{_MARK}"


def is_sent_pdf(marked: str) -> bool:
    """Whether what `files_in` tells is a PDF itself, and not the id of a file."""
    return marked.startswith(_PDF)


def sent_pdf(marked: str) -> SentPdf:
    """A PDF that stands in a text itself. It may be long."""
    name, _, data = marked.removeprefix(_PDF).rpartition(_PDF)
    return SentPdf(base64.b64decode(data), json.loads(name))


def files_in(text: str | None) -> list[str]:
    """The files that stand in a text, in their order: ids, and PDFs that `sent_pdf` reads."""
    return _MARKED.findall(text) if text and _MARK in text else []


def named_files(texts: Iterable[str | None]) -> list[str]:
    """The files that stand in `texts`, each once, in their order."""
    return [*dict.fromkeys(name for text in texts for name in files_in(text))]


def with_files(text: str, files: Mapping[str, str]) -> str:
    """A text with `files`, as a message has them, in place of their marks."""
    return _MARKED.sub(lambda mark: files[mark[1]], text) if _MARK in text else text


def _decoded(given: str) -> tuple[str | None, bytes]:
    """The media type and the bytes of a data URL (RFC 2397), or of bare Base64.

    Raises:
        ValueError: it is neither.
    """
    media_type = None
    if given[:5].lower() == "data:":
        head, comma, given = given[5:].partition(",")
        if not comma:
            raise ValueError("a data URL has a comma")
        media_type, _, coding = head.rpartition(";")
        if coding.strip().lower() != "base64":
            return head or None, unquote_to_bytes(given)
    try:
        return media_type or None, base64.b64decode(given, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError("no Base64") from error
