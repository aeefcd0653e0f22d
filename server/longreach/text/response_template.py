"""Answers whose marks are declared by the tokenizer's `response_template`; see transformers' page on response parsing.

The declaration is read by transformers: patterns that open and close fields, and how the text between them is parsed.
The answer is read here, so that what cannot be parsed stays as it was written, and so do the values of what can.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from longreach.errors import TokenizerError
from longreach.text.answer_reader import AnswerReader
from longreach.text.calls.cursor import Cursor, Steps, UnreadableError
from longreach.text.calls.formats import CallFormat
from longreach.text.calls.json_calls import told_call
from longreach.text.calls.json_text import is_object
from longreach.text.calls.offered import Offered
from longreach.text.calls.values import json_of, quoted
from longreach.text.parts import Part

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate, ResponseTemplateField

_REASONING = ("reasoning_content", "reasoning", "thinking")
_CALLS = "tool_calls"
# The end of a prompt that can hold the beginning of the assistant's message.
_PREFIX_CHARACTERS = 2000


def load_template(declared: dict[str, Any]) -> ResponseTemplate:
    """Read a declaration.

    Raises:
        TokenizerError: it cannot be used.
    """
    from transformers.utils.chat_parsing.response_templates import load_response_template  # takes a second

    try:
        return load_response_template(declared)
    except (ValueError, TypeError, KeyError) as error:
        raise TokenizerError(f"the tokenizer's response_template cannot be used: {error}") from error


def has_calls(template: ResponseTemplate) -> bool:
    """Whether calls of functions can be told from words."""
    return _CALLS in template.fields


def beginning(template: ResponseTemplate, prompt: str) -> str:
    """What the prompt already holds of the assistant's message."""
    tail = prompt[-_PREFIX_CHARACTERS:]
    ends = [found.end() for found in template.start_anchor_re.finditer(tail)]
    return tail[ends[-1] :] if ends else ""


class TemplateReader(AnswerReader):
    """Reads one answer by a `response_template`; `begun` is what the prompt already holds of it."""

    def __init__(
        self,
        template: ResponseTemplate,
        begun: str,
        offered: Offered,
        *,
        whole: bool = False,
        continues: bool = False,
    ) -> None:
        calls = CallFormat("response_template", "", "", ("declared",), self._read_call, nests=True)
        super().__init__(None, calls, offered, whole=whole, continues=continues)
        self._fields = [field for field in template.fields.values() if field.open_re is not None]
        if self._calls is None:
            self._fields = [field for field in self._fields if field.name != _CALLS]
        implicit = template.implicit
        self._implicit = None if implicit is None else template.fields[implicit]
        self._field: ResponseTemplateField | None = None  # of the call that is being read
        self.push(begun)  # nothing of it is told again
        self._spoke, self._space = False, ""

    def _read(self) -> Steps[None]:
        cursor, implicit = self._cursor, self._implicit
        closing = None if implicit is None else implicit.close_re
        while not cursor.is_over:
            at = cursor.at
            patterns = [*(field.open_re for field in self._fields), *([] if closing is None else [closing])]
            text, which, match = find(cursor, patterns)
            if implicit is not None and _kind(implicit.name) == "reasoning":
                yield from [Part("reasoning", text)] if text else []
            else:
                yield from self._words(text, at)
            if match is None:
                if not text and not cursor.ended:
                    yield None
            elif which == len(self._fields):
                cursor.take(len(match[0]))
            elif self._fields[which].name == _CALLS:
                self._field = self._fields[which]
                assert self._calls is not None
                yield from self._read_calls(self._calls, match[0])
            else:
                cursor.take(len(match[0]))
                yield from self._read_field(self._fields[which])
        yield from self._last_space()

    def _read_field(self, field: ResponseTemplateField) -> Steps[None]:
        """Tell the text of a field up to what closes it."""
        cursor, starting = self._cursor, True
        while True:
            at = cursor.at
            text, _, match = find(cursor, [] if field.close_re is None else [field.close_re])
            if _kind(field.name) == "content":
                yield from self._words(text, at)
            else:
                text = text.lstrip() if starting else text
                starting = starting and not text
                yield from [Part("reasoning", text)] if text else []
            if match is not None:
                cursor.take(len(match[0]))
            if match is not None or cursor.is_over:
                return
            if not text:
                yield None

    def _read_call(self, cursor: Cursor, offered: Offered, mark: str) -> Steps[None]:
        """Read the text of calls from behind what opens it, and tell them when it is known."""
        field = self._field
        assert field is not None
        captures = {name: text for name, text in field.open_re.match(mark).groupdict().items() if text is not None}
        pieces = []
        while True:
            text, _, match = find(cursor, [] if field.close_re is None else [field.close_re])
            pieces.append(text)
            if match is not None:
                cursor.take(len(match[0]))
                break
            if cursor.ended and not cursor.cut and field.close_re is None:
                break
            if not text:
                yield from cursor.more()
        for name, arguments in _calls("".join(pieces), field, captures, offered):
            yield offered.call(name)
            yield Part("arguments", arguments)
            yield Part("call_end")


