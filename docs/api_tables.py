"""Write the API's reference (docs/api-*.md) and the list of endpoints in docs/api.md from the OpenAPI document.

    python docs/api_tables.py            # writes the pages
    python docs/api_tables.py --check    # changes nothing, fails if a page is not what the document says

A page's reference is everything behind the line `<!-- reference -->`. An object that the endpoints of one page alone
refer to stands on that page, and others on the page of shared objects.
"""

from __future__ import annotations

import re
from pathlib import Path

import generated_page
from longreach.api.app import create_app
from longreach.api.documentation.reference import ASKING_NOTHING, Field, Section, sections
from longreach.api.service.service import Service
from longreach.config import load_settings

DOCS = Path(__file__).resolve().parent
MARKER = "<!-- reference -->\n"
BEGIN, END = "<!-- endpoints -->\n", "<!-- end -->\n"
INDEX, OTHERS, SHARED, NEUTRAL = "api.md", "api-server.md", "api-objects.md", "api-neutral-fields.md"
# The beginnings of the paths that a page has; OTHERS has those that are left.
PATHS = {
    "api-completions.md": ("/v1/completions", "/v1/chat/"),
    "api-responses.md": ("/v1/responses", "/v1/requests/"),
    "api-messages.md": ("/v1/messages",),
    "api-documents.md": ("/v1/documents", "/v1/files", "/v1/text"),
}


def pages() -> list[Path]:
    """The files that this script writes."""
    return [DOCS / name for name in (INDEX, *PATHS, OTHERS, SHARED, NEUTRAL)]


def render(texts: dict[str, str]) -> dict[str, str]:
    """The pages by name with their generated parts made anew.

    Raises:
        ValueError: a page has no marker.
    """
    found = list(sections(create_app(Service(load_settings())).openapi()))
    placed = _places(found)
    rendered = {}
    for name, text in texts.items():
        if name == INDEX:
            rendered[name] = _index(text, found, placed)
            continue
        prose, marker, _ = text.partition(MARKER)
        if not marker:
            raise ValueError(f"{name}: needs the line {MARKER.strip()}")
        here = [section for section in found if placed[section.title] == name]
        rendered[name] = prose + marker + "\n" + "\n".join(_section(section, placed, name) for section in here)
    return rendered


def _places(found: list[Section]) -> dict[str, str]:
    """The page of each section."""
    objects = {section.title: section for section in found if section.title.isidentifier()}
    users: dict[str, set[str]] = {title: set() for title in objects}
    placed = {}
    for section in found:
        if section.title in objects:
            continue
        page = NEUTRAL if section.title == ASKING_NOTHING else _page(section.title.partition(" ")[2])
        placed[section.title] = page
        waiting, seen = [section], set[str]()
        while waiting:
            named = {word for field in waiting.pop().fields for word in re.findall(r"\w+", field.type)}
            for title in (named & objects.keys()) - seen:
                seen.add(title)
                users[title].add(page)
                waiting.append(objects[title])
    return placed | {title: next(iter(on)) if len(on) == 1 else SHARED for title, on in users.items()}


def _page(path: str) -> str:
    return next((name for name, beginnings in PATHS.items() if path.startswith(beginnings)), OTHERS)


def _index(text: str, found: list[Section], placed: dict[str, str]) -> str:
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{INDEX}: needs the lines {BEGIN.strip()} and {END.strip()}")
    lines = ["| endpoint | |", "|---|---|"]
    for section in found:
        if " " in section.title and section.title != ASKING_NOTHING:
            what = section.description.partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")
            lines.append(f"| [`{section.title}`]({placed[section.title]}#{_anchor(section.title)}) | {what} |")
    return before + begin + "\n" + "\n".join(lines) + "\n\n" + end + after


def _section(section: Section, placed: dict[str, str], page: str) -> str:
    lines = [f"## `{section.title}`", "", section.description, ""]
    if section.title == ASKING_NOTHING:
        lines = [section.description, ""]
    if section.fields:
        lines += ["| Field | Type | Default | |", "|---|---|---|---|"]
        lines += [_row(field, placed, page) for field in section.fields]
        lines.append("")
    return "\n".join(lines)


def _row(field: Field, placed: dict[str, str], page: str) -> str:
    default = "required" if field.default is None else f"`{field.default}`"
    cells = [cell.replace("|", "\\|") for cell in (f"`{field.name}`", field.type, default, field.description)]
    cells[1] = re.sub(r"\b[A-Z]\w+", lambda word: _linked(word[0], placed, page), cells[1])
    return "| " + " | ".join(cells) + " |"


def _linked(name: str, placed: dict[str, str], page: str) -> str:
    if name not in placed:
        return name
    return f"[{name}]({'' if placed[name] == page else placed[name]}#{_anchor(name)})"


def _anchor(title: str) -> str:
    """The anchor of a heading, as GitHub and MkDocs make it."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def main() -> None:
    """Write the pages, or with --check compare them."""
    generated_page.main_of_several(pages(), render, __file__, "the OpenAPI document says")


if __name__ == "__main__":
    main()
