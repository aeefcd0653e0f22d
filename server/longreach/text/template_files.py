"""Where a model keeps its chat templates: files of their own, or members of older files.

| file | holds | goes before |
|---|---|---|
| `chat_template.jinja` | the template of chats | all members of JSON files |
| `additional_chat_templates/NAME.jinja` | the template NAME; `tool_use` is for requests with tools | members named so |
| `tokenizer_config.json` | `chat_template`: one, or several by name | `chat_template.json` |
| `chat_template.json` | `chat_template` of a model with parts for images | |
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longreach.errors import TokenizerError
from longreach.setting_values import is_file
from longreach.text.files import chat_template_files, model_file
from longreach.text.special_tokens import CONFIG, read_object

DEFAULT = "default"
_ONE, _OF_PROCESSOR = "chat_template.jinja", "chat_template.json"


def chat_templates(model: str) -> dict[str, str] | None:
    """The templates of a model directory or hub id, by name; None if it has none. One of them is `DEFAULT`.

    Raises:
        TokenizerError: a file cannot be read, or there are templates and none of them is for plain chats.
    """
    try:
        named = {path.stem: path.read_text("utf-8") for path in chat_template_files(model)}
        if (path := model_file(model, _ONE)) is not None:
            return {**named, DEFAULT: path.read_text("utf-8")}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"a chat template of {model} cannot be read: {error}") from error
    found = {**_declared(model), **named}
    if found and DEFAULT not in found:
        raise TokenizerError(
            f"{model} has chat templates for {', '.join(sorted(found))} alone; put that of plain chats into {_ONE}"
        )
    return found or None


def given_template(value: str) -> tuple[str, str]:
    """The template that `--chat-template` names or is, and what messages call it.

    Raises:
        TokenizerError: the file cannot be read.
    """
    if not is_file(value):
        return "--chat-template", value
    try:
        return f"--chat-template {value}", Path(value).read_text("utf-8")
    except (OSError, ValueError) as error:
        raise TokenizerError(f"--chat-template {value}: the file cannot be read ({error})") from error


def _declared(model: str) -> dict[str, str]:
    for name in (CONFIG, _OF_PROCESSOR):
        declared: Any = read_object(model, name).get("chat_template")
        if not declared:
            continue
        try:
            found = _by_name(declared)
        except (KeyError, TypeError):
            found = {}
        if not found or not all(isinstance(text, str) for text in found.values()):
            raise TokenizerError(f"{name}: no readable chat_template (neither a text nor texts by name)")
        return found
    return {}


def _by_name(declared: Any) -> dict[str, Any]:
    if isinstance(declared, list):
        return {entry["name"]: entry["template"] for entry in declared}
    return declared if isinstance(declared, dict) else {DEFAULT: declared}
