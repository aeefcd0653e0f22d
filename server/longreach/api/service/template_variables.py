"""What a request says for the chat template, in the words that the model's template reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longreach.errors import InvalidRequestError
from longreach.text.chat_template import ChatTemplate

# The switch has another name in some templates: DeepSeek's and Granite's.
_SWITCH, _OTHER_SWITCH = "enable_thinking", "thinking"
_EFFORT = "reasoning_effort"
# OpenAI's default, which asks for no more and no less.
_USUAL_EFFORT, _NO_EFFORT = "medium", "none"


def read_by(template: ChatTemplate, variables: Mapping[str, Any], fields: Mapping[str, str]) -> dict[str, Any]:
    """The variables that a template is filled in with.

    Arguments:
        variables: by the names that requests have for them.
        fields: the request's fields that they come from, where those have another name.

    Raises:
        InvalidRequestError: the template does not read one that asks for something; names its field.
    """
    found: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, value in variables.items():
        field = fields.get(name, name)
        for known, meant in _meant(template, name, value, field):
            if known in found and found[known] != meant:
                raise _refused(field, f"`{origins[known]}` asks for something else")
            found[known], origins[known] = meant, field
    return found


def _meant(template: ChatTemplate, name: str, value: Any, field: str) -> list[tuple[str, Any]]:
    if field.startswith("chat_template_kwargs.") and not template.takes(name):
        if template.reads(name):
            raise _refused(field, "the server fills this in itself")
        if name not in (_SWITCH, _EFFORT):
            raise _unread(field, name)
    if template.reads(name):
        return [(name, value)]
    if name == _SWITCH and template.takes(_OTHER_SWITCH):
        return [(_OTHER_SWITCH, value)]
    if name == _EFFORT and value == _NO_EFFORT:
        return _meant(template, _SWITCH, False, field)
    asks_for_nothing = (
        (name == _SWITCH and value is False and not template.speaks_of_thought)
        or (name == _EFFORT and value == _USUAL_EFFORT)
        or name == "verbosity"
    )
    if asks_for_nothing:
        return []
    raise _unread(field, name)


def _unread(field: str, name: str) -> InvalidRequestError:
    cure = f"; leave it out, or send `{_USUAL_EFFORT}`, which asks for nothing" if name == _EFFORT else ""
    return _refused(field, f"this model's chat template does not read `{name}`{cure}")


def _refused(field: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"`{field}`: {why}.", param=field[:256], code="unsupported_value")
