"""What an answer consists of: words, reasoning, and calls of functions, told apart while it is generated.

How a model marks them is told by its tokenizer's `response_template` (see transformers' documentation on response
parsing), or else, for the marks that many models share, by its chat template: `<think>`, and `<tool_call>` around JSON
or around `<function=...>`. A model with neither answers in words alone.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from longreach.errors import TokenizerError
from longreach.text.files import model_file

if TYPE_CHECKING:
    from transformers.utils.chat_parsing import ResponseParser

_REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class ToolCall:
    """A call of a function that has begun."""

    id: str
    name: str


@dataclass(frozen=True)
class Part:
    """A piece of an answer.

    | kind | says | has |
    |---|---|---|
    | `content`, `reasoning` | more words or reasoning | `text` |
    | `call` | a call begins | `call` |
    | `arguments` | more of the JSON text of its arguments | `text` |
    | `call_end` | the call is whole: what has come is all of its arguments, a JSON object | |

    Parts of two calls never mix. A call without its `call_end` is incomplete: the answer was cut, or the rest of the
    call cannot be read.
    """

    kind: Literal["content", "reasoning", "call", "arguments", "call_end"]
    text: str = ""
    call: ToolCall | None = None


class AnswerFormat:
    """How one model marks the parts of its answers; loaded by `AnswerFormat.load`.

    Attributes:
        has_tool_calls: calls of functions can be told from words.
    """

    def __init__(self, template: dict[str, Any] | None) -> None:
        self._template: Any = None
        self.has_tool_calls = False
        if template is not None:
            from transformers.utils.chat_parsing.response_templates import load_response_template  # takes a second

            try:
                self._template = load_response_template(template)
            except (ValueError, TypeError, KeyError) as error:
                raise TokenizerError(f"the tokenizer's response_template cannot be used: {error}") from error
            self.has_tool_calls = "tool_calls" in self._template.fields

    @classmethod
    def load(cls, model: str, chat_templates: Iterable[str]) -> AnswerFormat:
        """The format of a model directory or hub id whose chat templates are given.

        Raises:
            TokenizerError: it declares one that cannot be used.
        """
        path = model_file(model, "tokenizer_config.json")
        config: dict[str, Any] = {} if path is None else json.loads(path.read_text("utf-8"))
        return cls(config.get("response_template") or shared_marks("\n".join(chat_templates)))

    @property
    def is_plain(self) -> bool:
        """Whether answers are words and nothing else."""
        return self._template is None

    def reader(self, prompt: str, tools: list[Any]) -> AnswerReader:
        """A reader for one answer to `prompt`; `tools` give the types of arguments that are written without any."""
        if self._template is None:
            return AnswerReader(None)
        from transformers.utils.chat_parsing import ResponseParser

        return AnswerReader(ResponseParser(self._template, prefix=prompt[-_PREFIX_CHARACTERS:], tools=tools))


# The end of a prompt that can hold the beginning of the assistant's message.
_PREFIX_CHARACTERS = 2000


class AnswerReader:
    """Splits the text of one answer into its parts, as it arrives; without a parser everything is words.

    What looks like a call and is none, because the model wrote it wrongly or was cut short, is words too.
    """

    def __init__(self, parser: ResponseParser | None) -> None:
        self._parser = parser
        self._starting = True  # blank space before the first word of a field is not passed on
        self._tool_call_text = ""  # of the call that is being written

    def push(self, text: str) -> list[Part]:
        """The parts that are certain after another piece of text."""
        if self._parser is None:
            return [Part("content", text)] if text else []
        return self._guarded(lambda parser: parser.feed(text), text)

    def flush(self) -> list[Part]:
        """The text has ended."""
        if self._parser is None:
            return []
        return self._guarded(lambda parser: parser.finalize()[1], "")

    def _guarded(self, advance: Callable[[ResponseParser], list[dict[str, Any]]], text: str) -> list[Part]:
        assert self._parser is not None
        try:
            return self._parts(advance(self._parser))
        except ValueError:  # from the contents of a call; the parser cannot go on behind it
            self._parser = None
            words, self._tool_call_text = self._tool_call_text + text, ""
            return [Part("content", words)] if words else []

    def _parts(self, events: list[dict[str, Any]]) -> list[Part]:
        parts = []
        for event in events:
            kind = _kind(event["field"])
            if event["type"] == "region_open":
                self._starting, self._tool_call_text = True, ""
            elif event["type"] == "region_chunk" and kind == "call":
                self._tool_call_text += event["text"]
            elif event["type"] == "region_chunk" and (text := self._trimmed(event["text"])):
                parts.append(Part(kind, text))
            elif event["type"] == "region_close" and kind == "call":
                parts += _tool_calls(event["value"]) or [Part("content", self._tool_call_text)]
                self._tool_call_text = ""
        return parts

    def _trimmed(self, text: str) -> str:
        if self._starting:
            text = text.lstrip()
            self._starting = not text
        return text


def whole_call(name: str, arguments: str) -> list[Part]:
    """The parts of a call that is known at once."""
    call = ToolCall(f"call_{uuid.uuid4().hex[:24]}", name)
    return [Part("call", call=call), Part("arguments", arguments), Part("call_end")]


def shared_marks(chat_template: str) -> dict[str, Any] | None:
    """The response template for the marks that a chat template is seen to use; None without any."""
    fields: dict[str, Any] = {}
    if "<think>" in chat_template:
        fields["reasoning_content"] = {"open": "<think>", "close": "</think>"}
    if "<tool_call>" in chat_template and "<function=" in chat_template:
        fields["tool_calls"] = {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        }
    elif "<tool_call>" in chat_template:
        fields["tool_calls"] = {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        }
    if not fields:
        return None
    # The last thing that a prompt says is that the assistant begins; what a template writes after that is part of the
    # answer, such as an opening <think>.
    anchors = ["<|im_start|>assistant\n", "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|assistant|>"]
    return {"start_anchor": anchors, "fields": fields | {"content": {}}}


def _kind(field: str) -> Literal["content", "reasoning", "call"]:
    return "reasoning" if field in _REASONING else "call" if field == "tool_calls" else "content"


def _tool_calls(value: object) -> list[Part]:
    """The calls in a parsed field, of those that have the form of one."""
    parts = []
    for entry in value if isinstance(value, list) else [value]:
        function = entry.get("function", entry) if isinstance(entry, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            arguments = function.get("arguments", {})
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            parts += whole_call(function["name"], text)
    return parts