def find(cursor: Cursor, patterns: Sequence[Any]) -> tuple[str, int, Any]:
    """Read what certainly stands before the first match of `patterns`; also return which one that is, and the match,
    whose text stays unread. -1 and None if none is there yet.

    Of matches that begin together the longest wins. One that more text could lengthen is none yet.
    """
    best, held = None, len(cursor.text)
    for number, pattern in enumerate(patterns):
        match = pattern.search(cursor.text, cursor.here, partial=not cursor.ended)
        if match is None:
            continue
        if not cursor.ended and (match.partial or match.end() == len(cursor.text)):
            held = min(held, match.start())
        elif match[0] and (best is None or (match.start(), -match.end()) < (best[1].start(), -best[1].end())):
            best = number, match
    if best is not None and best[1].start() < held:
        return cursor.take(best[1].start() - cursor.here), *best
    return cursor.take(held - cursor.here), -1, None


def _calls(
    body: str, field: ResponseTemplateField, captures: Mapping[str, str], offered: Offered
) -> list[tuple[str, str]]:
    """The calls in the text of a field: names, and the JSON text of arguments.

    Raises:
        UnreadableError: there are none, or one cannot be read.
    """
    from transformers.utils.chat_parsing.content_parsers import process_field

    try:
        value = process_field(body, field, dict(captures))
    except (ValueError, KeyError, TypeError):
        raise UnreadableError from None
    found = []
    for entry in value if isinstance(value, list) else [value]:
        function = entry.get("function", entry) if isinstance(entry, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if function is None or not isinstance(name, str) or name not in offered.names:
            raise UnreadableError
        arguments = function.get("arguments", function.get("parameters", {}))
        text = _text(arguments, body, field, offered, name)
        if not is_object(text):
            raise UnreadableError
        found.append((name, text))
    if not found:
        raise UnreadableError
    return found


def _text(arguments: Any, body: str, field: ResponseTemplateField, offered: Offered, name: str) -> str:
    """The JSON text of arguments: as it stands in the body where it does."""
    if isinstance(arguments, str):
        return arguments
    if field.content == "json":
        for written in (body.strip(), _written(body, offered)):
            if is_object(written) and json.loads(written) == arguments:
                return written
    if field.content == "xml-inline" and isinstance(arguments, dict):
        schema = offered.parameters(name)
        members = [
            f'"{quoted(key)}": {json_of(value, schema, key) if isinstance(value, str) else _dumped(value)}'
            for key, value in arguments.items()
        ]
        return "{" + ", ".join(members) + "}"
    return _dumped(arguments)


def _dumped(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise UnreadableError from None


def _written(body: str, offered: Offered) -> str:
    """The arguments in the text of one call as a JSON object; empty if it is none."""
    cursor = Cursor(body.strip())
    cursor.ended = True
    try:
        return "".join(part.text for part in told_call(cursor, offered) if part is not None)
    except UnreadableError:
        return ""


def _kind(name: str) -> Literal["content", "reasoning"]:
    return "reasoning" if name in _REASONING else "content"
