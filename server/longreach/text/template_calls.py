"""What a chat template asks of the calls in earlier answers: the form of their ids, and that of their arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longreach.errors import InvalidRequestError
from longreach.text.calls.offered import NewId, mistral_id, openai_id
from longreach.text.chat_template import ChatTemplate


@dataclass(frozen=True)
class TemplateCalls:
    """The form of calls that a template takes.

    Attributes:
        new_id: makes ids that it takes.
        arguments_are_text: it wants arguments as the JSON text that they are, and not as an object.
    """

    new_id: NewId = openai_id
    arguments_are_text: bool = False

    @classmethod
    def of(cls, template: ChatTemplate) -> TemplateCalls:
        """Try a conversation with a call, in one form after another; the usual one if the template takes none."""
        for arguments_are_text in (False, True):
            for new_id in (openai_id, mistral_id):
                arguments = "{}" if arguments_are_text else {}
                if _takes(template, _conversation(new_id(), arguments)):
                    return cls(new_id, arguments_are_text)
        return cls()


def _takes(template: ChatTemplate, messages: list[dict[str, Any]]) -> bool:
    function = {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}}
    try:
        template.render(messages, [{"type": "function", "function": function}])
    except InvalidRequestError:
        return False
    return True


def _conversation(call_id: str, arguments: str | dict[str, Any]) -> list[dict[str, Any]]:
    call = {"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}}
    return [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "Rain.", "name": "look", "tool_call_id": call_id},
    ]
