"""Files in messages: as they come in a request, and as they stand in its texts until they are looked up.

A file that comes with the request is text at once. One that is kept is named: its id stands in the message's text,
between marks of a character that no text can hold. Whoever makes a prompt of the message puts the file in its place
first. A mark that was forgotten is no text either, and no tokenizer takes it.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

from longreach.api.schema.requests.fields import invalid
from longreach.documents.plain_text import NotTextError, text_of
from longreach.documents.wrapping import wrapped

# A lone surrogate, as `marks.GUARD` and those of `prompt_places`, and none of them is this one.
_MARK = "\ud803"
_MARKED = re.compile(f"{_MARK}([^{_MARK}]*){_MARK}")
_ID = re.compile(r"[A-Za-z0-9_-]{1,256}")
_MAX_NAME = 256

FILE_MEMBERS: dict[str, Any] = {
    "file_id": {"type": "string"},
    "file_data": {"type": "string"},
    "filename": {"type": "string"},
}


def file_text(members: Mapping[str, Any], at: int | str | None = None) -> str:
    """What stands in a message for a file: its text, or the mark of one that is kept.

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
    try:
        media_type, data = _decoded(given["file_data"])
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


def files_in(text: str | None) -> list[str]:
    """The ids of the files that stand in a text, in their order."""
    return _MARKED.findall(text) if text and _MARK in text else []


def named_files(texts: Iterable[str | None]) -> list[str]:
    """The ids of the files that stand in `texts`, each once, in their order."""
    return [*dict.fromkeys(name for text in texts for name in files_in(text))]


def with_files(text: str, files: Mapping[str, str]) -> str:
    """A text with `files`, as a message has them, in place of their ids."""
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
