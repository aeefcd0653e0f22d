"""Write the tables of docs/models.md from the families' data.

python docs/model_tables.py            # writes the page
python docs/model_tables.py --check    # changes nothing, fails if the page is not what the table of families says
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import generated_page
from longreach_patches.families import FAMILIES, LEFT_OUT, Family

PAGE = Path(__file__).resolve().parent / "models.md"
BEGIN, END = "<!-- families -->\n", "<!-- end -->\n"
OUT_BEGIN, OUT_END = "<!-- left out -->\n", "<!-- end of left out -->\n"


def render(page: str) -> str:
    """The page with its tables made anew."""
    return _between(_between(page, BEGIN, END, _served()), OUT_BEGIN, OUT_END, _left_out())


def _between(page: str, begin: str, end: str, lines: Iterable[str]) -> str:
    before, found, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"page: needs the lines {begin.strip()} and {end.strip()}")
    return before + begin + "\n" + "\n".join(lines) + "\n\n" + end + after


def _served() -> Iterable[str]:
    yield "| `model_type` | for example | layers |"
    yield "|---|---|---|"
    for family in sorted(FAMILIES.values(), key=lambda family: (not family.fused, family.model_type)):
        yield f"| `{family.model_type}` | {', '.join(family.examples)} | {_layers(family)} |"


def _layers(family: Family) -> str:
    return "fused" if family.fused else "transformers'"


def _left_out() -> Iterable[str]:
    by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for model_type, reason in LEFT_OUT.items():
        by_reason[reason].append(f"`{model_type}`")
    yield "| `model_type` | what it has, and is not computed |"
    yield "|---|---|"
    for reason, kinds in by_reason.items():
        yield f"| {', '.join(kinds)} | {reason} |"


def main() -> None:
    """Write the page, or with --check compare it."""
    generated_page.main(PAGE, render, __file__, "the table of families says")


if __name__ == "__main__":
    main()
