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


def choice(rule: str, callees: Sequence[Callee], before: str, after: str, more: str = "") -> str:
    """A rule of one function's call as JSON, between two texts; the first has a place for the name."""
    ways = [
        f"{literal(before.format(name=one.name))} {one.arguments} {literal(after) if after else ''}{more}"
        for one in callees
    ]
    return f"{rule}: {' | '.join(ways)}"


def named(rule: str, callees: Sequence[Callee], between: str, after: str = "") -> str:
    """A rule of one function's name and, behind what stands `between`, its arguments."""
    return f"{rule}: {' | '.join(f'{literal(one.name)}{between}{one.arguments}{after}' for one in callees)}"


def listed(separator: str, parallel: bool) -> str:
    """Further functions behind a first one."""
    return f"({literal(separator)} function)*" if parallel else ""
