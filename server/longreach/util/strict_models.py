"""Strict models and the errors of their checks, for what comes from outside: requests and settings."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError


class StrictModel(BaseModel):
    """A JSON object with known members of exact types."""

    model_config = ConfigDict(strict=True, extra="forbid", validate_default=False)


def invalid(message: str, code: str = "invalid_value", at: int | str | None = None) -> PydanticCustomError:
    """An error whose message and code reach the caller as they are; `at` is the member of the value that is wrong."""
    return PydanticCustomError("longreach", "{message}", {"message": message, "code": code, "at": at})


def located(error: PydanticCustomError, *place: str | int) -> ValidationError:
    """The error as that of a member, where the check of a whole object finds it."""
    return ValidationError.from_exception_data("object", [InitErrorDetails(type=error, loc=place, input=None)])
