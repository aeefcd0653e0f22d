"""Write the tables of docs/settings.md from the server's settings: every flag, its values and its default.

python docs/settings_tables.py            # writes the page
python docs/settings_tables.py --check    # changes nothing, fails if the page is not what the settings say
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import generated_page
from longreach.command_options import sections, shown_default, shown_values
from longreach.config import Settings, flag

PAGE = Path(__file__).resolve().parent / "settings.md"
BEGIN, END = "<!-- settings -->\n", "<!-- end -->\n"


def render(page: str) -> str:
    """The page with its tables made anew."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"page: needs the lines {BEGIN.strip()} and {END.strip()}")
    return before + begin + "\n" + "\n".join(_tables()) + "\n" + end + after


def _tables() -> Iterator[str]:
    for heading, named in itertools.groupby(sections(), key=lambda named: named[1]):
        yield from (f"## {heading}", "", "| flag | value | default | |", "|---|---|---|---|")
        yield from (_row(name) for name, _ in named)
        yield ""


def _row(name: str) -> str:
    field = Settings.model_fields[name]
    option = "`MODEL`" if name == "model" else f"`{flag(name)}`"
    if field.annotation is bool and field.default:
        option += f", `--no-{flag(name)[2:]}`"
    default = shown_default(name)
    cells = [option, shown_values(name), f"`{default}`" if default else "", str(field.description)]
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def main() -> None:
    """Write the page, or with --check compare it."""
    generated_page.main(PAGE, render, __file__, "the settings say")


if __name__ == "__main__":
    main()
