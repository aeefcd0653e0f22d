"""What a model reads in a prompt of `model/chat_template.jinja`: its messages, its tools, and the calls made so far."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
_TOOLS = re.compile(r"<tools>\n(.*?)</tools>", re.DOTALL)


@dataclass(frozen=True)
class Message:
    """One message as the prompt has it."""

    role: str
    text: str


@dataclass(frozen=True)
class Call:
    """A call of a tool; `result` is what the tool said, or None before it has."""

    name: str
    arguments: Any
    result: str | None = None


@dataclass(frozen=True)
class Conversation:
    """A prompt, read.

    Attributes:
        messages: all but the empty one that the answer is to fill.
        tools: the functions offered, each with `name` and `parameters`.
        thinks: the answer may begin with reasoning.
    """

    messages: list[Message]
    tools: list[dict[str, Any]]
    thinks: bool

    @classmethod
    def read(cls, prompt: Sequence[int], start: int, text_of: Callable[[Sequence[int]], str]) -> Conversation:
        """The conversation in `prompt` (token ids), whose messages each begin with the token `start`."""
        pieces: list[list[int]] = []
        for token in prompt:
            if token == start:
                pieces.append([])
            elif pieces:
                pieces[-1].append(token)
        texts = [text_of(piece) for piece in pieces]
        messages = []
        for text in texts[:-1]:
            role, _, rest = text.partition("\n")
            messages.append(Message(role, rest.removesuffix("\n").removesuffix("<|im_end|>")))
        offered = _TOOLS.search(messages[0].text) if messages and messages[0].role == "system" else None
        tools = [json.loads(line)["function"] for line in offered[1].splitlines()] if offered else []
        thinks = bool(texts) and "</think>" not in texts[-1]
        return cls(messages, tools, thinks)

    @property
    def asked(self) -> list[str]:
        """What the user has said, first things first."""
        return [message.text for message in self.messages if message.role == "user"]

    def calls_since(self, question: str) -> list[Call]:
        """The calls made after the last message of the user that holds `question`, with their results in order."""
        since = max(i for i, message in enumerate(self.messages) if message.role == "user" and question in message.text)
        calls: list[Call] = []
        results: list[str] = []
        for message in self.messages[since:]:
            if message.role == "assistant":
                calls += [
                    Call(found["name"], found["arguments"]) for found in map(json.loads, _CALL.findall(message.text))
                ]
            elif message.role == "tool":
                results.append(message.text)
        padded = [*results, *[None] * (len(calls) - len(results))]
        return [Call(call.name, call.arguments, result) for call, result in zip(calls, padded, strict=False)]
