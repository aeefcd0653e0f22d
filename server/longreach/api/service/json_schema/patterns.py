"""Look-ahead at the beginning of a pattern, written as further patterns that have to match as well.

llguidance follows no look-around. Generators write some at the beginning: pydantic's `Decimal` and zod's `email` do.
`^(?=A)B` is `^(?:A)` and `^B`; `^(?!A)B` is the complement of `^A` and `^B`, which is written for the simplest `A`.
"""

from __future__ import annotations

import re

_ATOM = r"(?:\[\^?\]?(?:\\.|[^\]\\])*\]|\\[^A-Za-z0-9]|\\[dswDSW]|[^\\\[\](){}.*+?|^$])"
_SEQUENCE = re.compile(f"{_ATOM}+")
_ONE_OF_ATOM = re.compile(_ATOM)
_ONLY = re.compile(rf"\^?(?P<atom>{_ATOM})(?P<times>[*+])\$")
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")
_ANY = r"[\s\S]*"
_LITERAL_CHARACTERS = 2  # the longest text whose absence is written


def without_look_ahead(pattern: str) -> list[str] | None:
    """Patterns that match together what `pattern` matches, or less of it; None where none is known.

    A pattern without any look-around is returned alone.
    """
    if not _LOOK_AROUND.search(pattern):
        return [pattern]
    if not pattern.startswith("^") or "|" in _outside_groups(pattern):
        return None
    rest, found = pattern[1:], []
    while (kind := rest[:3]) in ("(?=", "(?!"):
        end = _group_end(rest)
        if end is None:
            return None
        inner, rest = rest[3:end], rest[end + 1 :]
        one = _complement(inner) if kind == "(?!" else f"^(?:{inner.removeprefix('^')})"
        if one is None or _LOOK_AROUND.search(one):
            return None
        found.append(one)
    return None if _LOOK_AROUND.search(rest) else [f"^{rest}", *found]


def _complement(inner: str) -> str | None:
    """A pattern that matches texts at whose beginning `inner` does not match; None where none is known."""
    if (only := _ONLY.fullmatch(inner)) is not None:
        other = _negated(only["atom"])
        return other if only["times"] == "*" else f"^$|{other}"
    if inner.startswith(".*") and _SEQUENCE.fullmatch(inner[2:]):
        return _absent(_ONE_OF_ATOM.findall(inner[2:]))
    whole = inner.endswith("$") and not inner.endswith(r"\$")
    sequence = inner.removeprefix("^").removesuffix("$") if whole else inner.removeprefix("^")
    if not _SEQUENCE.fullmatch(sequence):
        return None
    goes_on = r"[\s\S]+" if whole else None
    for atom in reversed(_ONE_OF_ATOM.findall(sequence)):
        ways = [_negated(atom) + _ANY] + ([] if goes_on is None else [atom + goes_on])
        goes_on = f"(?:{'|'.join(ways)})?"
    return f"^{goes_on}$"


def _absent(atoms: list[str]) -> str | None:
    """A pattern of texts in which these characters never stand behind one another."""
    first, *more = atoms
    if not more:
        return f"^{_negated(first)}*$"
    if len(atoms) > _LITERAL_CHARACTERS or any(atom.startswith("[") or atom[1:].isalpha() for atom in atoms):
        return None
    [second] = more
    if first == second:
        return f"^(?:{first}?{_negated(first)})*{first}?$"
    return f"^(?:{_negated(first)}|{first}+[^{first}{second}])*{first}*$"


def _negated(atom: str) -> str:
    if atom.startswith("[^"):
        return "[" + atom[2:]
    if atom.startswith("["):
        return "[^" + atom[1:]
    return f"[^{atom}]"


def _group_end(text: str) -> int | None:
    """The place of the parenthesis that closes the one at the beginning."""
    depth = 0
    for place, character in _significant(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return place
    return None


def _outside_groups(text: str) -> str:
    kept, depth = "", 0
    for _, character in _significant(text):
        depth += (character == "(") - (character == ")")
        kept += character if depth == 0 else ""
    return kept


def _significant(text: str) -> list[tuple[int, str]]:
    """The characters that are neither escaped nor within a class, and their places."""
    found = re.finditer(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|(?P<plain>[^\\\[])", text, re.DOTALL)
    return [(match.start(), match["plain"]) for match in found if match["plain"] is not None]
