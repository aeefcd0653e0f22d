"""From a decoded JSON body to a checked request, or to an error that names the field."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from longreach.errors import InvalidRequestError, quoted

_SUBJECT = re.compile(r"^[A-Za-z]+ should")

M = TypeVar("M", bound=BaseModel)


def parse(model: type[M], body: object) -> M:
    """Check a decoded JSON body.

    Raises:
        InvalidRequestError: naming the field and what it may be.
    """
    if not isinstance(body, dict):
        raise InvalidRequestError("The request body must be a JSON object.", code="invalid_type")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise as_api_error(error.errors(include_url=False)) from None


def as_demand(message: str) -> str:
    """A message of pydantic's, such as `String should have at most 256 characters`, behind the name of its field."""
    return _SUBJECT.sub("must", message, count=1)


def as_api_error(problems: Sequence[Any]) -> InvalidRequestError:
    """What the caller is told of pydantic's `problems`.

    OpenAI reports one field at a time; an unknown field comes first, being the likelier slip.
    """
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    where = [*problem["loc"]]
    if problem["type"] == "longreach" and problem["ctx"].get("at") is not None:
        where.append(problem["ctx"]["at"])
    param = ".".join(str(part)[:64] for part in where)[:256] or None
    if problem["type"] == "extra_forbidden":
        shown = quoted(".".join(map(str, problem["loc"])))
        return InvalidRequestError(f"Unrecognized request argument: {shown}.", param=param, code="unknown_parameter")
    if problem["type"] == "missing":
        return InvalidRequestError(f"`{param}` is required.", param=param, code="missing_required_parameter")
    message: str = problem["msg"]
    if problem["type"] == "longreach":
        code = problem["ctx"]["code"]
    else:
        code = "invalid_type" if problem["type"].endswith("_type") else "invalid_value"
        message = as_demand(message)
        if isinstance(problem["input"], bool | int | float):
            message += f", got {quoted(problem['input'])}"
    return InvalidRequestError(f"`{param}`: {message}." if param else f"{message}.", param=param, code=code)
