"""Write the tables of docs/tool-calls.md from the formats of calls and the marks of reasoning that the server reads.

    python docs/call_tables.py            # writes the page
    python docs/call_tables.py --check    # changes nothing, fails if the page is not what the formats say

Each table goes between the markers `<!-- calls -->` or `<!-- reasoning -->` and `<!-- end -->`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import generated_page
from longreach.text.calls.formats import FORMATS, CallFormat
from longreach.text.reasoning import REASONING

PAGE = Path(__file__).resolve().parent / "tool-calls.md"


def _code(text: str) -> str:
    return f"`{text}`".replace("|", r"\|")  # a bar ends a cell, also in code


def _evidence(form: CallFormat) -> str:
    return ", or ".join(" and ".join(_code(text) for text in texts) for texts in form.evidence)


def calls_table() -> str:
    """A row for each format."""
    lines = ["| name | models | a call of `look`, each newline as `⏎` | the chat template has |", "|---|---|---|---|"]
    for form in FORMATS:
        example = form.example.replace("\n", "⏎")
        lines.append(f"| `{form.name}` | {form.models} | {_code(example)} | {_evidence(form)} |")
    return "\n".join(lines) + "\n"


def reasoning_table() -> str:
    """A row for each kind of marks."""
    lines = ["| begins | ends | words may stand between | models |", "|---|---|---|---|"]
    for marks in REASONING:
        opens, closes = (", ".join(map(_code, texts)) for texts in (marks.opens, marks.closes))
        frames = ", ".join(f"{_code(begin)} and {_code(end)}" for begin, end in marks.frames)
        lines.append(f"| {opens} | {closes} | {frames} | {marks.models} |")
    return "\n".join(lines) + "\n"


_TABLES: dict[str, Callable[[], str]] = {"calls": calls_table, "reasoning": reasoning_table}


def render(page: str) -> str:
    """The page with its tables made anew."""
    for name, table in _TABLES.items():
        begin, end = f"<!-- {name} -->\n", "<!-- end -->\n"
        if begin not in page or end not in page.partition(begin)[2]:
            raise ValueError(f"page: needs the lines {begin.strip()} and {end.strip()}")
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{table()}\n{end}{rest.partition(end)[2]}"
    return page


def main() -> None:
    """Write the page, or with --check compare it."""
    generated_page.main(PAGE, render, __file__, "the server reads")


if __name__ == "__main__":
    main()
