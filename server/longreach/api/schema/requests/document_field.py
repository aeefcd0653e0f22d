"""The field `document` of a request: a kept document that its prompt begins with."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from longreach.api.schema.requests.fields import StrictModel


class DocumentField(StrictModel):
    """A prompt that may begin with a kept document."""

    document: Annotated[str | None, Field(min_length=1, max_length=256)] = Field(
        None,
        description="A document of `/v1/documents` that the prompt begins with: its id, or a name that no other has.",
    )
