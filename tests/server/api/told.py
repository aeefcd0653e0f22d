"""The error objects that answers and streams end with."""

from __future__ import annotations

import json
from typing import Any


def error_of(response: Any, status: int, code: str | None) -> dict[str, Any]:
    """Check the shape of an error answer; return the error object."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    [(name, error)] = response.json().items()
    assert name == "error"
    assert {"message", "type", "param", "code"} <= set(error)
    assert error["code"] == code
    assert isinstance(error["message"], str)
    assert 0 < len(error["message"]) < 400
    return error


def last_error(events: str) -> dict[str, Any]:
    """The error that ends a stream, just before [DONE]."""
    *_, error, done, end = events.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return json.loads(error.removeprefix("data: "))["error"]
