"""Marks around the texts of a chat show where these stand in the prompt, whatever a template does around them."""

from __future__ import annotations

from typing import Any

import pytest
from longreach.text.chat_template import ChatTemplate
from longreach.text.prompt_places import Place, PlaceMarks, place_at

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "  Be brief.\n"},
    {"role": "user", "content": "Wie spät? 🕛"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "A clock.",
        "tool_calls": [{"id": "1", "function": {"name": "now", "arguments": {"zone": ["UTC", 3], "as": "hour"}}}],
    },
    {"role": "tool", "content": "12:30", "tool_call_id": "1"},
]
TOOLS = [
    {"type": "function", "function": {"name": "now", "description": "Tells the time.", "parameters": {}}},
    {"type": "function", "function": {"name": "then", "parameters": {}}},
]
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function | tojson }};{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}{{ m.content | trim }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}<end>"
)


def test_every_text_is_found_and_the_rest_is_the_templates() -> None:
    template, marks = ChatTemplate({"default": TEMPLATE}, {}), PlaceMarks()
    text, spans = marks.spans(template.fill(marks.around_messages(CHAT), marks.around_tools(TOOLS), False))
    assert text == template.fill(CHAT, TOOLS, False)
    found = [(text[span.start : span.end], span.place) for span in spans]
    assert found[0][0].startswith("now")
    assert found[0][0].endswith("then")
    assert found[0][1] == Place("tools")
    assert found[1:] == [
        ("Be brief.", Place("content", 0, "system")),
        ("Wie spät? 🕛", Place("content", 1, "user")),
        ("A clock.", Place("reasoning_content", 2, "assistant")),
        ("UTC", Place("tool_calls", 2, "assistant")),
        ("hour", Place("tool_calls", 2, "assistant")),
        ("12:30", Place("content", 3, "tool")),
    ]


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("", Place("template", None, None)),
        ("Tells", Place("tools", None, None)),
        ("<syst", Place("template", 0, "system")),
        ("Be bri", Place("content", 0, "system")),
        ("Be brief.", Place("template", 1, "user")),
        ("Wie spät? ", Place("content", 1, "user")),
        ("12:30", Place("template", None, None)),
        ("<end>", Place("template", None, None)),
    ],
)
def test_a_character_has_a_place(before: str, expected: Place) -> None:
    template, marks = ChatTemplate({"default": TEMPLATE}, {}), PlaceMarks()
    text, spans = marks.spans(template.fill(marks.around_messages(CHAT), marks.around_tools(TOOLS), False))
    assert place_at(spans, text.index(before) + len(before)) == expected


def test_no_text_is_no_place() -> None:
    marks = PlaceMarks()
    assert marks.spans("plain") == ("plain", [])
    assert place_at([], 3) == Place("template")
    assert marks.around_messages([{"role": "user", "content": " \n"}])[0]["content"] == " \n"
