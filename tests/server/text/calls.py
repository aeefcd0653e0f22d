"""What tests of calls share: functions that are offered, and the parts of an answer in short."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longreach.text.answer_reader import AnswerReader
from longreach.text.parts import Part

LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "share": {"type": "number"},
                "dry": {"type": "boolean"},
                "place": {"$ref": "#/$defs/Place"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "tree": {"$ref": "#/definitions/tree"},
                "unit": {"enum": ["true", "7", 8]},
            },
            "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "number"}}}},
            "definitions": {"tree": {"type": "array", "items": {"$ref": "#/definitions/tree"}}},
            "additionalProperties": {"type": "integer"},
        },
    },
}
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {}}}
TOOLS = [LOOK, ADD, {"type": "function", "function": {"name": "look_up"}}]


def pieces(text: str, cuts: Sequence[int]) -> list[str]:
    """A text cut at some places."""
    ends = [*sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def read(reader: AnswerReader, text: str, cuts: Sequence[int] = (), *, cut: bool = False) -> list[tuple[str, ...]]:
    """The parts of an answer: those of one kind that touch are joined, and a call is one with its arguments.

    A whole call is `("call", name, arguments)`, one that has no end is `("open", name, arguments)`.
    """
    parts: list[Part] = [part for piece in pieces(text, cuts) for part in reader.push(piece)] + reader.flush(cut)
    found: list[list[str]] = [[""]]
    for part in parts:
        last = found[-1]
        if part.call is not None:
            found.append(["open", part.call.name, ""])
        elif part.kind in ("arguments", "call_end"):
            assert last[0] == "open"
            last[0] = "call" if part.kind == "call_end" else "open"
            last[2] += part.text
        elif last[0] == part.kind:
            last[1] += part.text
        else:
            found.append([part.kind, part.text])
    return [tuple(one) for one in found[1:]]
