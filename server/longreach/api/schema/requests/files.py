"""The form of `POST /v1/files`: what stands beside the file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PlainValidator, model_validator

from longreach.api.schema.requests.fields import StrictModel, described, invalid
from longreach.api.schema.requests.parse import parse
from longreach.documents.document import NewDocument, Use

FILE = "file"
_MAX_NAME = 256
_SECONDS = (3600, 2_592_000)  # OpenAI's bounds: an hour to thirty days
_TAKEN = ("user_data", "assistants")
_OTHERS = {
    "fine-tune": "nothing is trained here",
    "batch": "batches are not run here; send the requests with `service_tier: flex`",
    "vision": "this server reads text alone",
    "evals": "nothing is evaluated here",
}


def _purpose(value: object) -> object:
    if value in _TAKEN:
        return value
    taken = " or ".join(f"`{one}`" for one in _TAKEN)
    why = _OTHERS.get(value) if isinstance(value, str) else None
    raise invalid(f"must be {taken}{'' if why is None else f': {why}'}", "unsupported_value")


def _seconds(value: object) -> int:
    text = value if isinstance(value, str) else ""
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and _SECONDS[0] <= int(text) <= _SECONDS[1]):
        raise invalid(f"must be an integer from {_SECONDS[0]} to {_SECONDS[1]}")
    return int(text)


def _filename(value: str) -> str:
    if not value.isprintable():
        raise invalid("a file's name must have no control characters")
    return value


Filename = Annotated[str, Field(min_length=1, max_length=_MAX_NAME), AfterValidator(_filename)]
_SECONDS_SCHEMA = {"type": "integer", "minimum": _SECONDS[0], "maximum": _SECONDS[1]}


class FileForm(StrictModel):
    """Keep a text file or a PDF."""

    file: Annotated[
        Filename | None,
        Field(description="The file: text in UTF-8, or a PDF."),
        described({"type": "string", "format": "binary"}),
    ] = None
    purpose: Annotated[
        Literal["user_data", "assistants"] | None, PlainValidator(_purpose), described({"enum": [*_TAKEN]})
    ] = Field(None, description="Both mean the same. Files for other purposes are refused.")
    anchor: Literal["created_at"] | None = Field(
        None, alias="expires_after[anchor]", description="What `expires_after[seconds]` counts from."
    )
    seconds: Annotated[int | None, PlainValidator(_seconds), described(_SECONDS_SCHEMA)] = Field(
        None, alias="expires_after[seconds]", description="By default a file expires as documents do."
    )

    @model_validator(mode="after")
    def _check_together(self) -> FileForm:
        if (self.anchor is None) != (self.seconds is None):
            raise invalid("`expires_after` needs both `anchor` and `seconds`")
        return self


def file_document(fields: Mapping[str, str], filename: str | None, media_type: str | None, use: Use) -> NewDocument:
    """What is to be kept of a file, by the fields of its form.

    Raises:
        InvalidRequestError: they are wrong.
    """
    form = parse(FileForm, {**fields, FILE: filename})
    metadata = {"purpose": form.purpose or _TAKEN[0], "media_type": (media_type or "text/plain")[:_MAX_NAME]}
    return NewDocument(
        kind="text", use=use, name=form.file, ttl=form.seconds, renews=form.seconds is None, metadata=metadata
    )
