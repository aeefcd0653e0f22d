"""The API's reference for people, made from the OpenAPI document: its sections, and the page `/docs`.

FastAPI's own pages load their scripts from other hosts; this one is a single answer without any.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse

_STYLE = """
:root { color-scheme: light dark; --paper: light-dark(#faf9f5, #15171a); --ink: light-dark(#1d2225, #e6e4de);
  --soft: light-dark(#5b6266, #a0a5a8); --line: light-dark(#dcd9d0, #34383d); --accent: light-dark(#17606a, #6fc3cc) }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; max-width: 64rem;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-family: Charter, Georgia, serif } a { color: var(--accent) }
h2 { margin: 2.5rem 0 0; scroll-margin-top: 1rem } h2 code { font-size: 1.0625rem }
code { font-size: .875em; overflow-wrap: anywhere } nav ul { columns: 18rem; padding: 0; list-style: none }
.frame { overflow-x: auto } table { border-collapse: collapse; width: 100%; min-width: 38rem }
th { color: var(--soft); font-weight: normal } td:first-child, td:nth-child(3) { white-space: nowrap }
td, th { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line) }
"""

ASKING_NOTHING = "Fields that ask for nothing"
_ASKING_NOTHING_TEXT = (
    "No answer depends on these. They are accepted with the values that are listed, and with null. So is null under "
    "any other name."
)

router = APIRouter()


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    """The reference as a page."""
    return HTMLResponse(as_html(request.app.openapi()))


@dataclass(frozen=True)
class Field:
    """A member of a request's body, or a parameter of the URL.

    `type` is in words, `default` in JSON, or None if the field is required.
    """

    name: str
    type: str
    default: str | None
    description: str


@dataclass(frozen=True)
class Section:
    """An endpoint with what it takes, or an object that is part of one."""

    title: str
    description: str
    fields: list[Field]


def sections(document: dict[str, Any]) -> Iterator[Section]:
    """The endpoints of an OpenAPI document in its order, then the objects in their bodies."""
    schemas = document["components"]["schemas"]
    parts: dict[str, None] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            fields = [
                _parameter(parameter) for parameter in operation.get("parameters", []) if parameter["in"] == "query"
            ]
            if (body := operation.get("requestBody")) is not None:
                bodies = [schemas[name] for name in _bodies_of(body)]
                # Where a body is one of several, each has its fields in the section of its own endpoint.
                if bodies:
                    fields = _fields(bodies[0], schemas) if len(bodies) == 1 else []
                parts |= dict.fromkeys(name for schema in bodies for name in _named(schema))
            yield Section(f"{method.upper()} {path}", operation["description"], fields)
    done: set[str] = set()
    while left := [name for name in parts if name not in done]:
        done.add(left[0])
        schema = schemas[left[0]]
        parts |= dict.fromkeys(_named(schema))
        # What a class raises is for who reads its source.
        yield Section(left[0], schema.get("description", "").partition("\n\nRaises:")[0], _fields(schema, schemas))
    yield _asking_nothing(document)


def _asking_nothing(document: dict[str, Any]) -> Section:
    """The fields of all bodies that no answer depends on, each once, with where it may stand."""
    schemas = document["components"]["schemas"]
    fields: dict[str, Field] = {}
    places: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for operation in methods.values():
            if (body := operation.get("requestBody")) is None:
                continue
            members = [one for name in _bodies_of(body) for one in schemas[name]["properties"].items()]
            for name, member in members:
                if "x-class" in member:
                    fields.setdefault(name, Field(name, _type(member), "null", member["description"]))
                    if f"`{path}`" not in places.setdefault(name, []):
                        places[name].append(f"`{path}`")
    found = [
        Field(name, one.type, one.default, f"{one.description} {', '.join(places[name])}.")
        for name, one in fields.items()
    ]
    return Section(ASKING_NOTHING, _ASKING_NOTHING_TEXT, found)


def as_html(document: dict[str, Any]) -> str:
    """The reference as one page."""
    found = list(sections(document))
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<link rel=icon href='data:,'>",  # a browser would ask for one elsewhere, and be told that there is none
        "<meta name=viewport content='width=device-width, initial-scale=1'>",
        f"<title>longreach API</title><style>{_STYLE}</style><h1>longreach API</h1>",
        "<p>A client of OpenAI&rsquo;s API works here with another base URL, this server&rsquo;s and <code>/v1</code>.",
        "What a field asks for is honoured, or refused by the field&rsquo;s name.",
        f"<a href='#{_anchor(ASKING_NOTHING)}'>Some ask for nothing</a>.</p>",
        "<p>The same for programs: <a href=openapi.json>openapi.json</a></p>",
        "<nav aria-label=Contents><ul>",
        *(f"<li><a href='#{_anchor(s.title)}'><code>{html.escape(s.title)}</code></a>" for s in found),
        "</ul></nav>",
    ]
    objects = {section.title for section in found if section.title.isidentifier()}
    for section in found:
        parts.append(f"<h2 id='{_anchor(section.title)}'><code>{html.escape(section.title)}</code></h2>")
        parts.append(f"<p>{_prose(section.description)}</p>")
        if section.fields:
            parts.append("<div class=frame tabindex=0><table><tr><th>Field<th>Type<th>Default<th>Meaning")
            for field in section.fields:
                cells = [f"<code>{html.escape(field.name)}</code>", _linked(field.type, objects)]
                cells += ["required" if field.default is None else f"<code>{html.escape(field.default)}</code>"]
                parts.append("<tr><td>" + "<td>".join([*cells, _prose(field.description)]))
            parts.append("</table></div>")
    return "\n".join(parts)


def _anchor(title: str) -> str:
    return re.sub(r"\W+", "-", title).strip("-")


def _prose(text: str) -> str:
    """A description as HTML: what stands in backticks is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _linked(kind: str, objects: set[str]) -> str:
    """A type as HTML, with links to the objects that it names."""

    def link(word: re.Match[str]) -> str:
        return f"<a href='#{word[0]}'>{word[0]}</a>" if word[0] in objects else word[0]

    return re.sub(r"\w+", link, html.escape(kind))


def _fields(schema: dict[str, Any], schemas: dict[str, Any]) -> list[Field]:
    """The members of an object that mean something, those first that are required."""
    required = schema.get("required", [])
    found = []
    members = ((name, member) for name, member in schema.get("properties", {}).items() if "x-class" not in member)
    for name, member in sorted(members, key=lambda item: item[0] not in required):
        default = None if name in required else json.dumps(member.get("default"))
        description = member.get("description") or schemas.get(_name(member), {}).get("description", "")
        found.append(Field(name, _type(member), default, description.partition("\n")[0]))
    return found


def _parameter(parameter: dict[str, Any]) -> Field:
    """A parameter of the URL; of an object whose members are the parameters, the one that says which kind it is."""
    name, kind = parameter["name"], _type(parameter["schema"])
    if parameter.get("explode"):
        kinds = [part["properties"] for part in parameter["schema"]["oneOf"]]
        [name] = [member for member, schema in kinds[0].items() if "const" in schema]
        kind = " or ".join(_type(members[name]) for members in kinds)
    default = None if parameter.get("required") else json.dumps(parameter["schema"].get("default"))
    return Field(name, kind, default, parameter.get("description", ""))


def _type(schema: dict[str, Any]) -> str:
    """A schema in a few words; null, which every field with a default takes, is left out."""
    if name := _name(schema):
        return name
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(json.dumps(value) for value in values)
    for union in ("anyOf", "oneOf"):
        if union in schema:
            named = [kind for part in schema[union] if (kind := _type(part)) != "null"]
            return " or ".join(dict.fromkeys(named))
    kinds = schema.get("type", "any")
    kind = next((k for k in kinds if k != "null"), "null") if isinstance(kinds, list) else kinds
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    if low is not None and high is not None and max(abs(low), abs(high)) < 2**24:
        above = "above " if "exclusiveMinimum" in schema else ""
        return f"{kind}, {above}{_number(low)} to {_number(high)}"
    return kind


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"


def _name(schema: dict[str, Any]) -> str:
    """The object that a schema refers to, or the empty string."""
    return schema.get("$ref", "").rpartition("/")[2]


def _bodies_of(body: dict[str, Any]) -> list[str]:
    """The objects of which a request's body is one, whatever form it is sent in; none of a body that is a file."""
    schema = next(iter(body["content"].values()))["schema"]
    return [name for one in schema.get("anyOf", [schema]) if (name := _name(one))]


def _named(schema: object) -> Iterator[str]:
    """All objects that a schema refers to."""
    if isinstance(schema, dict):
        if name := _name(schema):
            yield name
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            yield from _named(part)
