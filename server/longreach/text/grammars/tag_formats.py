"""Calls whose arguments stand in tags, without quotes.

A value may show calls: tags within it are its own if they are paired, as the readers have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longreach.text.grammars.functions import Callee, Parameter
from longreach.text.grammars.json_formats import Marked
from longreach.text.grammars.written import Written, literal


@dataclass(frozen=True)
class Tags:
    """The tags around a parameter.

    Attributes:
        key: what stands before the name, and behind it.
        value: the tags that are paired within a value: the one that opens it, or the whole parameter, and the one that
            closes it.
        between: what opens the value behind its name.
        line: BLANK? space that a template puts at each end of a value.
    """

    key: tuple[str, str]
    value: tuple[str, str]
    between: str = ""
    line: str = ""


_ANY_NAME = "/[^<>\\n]+/"
QWEN = Tags(("<parameter=", ">"), ("<parameter=", "</parameter>"), line="\n")
SEED = Tags(("<parameter=", ">"), ("<parameter=", "</parameter>"))
GLM = Tags(("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), between="<arg_value>")


def qwen3_coder(callees: Sequence[Callee], written: Written, parallel: bool) -> Marked:
    """`<tool_call><function=NAME>...</function></tool_call>`; the outer tag that opens may be missing."""
    closing = written.mark("</tool_call>")
    rules = [
        f'call: BLANK? "<function=" function BLANK? {closing}',
        f"bare: function BLANK? {closing}",
        *_functions(callees, written, QWEN, ">", "</function>"),
    ]
    return Marked({"<tool_call>": "call", "<function=": "bare"}, '"\\n"?', rules)


def seed_oss(callees: Sequence[Callee], written: Written, parallel: bool) -> Marked:
    """`<seed:tool_call><function=NAME>...</function></seed:tool_call>`."""
    rules = [
        f'call: BLANK? "<function=" function BLANK? {written.mark("</seed:tool_call>")}',
        *_functions(callees, written, SEED, ">", "</function>"),
    ]
    return Marked({"<seed:tool_call>": "call"}, '"\\n"?', rules)


def glm(callees: Sequence[Callee], written: Written, parallel: bool) -> Marked:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""
    rules = ['call: "\\n"? function', *_functions(callees, written, GLM, "", "</tool_call>")]
    return Marked({"<tool_call>": "call"}, '"\\n"?', rules)


def _functions(callees: Sequence[Callee], written: Written, tags: Tags, after: str, end: str) -> list[str]:
    """Rules of a `function`: its name, what follows that, its parameters, and what ends it."""
    opens, closes = tags.value
    others = written.others(tags.value)
    rules = [
        "function: "
        + " | ".join(
            f"{literal(one.name + after)} BLANK? {_parameters(index, one)} {written.mark(end)}"
            for index, one in enumerate(callees)
        ),
        f"any: {_opening(tags, written, None)} value BLANK?",
        "value: text* to_close | text* to_open value value",
        f"text: TEXT{'' if others is None else f' | {others}'}",
        *written.end_of_text("to_close", closes),
        *written.end_of_text("to_open", opens),
    ]
    for index, one in enumerate(callees):
        for number, parameter in enumerate(one.parameters or ()):
            opening = _opening(tags, written, parameter.name)
            rules.append(f"p{index}_{number}: {opening} {_value(parameter, tags, written)} BLANK?")
    return rules


def _parameters(index: int, callee: Callee) -> str:
    if callee.parameters is None:
        return "any*"
    return " ".join(f"p{index}_{number}{'' if one.required else '?'}" for number, one in enumerate(callee.parameters))


def _opening(tags: Tags, written: Written, name: str | None) -> str:
    """The tags before a value; with no name those of any parameter."""
    key, between = (*map(written.mark, tags.key),), f"BLANK? {written.mark(tags.between)}" if tags.between else ""
    return f"{key[0]} {_ANY_NAME if name is None else literal(name)} {key[1]} {between}"


def _value(parameter: Parameter, tags: Tags, written: Written) -> str:
    """A value and the tag that closes it."""
    closing, line = written.mark(tags.value[1]), literal(tags.line) if tags.line else ""
    if parameter.value is None:
        return "value"
    if isinstance(parameter.value, str):
        return f"BLANK? {parameter.value} BLANK? {closing}"
    return f"{line} ({' | '.join(map(literal, parameter.value))}) {line} {closing}"
