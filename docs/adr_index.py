"""Write the table of docs/adr/README.md from the headers of the decision records.

python docs/adr_index.py            # writes the page
python docs/adr_index.py --check    # changes nothing, fails if the page is not what the records say
"""

from __future__ import annotations

import datetime
import re
import sys
from pathlib import Path

import generated_page

PAGE = Path(__file__).resolve().parent / "adr" / "README.md"
BEGIN, END = "<!-- records -->\n", "<!-- end -->\n"
STATUSES = ("accepted", "superseded by", "superseded in part by", "withdrawn")
SECTIONS = ["Context", "Decision", "Consequences"]
_HEADER = re.compile(r"# (?P<number>\d+)\. (?P<title>.+)\n\n- Status: (?P<status>.+)\n- Date: (?P<date>\S+)\n")
_LINK = re.compile(r"\[\d+\]\(([^)]+)\)")


def record(file: Path) -> tuple[str, str, str, str]:
    """Number, title, status and date of a decision record.

    Raises:
        ValueError: the header, a section or a record that the status names is missing or wrong.
    """
    text = file.read_text()
    header = _HEADER.match(text)
    if header is None:
        raise ValueError(f"{file.name} must begin with `# NUMBER. TITLE`, `- Status: ...` and `- Date: YYYY-MM-DD`")
    number, title, status, date = header.group("number", "title", "status", "date")
    if int(number) != int(file.name[:4]):
        raise ValueError(f"{file.name} has the number {number} in its title; make the two equal")
    if not status.startswith(STATUSES):
        raise ValueError(f"{file.name} has the status {status!r}; begin it with one of: {', '.join(STATUSES)}")
    links = _LINK.findall(status)
    if "superseded" in status and not links:
        raise ValueError(f"{file.name} is superseded; link the record that supersedes it: [8](0008-name.md)")
    for link in links:
        if not (file.parent / link).exists():
            raise ValueError(f"{file.name} names {link}, which does not exist")
    try:
        datetime.date.fromisoformat(date)
    except ValueError:
        raise ValueError(f"{file.name} has the date {date!r}; write it as YYYY-MM-DD") from None
    sections = re.findall(r"^## (.+)$", text, re.MULTILINE)
    if sections != SECTIONS:
        raise ValueError(f"{file.name} has the sections {sections}; the format is {SECTIONS}")
    return number, title, status, date


def render(page: str) -> str:
    """The page with its table made anew.

    Raises:
        ValueError: the page has no markers, or a record is not in the format.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"page: needs the lines {BEGIN.strip()} and {END.strip()}")
    lines = ["| | decision | status | date |", "|---:|---|---|---|"]
    for file in sorted(PAGE.parent.glob("[0-9]*.md")):
        number, title, status, date = record(file)
        lines.append(f"| {number} | [{title}]({file.name}) | {status} | {date} |")
    return before + begin + "\n" + "\n".join(lines) + "\n\n" + end + after


def main() -> None:
    """Write the page, or with --check compare it."""
    try:
        generated_page.main(PAGE, render, __file__, "the records say")
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
