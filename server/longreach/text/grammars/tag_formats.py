"""Calls whose arguments stand in tags, without quotes.

A value may show calls: tags within it are its own if they are paired, as the readers have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longreach.text.grammars.functions import Callee
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
        line: blank space that a template puts at each end of a value.
    """

    key: tuple[str, str]
    value: tuple[str, str]
    between: str = ""
    line: str = ""


_ANY_NAME = '/[^<>"\\n]+/'
QWEN = Tags(("<parameter=", ">"), ("<parameter=", "</parameter>"), line="\n")
SEED = Tags(("<parameter=", ">"), ("<parameter=", "</parameter>"))
GLM = Tags(("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), between="<arg_value>")
MINIMAX = Tags(('<parameter name="', '">'), ('<parameter name="', "</parameter>"))
_SUFFIXES = {"": "", "s_": ":opensource"}  # of Hy3's tags, by the prefix of their rules


def qwen3_coder(callees: Sequence[Callee], written: Written, parallel: bool) -> Marked:
    """`<tool_call><function=NAME>...</function></tool_call>`; the outer tag that opens may be missing."""
    closing = written.mark("</tool_call>")
    rules = [
        f'call: BLANK? "<function=" function BLANK? {closing}',
        f"bare: function BLANK? {closing}",
        *_functions(callees, written, QWEN, '">"', "</function>"),
    ]
    return Marked({"<tool_call>": "call", "<function=": "bare"}, '"\\n"?', rules)


def seed_oss(callees: Sequence[Callee], written: Written, parallel: bool) -> Marked:
    """`<seed:tool_call><function=NAME>...</function></seed:tool_call>`."""
    rules = [
        f'call: BLANK? "<function=" function BLANK? {written.mark("</seed:tool_call>")}',
        *_functions(callees, written, SEED, '">"', "</function>"),
    ]
    return Marked({"<seed:tool_call>": "call"}, '"\\n"?', rules)


def glm(callees: Sequence[Callee], written: Written, parallel: bool) -> Marked:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""
    rules = ['call: "\\n"? function', *_functions(callees, written, GLM, "", "</tool_call>")]
    return Marked({"<tool_call>": "call"}, '"\\n"?', rules)


def minimax_m2(callees: Sequence[Callee], written: Written, parallel: bool) -> Marked:
    """`<minimax:tool_call><invoke name="NAME">...</invoke>...</minimax:tool_call>`."""
    more = "+" if parallel else ""
    rules = [
        f"calls_inside: BLANK? call{more} {written.mark('</minimax:tool_call>')}",
        'call: "<invoke name=\\"" function BLANK?',
        *_functions(callees, written, MINIMAX, literal('">'), "</invoke>"),
    ]
    return Marked({"<minimax:tool_call>": "calls_inside"}, None, rules)


def hy_v3(callees: Sequence[Callee], written: Written, parallel: bool) -> Marked:
    """`<tool_calls><tool_call>NAME<tool_sep>...</tool_call></tool_calls>`, all tags with or without a suffix."""
    rules, after, more = [], {}, "+" if parallel else ""
    for prefix, suffix in _SUFFIXES.items():
        names = ("tool_call", "tool_sep", "/tool_call", "/tool_calls")
        call, separator, call_end, end = (f"<{name}{suffix}>" for name in names)
        between = f"BLANK? {written.mark(separator)}"
        rules += [
            f"{prefix}calls_inside: BLANK? {prefix}call{more} {written.mark(end)}",
            f"{prefix}call: {written.mark(call)} BLANK? {prefix}function BLANK?",
            *_functions(callees, written, _suffixed(GLM, suffix), between, call_end, prefix),
        ]
        after[f"<tool_calls{suffix}>"] = f"{prefix}calls_inside"
    return Marked(after, None, rules)


def _suffixed(tags: Tags, suffix: str) -> Tags:
    """The same tags, each with a suffix of its name."""

    def named(tag: str) -> str:
        return tag.replace(">", f"{suffix}>")

    (key, key_end), (value, value_end) = tags.key, tags.value
    return Tags((named(key), named(key_end)), (named(value), named(value_end)), named(tags.between), tags.line)


def _functions(
    callees: Sequence[Callee], written: Written, tags: Tags, after: str, end: str, prefix: str = ""
) -> list[str]:
    """Rules of a `function`: its name, what follows that, its parameters, and what ends it. All have the prefix."""
    opens, closes = tags.value
    others = written.others(tags.value)
    ways = [
        f"{literal(one.name)} {after} BLANK? {_parameters(prefix, index, one)} {written.mark(end)}"
        for index, one in enumerate(callees)
    ]
    rules = [
        f"{prefix}function: {' | '.join(ways)}",
        f"{prefix}any: {_opening(tags, written, None)} {prefix}value BLANK?",
        f"{prefix}value: {prefix}text* {prefix}to_close | {prefix}text* {prefix}to_open {prefix}value {prefix}value",
        f"{prefix}text: TEXT{'' if others is None else f' | {others}'}",
        *written.end_of_text(f"{prefix}to_close", closes),
        *written.end_of_text(f"{prefix}to_open", opens),
    ]
    for index, one in enumerate(callees):
        for number, parameter in enumerate(one.parameters or ()):
            opening = _opening(tags, written, parameter.name)
            value = f"{prefix}value" if parameter.value is None else _value(parameter.value, tags, written)
            rules.append(f"{prefix}p{index}_{number}: {opening} {value} BLANK?")
    return rules


def _parameters(prefix: str, index: int, callee: Callee) -> str:
    if callee.parameters is None:
        return f"{prefix}any*"
    names = (f"{prefix}p{index}_{number}" for number in range(len(callee.parameters)))
    return " ".join(f"{name}{'' if one.required else '?'}" for name, one in zip(names, callee.parameters, strict=True))


def _opening(tags: Tags, written: Written, name: str | None) -> str:
    """The tags before a value; with no name those of any parameter."""
    key, between = (*map(written.mark, tags.key),), f"BLANK? {written.mark(tags.between)}" if tags.between else ""
    return f"{key[0]} {_ANY_NAME if name is None else literal(name)} {key[1]} {between}"


def _value(value: str | tuple[str, ...], tags: Tags, written: Written) -> str:
    """A value that is JSON, or one of some texts, and the tag that closes it."""
    closing, line = written.mark(tags.value[1]), literal(tags.line) if tags.line else ""
    if isinstance(value, str):
        return f"BLANK? {value} BLANK? {closing}"
    return f"{line} ({' | '.join(map(literal, value))}) {line} {closing}"
