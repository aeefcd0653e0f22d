"""What a chat template makes of conversations: each message must be seen in the prompt, or it is refused.

A conversation is rendered once with an unguessable marker in place of each text, for each shape of conversations: the
roles, and which messages have words and calls. What the markers show holds for all conversations of that shape. Where
one is missing, or the template raises an exception, the conversation is rearranged; `arrangement` says how.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longreach.text.arrangement import Arrangement, CallStyle, Plain, arrangements
from longreach.text.calls.offered import NewId, mistral_id, openai_id
from longreach.text.chat_template import ChatTemplate, RenderError

_KEPT_SHAPES = 1024
# Messages that are rendered while a way is looked for. All ways are tried with up to 8,192 messages; with more, the
# first ones, so that no conversation holds a thread for long.
_MOST_RENDERED = 1 << 18
_LEAST_TRIES = 4
_MARK = re.compile("m[0-9a-f]{16}x[0-9]+e")
_TOOL = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {"type": "object"}}}
_STYLES = [
    CallStyle(arguments_as_text=text, no_words=words, short_ids=short)
    for short in (False, True)
    for text in (False, True)
    for words in (None, "")
]


@dataclass(frozen=True)
class Rendering:
    """How conversations of one shape are rendered."""

    style: CallStyle
    arrangement: Arrangement

    def arranged(self, messages: Sequence[Plain]) -> list[Plain]:
        """A conversation as it is given to the template."""
        return self.style.apply(self.arrangement.apply(messages))


class TemplateFit:
    """Finds out how one template wants its conversations."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._knows_developer = any("developer" in source for source in template.sources)
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, Rendering | RenderError] = OrderedDict()
        self._style: CallStyle | None = None

    @property
    def style(self) -> CallStyle:
        """How the template wants calls, by a short conversation with one.

        Content that is null, as OpenAI's API has it beside calls, goes before an empty one. A template that writes
        `None` for it is given the empty one.
        """
        if self._style is None:
            faults = {style: self._faults(style) for style in _STYLES}
            self._style = min(_STYLES, key=lambda style: faults[style])
        return self._style

    @property
    def new_id(self) -> NewId:
        """Makes ids of calls that the template takes."""
        return mistral_id if self.style.short_ids else openai_id

    def renamed(self, messages: Sequence[Plain]) -> list[Plain]:
        """Developers are systems for templates that know none, as OpenAI's older models read them."""
        if self._knows_developer:
            return [*messages]
        return [{**one, "role": "system"} if one["role"] == "developer" else one for one in messages]

    def rendering(
        self, messages: Sequence[Plain], *, tools: bool, opens_answer: bool, variables: Mapping[str, Any]
    ) -> Rendering:
        """How a conversation is rendered so that each of its messages is seen.

        Raises:
            RenderError: there is no way; says what the template says, or which message it leaves out.
        """
        plain = self.renamed(messages)
        shape = repr((tools, opens_answer, sorted(variables.items()), [_shape(message) for message in plain]))
        key = hashlib.sha256(shape.encode(errors="surrogatepass")).digest()
        with self._lock:
            found = self._known.get(key)
            if found is not None:
                self._known.move_to_end(key)
        if found is None:
            found = self._found(plain, [_TOOL] if tools else [], opens_answer, variables)
            with self._lock:
                self._known[key] = found
                if len(self._known) > _KEPT_SHAPES:
                    self._known.popitem(last=False)
        if isinstance(found, RenderError):
            raise found
        return found

    def _found(
        self, messages: list[Plain], tools: list[Plain], opens_answer: bool, variables: Mapping[str, Any]
    ) -> Rendering | RenderError:
        calling = any("tool_calls" in message or message["role"] == "tool" for message in messages)
        style = self.style if calling else CallStyle()
        marked, marks = _marked(messages, as_text=style.arguments_as_text)
        first: RenderError | None = None
        without_words: Rendering | None = None
        tries = max(_LEAST_TRIES, _MOST_RENDERED // max(1, len(messages)))
        for arrangement in itertools.islice(arrangements(messages), tries):
            rendering = Rendering(style, arrangement)
            try:
                text = self._template.fill(rendering.arranged(marked), tools, opens_answer, **variables)
            except RenderError as error:
                first = first or error
                continue
            seen = set(_MARK.findall(text))
            missing = [mark for mark in marks if mark.text not in seen]
            if not missing:
                return rendering
            if all(mark.is_preamble for mark in missing) and without_words is None:
                without_words = rendering
            shown = f"it leaves out message {missing[0].message}, of the role `{messages[missing[0].message]['role']}`"
            first = first or RenderError(f"the model's chat template cannot be used with them: {shown}")
        # A few templates leave out what an assistant says beside its calls, as they do with its reasoning.
        assert first is not None, "there is an arrangement"
        return without_words or first

    def _faults(self, style: CallStyle) -> tuple[int, ...]:
        """What is wrong with a call in this style, the worst first."""
        call = {"id": "probe-id", "type": "function", "function": {"name": "probe", "arguments": {}}}
        conversation: list[Plain] = [
            {"role": "user", "content": "probe"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "probe", "tool_call_id": "probe-id"},
        ]
        marked, marks = _marked(conversation, as_text=style.arguments_as_text)
        try:
            text = self._template.fill(style.apply(marked), [_TOOL], True)
        except RenderError:
            return (1, 0, 0, int(style.no_words is None))
        written_badly = any(mark.is_written_badly(text) for mark in marks)
        missing = sum(mark.text not in text for mark in marks)
        return (0, written_badly, missing, style.no_words is None and "None" in text)


@dataclass(frozen=True)
class _Mark:
    """A text that has to be seen.

    Attributes:
        text: unguessable.
        message: the number of its message.
        is_preamble: it stands for words beside calls.
        is_argument: it stands for the arguments of a call.
    """

    text: str
    message: int
    is_preamble: bool = False
    is_argument: bool = False

    def is_written_badly(self, text: str) -> bool:
        """Whether an argument is written as Python does, or as a JSON text within another."""
        return self.is_argument and any(form in text for form in (f"'{self.text}'", f'\\"{self.text}\\"'))


def _shape(message: Plain) -> tuple[object, ...]:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = tuple((function["name"], tuple(_names(function["arguments"]))) for function in functions)
    members = tuple(sorted(name for name in message if name not in ("role", "content", "tool_calls")))
    return message["role"], bool(message["content"]), calls, members


def _marked(messages: Sequence[Plain], *, as_text: bool) -> tuple[list[Plain], list[_Mark]]:
    """A conversation of the same shape with a mark for each text."""
    nonce = secrets.token_hex(8)
    marked: list[Plain] = []
    marks: list[_Mark] = []

    def mark(number: int, **kind: bool) -> str:
        marks.append(_Mark(f"m{nonce}x{len(marks)}e", number, **kind))
        return marks[-1].text

    for number, message in enumerate(messages):
        one = {**message}
        if message["content"]:
            one["content"] = mark(number, is_preamble=bool(message.get("tool_calls")))
        if message.get("tool_calls"):
            one["tool_calls"] = []
            for call in message["tool_calls"]:
                names = _names(call["function"]["arguments"]) or ["a"]
                # One mark for all: a template may show those alone that it knows.
                arguments: Any = dict.fromkeys(names, mark(number, is_argument=True))
                if as_text:
                    arguments = json.dumps(arguments, ensure_ascii=False)
                one["tool_calls"].append({**call, "function": {**call["function"], "arguments": arguments}})
        if "reasoning_content" in message:
            one["reasoning_content"] = "probe"
        marked.append(one)
    return marked, marks


def _names(arguments: dict[str, Any] | str) -> list[str]:
    """The names of arguments, which may be the text of an object."""
    return [*(json.loads(arguments) if isinstance(arguments, str) else arguments)]
