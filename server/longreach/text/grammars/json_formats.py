"""Calls whose arguments are JSON, after a mark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from longreach.text.grammars.functions import Callee
from longreach.text.grammars.written import Written, literal


@dataclass(frozen=True)
class Marked:
    """How calls are written that begin with a mark.

    Attributes:
        after: by each mark that begins calls, what follows it; the first one is the usual one.
        again: what may stand between a call and the next; None if what follows a mark has all calls.
        rules: that the others name.
    """

    after: dict[str, str]
    again: str | None = None
    rules: list[str] = field(default_factory=list)


def hermes(callees: Sequence[Callee], written: Written, parallel: bool) -> Marked:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    rules = [
        f'call: "\\n"? function "\\n"? {written.mark("</tool_call>")}',
        choice("function", callees, '{{"name": "{name}", "arguments": ', "}"),
    ]
    return Marked({"<tool_call>": "call"}, '"\\n"?', rules)


def mistral(callees: Sequence[Callee], written: Written, parallel: bool) -> Marked:
    """`[TOOL_CALLS]NAME[ARGS]{...}`, or a list of objects where the vocabulary has no `[ARGS]`."""
    if "[ARGS]" not in written.token_ids:  # v3 to v7
        rules = [
            f'call: " "? "[" function {listed(", ", parallel)} "]"',
            choice("function", callees, '{{"name": "{name}", "arguments": ', "", ' id? "}"'),
            'id: ", \\"id\\": \\"" /[a-zA-Z0-9]{9}/ "\\""',
        ]
        return Marked({"[TOOL_CALLS]": "call"}, None, rules)
    arguments = written.mark("[ARGS]")
    if "[CALL_ID]" in written.token_ids:  # v11
        arguments = f"({written.mark('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/)? {arguments}"
    return Marked({"[TOOL_CALLS]": "call"}, "", [named("call", callees, f" {arguments} ")])


def deepseek(callees: Sequence[Callee], written: Written, parallel: bool) -> Marked:
    """`<｜tool▁calls▁begin｜>`, and calls between marks of their own."""
    begin, end = written.mark("<｜tool▁call▁begin｜>"), written.mark("<｜tool▁call▁end｜>")
    separator = written.mark("<｜tool▁sep｜>")
    more = ' ("\\n"? call)*' if parallel else ""
    return Marked(
        {"<｜tool▁calls▁begin｜>": "calls_inside"},
        None,
        [
            f'calls_inside: call{more} "\\n"? {written.mark("<｜tool▁calls▁end｜>")}',
            f"call: {begin} function {end}",
            f'function: "function" {separator} fenced | plain',
            named("fenced", callees, ' "\\n```json\\n" ', ' "\\n```"'),
            named("plain", callees, f" {separator} "),
        ],
    )


def granite(callees: Sequence[Callee], written: Written, parallel: bool) -> Marked:
    """`<|tool_call|>[{"name": ..., "arguments": {...}}]`, or the same behind `<tool_call>`."""
    rules = _list(callees, parallel)
    return Marked({"<|tool_call|>": "list", "<tool_call>": "list"}, None, rules)


def phi4_mini(callees: Sequence[Callee], written: Written, parallel: bool) -> Marked:
    """`<|tool_call|>[{...}]<|/tool_call|>`, or `functools[{...}]`."""
    rules = [*_list(callees, parallel), f"closed: (list | function) {written.mark('<|/tool_call|>')}"]
    return Marked({"<|tool_call|>": "closed", "functools[": "rest"}, None, rules)


def toolcall(callees: Sequence[Callee], written: Written, parallel: bool) -> Marked:
    """`<TOOLCALL>[{...}]</TOOLCALL>`."""
    rules = [*_list(callees, parallel), f"closed: list {written.mark('</TOOLCALL>')}"]
    return Marked({"<TOOLCALL>": "closed"}, None, rules)


def cohere(callees: Sequence[Callee], written: Written, parallel: bool) -> Marked:
    """`<|START_ACTION|>[{"tool_call_id": ..., "tool_name": ..., "parameters": {...}}]<|END_ACTION|>`."""
    before = '"tool_name": "{name}", "parameters": '
    rules = [
        *_list(callees, parallel, choice("function", callees, before, "}", begin='"{" number?')),
        'number: "\\"tool_call_id\\": \\"" /[0-9]+/ "\\", "',
        f"closed: list {written.mark('<|END_ACTION|>')}",
    ]
    return Marked({"<|START_ACTION|>": "closed"}, None, rules)


def apertus(callees: Sequence[Callee], written: Written, parallel: bool) -> Marked:
    """`<|tools_prefix|>[{NAME: {...}}]<|tools_suffix|>`."""
    rules = [
        *_list(callees, parallel, choice("function", callees, '{{"{name}": ', "}")),
        f"closed: list {written.mark('<|tools_suffix|>')}",
    ]
    return Marked({"<|tools_prefix|>": "closed"}, None, rules)


def hunyuan(callees: Sequence[Callee], written: Written, parallel: bool) -> Marked:
    """`<tool_calls>[{...}]</tool_calls>`, or calls in marks of their own with fenced blocks of JSON."""
    more = ' ("\\n"? call)*' if parallel else ""
    begin, end = written.mark("<tool_call>"), written.mark("</tool_call>")
    rules = [
        *_list(callees, parallel),
        f'closed: (list | call{more} "\\n"?) {written.mark("</tool_calls>")}',
        f"call: {begin} fenced {end}",
        named("fenced", callees, ' "\\n```json\\n" ', ' "\\n```"'),
    ]
    return Marked({"<tool_calls>": "closed"}, None, rules)


def _list(callees: Sequence[Callee], parallel: bool, function: str | None = None) -> list[str]:
    """Rules of a `list` of functions, and of the `rest` of it behind the bracket."""
    more = ' ("," BLANK? function BLANK?)*' if parallel else ""
    return [
        'list: BLANK? "[" rest',
        f'rest: BLANK? function BLANK?{more} "]"',
        function or choice("function", callees, '{{"name": "{name}", "arguments": ', "}"),
    ]


def choice(rule: str, callees: Sequence[Callee], before: str, after: str, more: str = "", begin: str = "") -> str:
    """A rule of one function's call as JSON, between two texts; the first has a place for the name."""
    ways = [
        f"{begin} {literal(before.format(name=one.name))} {one.arguments} {literal(after) if after else ''}{more}"
        for one in callees
    ]
    return f"{rule}: {' | '.join(ways)}"


def named(rule: str, callees: Sequence[Callee], between: str, after: str = "") -> str:
    """A rule of one function's name and, behind what stands `between`, its arguments."""
    return f"{rule}: {' | '.join(f'{literal(one.name)}{between}{one.arguments}{after}' for one in callees)}"


def listed(separator: str, parallel: bool) -> str:
    """Further functions behind a first one."""
    return f"({literal(separator)} function)*" if parallel else ""
