"""Grammars of answers that are calls of functions, in the formats of models, or something else.

A call must begin with a mark: then its first token decides, and the answer's own grammar is not mistaken for it. The
grammars are llguidance's Lark. They refer to others by name: `@answer`, and `@arguments0` for the first function.
Arguments that are JSON follow the function's schema. Those in tags are any text, as they are without a form.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Written:
    """How marks are written in a grammar: as the token that a mark is, or as a text.

    Attributes:
        token_ids: of the marks that are tokens.
    """

    token_ids: Mapping[str, int]

    def mark(self, mark: str) -> str:
        """A mark, which may also be spelled out."""
        token = self.token_ids.get(mark)
        return _literal(mark) if token is None else f"(<[{token}]> | {_literal(mark)})"

    def up_to(self, name: str, mark: str) -> str:
        """A rule of any text up to a mark, and the mark."""
        token = self.token_ids.get(mark)
        return f"{name}[lazy]: {_lazy(mark)}" if token is None else f"{name}: /(?s:.*)/ <[{token}]>"


def _hermes(names: Sequence[str], written: Written) -> list[str]:
    return [
        'calls: call ("\\n"? call)*',
        f'call: {written.mark("<tool_call>")} "\\n"? function "\\n"? {written.mark("</tool_call>")}',
        _choice("function", names, '{{"name": "{name}", "arguments": ', "}"),
    ]


def _mistral(names: Sequence[str], written: Written) -> list[str]:
    opened = written.mark("[TOOL_CALLS]")
    if "[ARGS]" not in written.token_ids:  # v3 to v7: one list
        return [
            f'calls: {opened} "[" function (", " function)* "]"',
            _choice("function", names, '{{"name": "{name}", "arguments": ', "", ' id? "}"'),
            'id: ", \\"id\\": \\"" /[a-zA-Z0-9]{9}/ "\\""',
        ]
    return [
        "calls: call+",
        f"call: {opened} function",
        "function: "
        + " | ".join(
            f"{_literal(name)} {written.mark('[ARGS]')} @arguments{index}" for index, name in enumerate(names)
        ),
    ]


def _deepseek(names: Sequence[str], written: Written) -> list[str]:
    begin, end = written.mark("<｜tool▁call▁begin｜>"), written.mark("<｜tool▁call▁end｜>")
    separator = written.mark("<｜tool▁sep｜>")
    fenced = " | ".join(
        f'{_literal(name)} "\\n```json\\n" @arguments{index} "\\n```"' for index, name in enumerate(names)
    )
    plain = " | ".join(f"{_literal(name)} {separator} @arguments{index}" for index, name in enumerate(names))
    return [
        f'calls: {written.mark("<｜tool▁calls▁begin｜>")} call ("\\n"? call)* {written.mark("<｜tool▁calls▁end｜>")}',
        f"call: {begin} function {end}",
        f'function: "function" {separator} fenced | plain',
        f"fenced: {fenced}",
        f"plain: {plain}",
    ]


def _in_tags(names: Sequence[str], written: Written, outer: str = "tool_call") -> list[str]:
    functions = " | ".join(_literal(f"<function={name}>") for name in names)
    return [
        'calls: call ("\\n"? call)*',
        f'call: {written.mark(f"<{outer}>")} "\\n"? function "\\n"? {written.mark(f"</{outer}>")}',
        f"function: ({functions}) parameters",
        written.up_to("parameters", "</function>"),
    ]


def _glm(names: Sequence[str], written: Written) -> list[str]:
    key = f"{written.mark('<arg_key>')} /[^<\\n]+/ {written.mark('</arg_key>')}"
    return [
        'calls: call ("\\n"? call)*',
        f'call: {written.mark("<tool_call>")} function "\\n"? parameter* {written.mark("</tool_call>")}',
        f"function: {' | '.join(map(_literal, names))}",
        f'parameter: {key} "\\n"? {written.mark("<arg_value>")} value "\\n"?',
        written.up_to("value", "</arg_value>"),
    ]


# By the names of the formats. In the two others nothing marks where a call begins, or answers are marked as well.
_FORMATS: Mapping[str, Callable[[Sequence[str], Written], list[str]]] = {
    "hermes": _hermes,
    "mistral": _mistral,
    "deepseek": _deepseek,
    "qwen3_coder": _in_tags,
    "seed_oss": functools.partial(_in_tags, outer="seed:tool_call"),
    "glm": _glm,
}


def has_call_grammar(call_format: str) -> bool:
    """Whether calls of a format can stand in a grammar beside another answer."""
    return call_format in _FORMATS


def follows_schemas(call_format: str) -> bool:
    """Whether a call in a grammar has arguments by its function's schema."""
    return call_format in ("hermes", "mistral", "deepseek")


def call_or_answer(
    call_format: str,
    names: Sequence[str],
    written: Written,
    *,
    parallel: bool = True,
    reasoning: tuple[str, str] | None = None,
    reasons: bool = False,
) -> str:
    """The main grammar of an answer that is calls of `names` or else `@answer`.

    Arguments:
        call_format: of those that `has_call_grammar`.
        written: how the marks are written.
        parallel: there may be several calls.
        reasoning: the marks around reasoning that may stand before either; None for none.
        reasons: the answer begins inside of reasoning, which it then has to end.
    """
    rules = _FORMATS[call_format](names, written)
    if not parallel:
        rules[0] = rules[0].replace(' ("\\n"? call)*', "").replace(' (", " function)*', "").replace("call+", "call")
    start = "start: calls | @answer"
    if reasoning is not None:
        opening, closing = reasoning
        start = f"start: {'thought' if reasons else 'thinking?'} (calls | @answer)"
        rules += [] if reasons else [f"thinking: {written.mark(opening)} thought"]
        rules += ["thought: thinking_text BLANK?", written.up_to("thinking_text", closing), "BLANK: /[ \\t\\r\\n]+/"]
    return "\n".join([start, *rules])


def _choice(rule: str, names: Sequence[str], before: str, after: str, more: str = "") -> str:
    """A rule of one function's call as JSON."""
    ways = [
        f"{_literal(before.format(name=name))} @arguments{index} {_literal(after) if after else ''}{more}"
        for index, name in enumerate(names)
    ]
    return f"{rule}: {' | '.join(ways)}"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _lazy(mark: str) -> str:
    """A regular expression of any text up to a mark, with it."""
    plain = (f"\\x{ord(one):02x}" if one.isascii() and not one.isalnum() else one for one in mark)
    return f"/(?s:.*){''.join(plain)}/"
