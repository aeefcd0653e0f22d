"""The functions that an answer may call."""

from __future__ import annotations

import secrets
import string
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from longreach.text.parts import Part, ToolCall

NewId = Callable[[], str]


def openai_id() -> str:
    """An id as OpenAI's API has them."""
    return f"call_{uuid.uuid4().hex[:24]}"


def mistral_id() -> str:
    """An id as templates of Mistral's models ask for: nine letters and digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class Offered:
    """The functions of one request, as the chat template is given them, and the ids of their calls.

    Attributes:
        names: of the functions.
    """

    def __init__(self, tools: Iterable[Mapping[str, Any]] = (), new_id: NewId = openai_id) -> None:
        functions = [tool["function"] for tool in tools]
        self._parameters: dict[str, Any] = {one["name"]: one.get("parameters") or {} for one in functions}
        self.names = tuple(self._parameters)
        self._new_id = new_id

    def parameters(self, name: str) -> dict[str, Any]:
        """The JSON schema of a function's arguments."""
        return self._parameters[name]

    def call(self, name: str) -> Part:
        """The beginning of a call."""
        return Part("call", call=ToolCall(self._new_id(), name))
