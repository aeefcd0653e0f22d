"""The model that the real clients talk to, without clients: what it reads in a prompt, and which tools it uses how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from longreach.text.answer_format import AnswerFormat
from longreach.text.chat_template import ChatTemplate

from tests.clients import results, tool_use
from tests.clients.constrained import constrained
from tests.clients.conversation import Conversation
from tests.clients.scripted_model import answer
from tests.clients.suite import Outcome

TEMPLATE = (Path(__file__).parent / "model" / "chat_template.jinja").read_text()
PROMPT = "Read the file /w/notes.txt, replace the word lantern with torch in it, and tell me the pass key in it."
NOTES = "1\tThe lantern hangs.\n2\tThe pass key is 48213.\n"
EDIT = tool_use.Edit("/w/notes.txt", "lantern", "torch")


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """A function as a chat offers it; all its parameters are required."""
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}


STRING = {"type": "string"}
TOOLS = [
    tool("view_image", path=STRING),
    tool("Read", file_path=STRING),
    tool("Edit", file_path=STRING, old_string=STRING, new_string=STRING),
]


def reading(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> Conversation:
    """What the model reads of a chat that the template has written; characters stand for tokens."""
    template = ChatTemplate({"default": TEMPLATE}, {})
    prompt = template.fill(messages, tools or [], True)
    start = 0x110000
    tokens: list[int] = []
    for number, piece in enumerate(prompt.split("<|im_start|>")):
        tokens += [start] * bool(number) + list(map(ord, piece))
    return Conversation.read(tokens, start, lambda ids: "".join(map(chr, ids)))


def test_a_task_is_read_edit_answer() -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "s"}, {"role": "user", "content": PROMPT}]
    written = []
    for result in (NOTES, "done", None):
        text = answer(reading(messages, TOOLS))
        assert text.startswith("<think>\n")
        written.append(text.split("</think>\n\n")[1])
        if result is not None:
            call = json.loads(written[-1].removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
            call["arguments"] |= {"limit": 7}  # a client may add defaults
            told = {"id": "c", "type": "function", "function": call}
            messages += [
                {"role": "assistant", "content": None, "tool_calls": [told]},
                {"role": "tool", "content": result, "tool_call_id": "c"},
            ]
    assert '{"name": "Read", "arguments": {"file_path": "/w/notes.txt"}}' in written[0]
    changed = {"file_path": "/w/notes.txt", "old_string": "The lantern hangs.", "new_string": "The torch hangs."}
    assert json.dumps({"name": "Edit", "arguments": changed}) in written[1]
    assert written[2] == "The pass key is 48213. The file now has torch in place of lantern."


def test_the_template_uses_marks_that_the_server_knows() -> None:
    assert AnswerFormat.load(str(Path(__file__).parent / "model"), [TEMPLATE]).has_tool_calls


def test_questions_without_a_task() -> None:
    asked = [{"role": "user", "content": "The pass key is 48213. What is the pass key?"}]
    assert answer(reading(asked)).endswith("</think>\n\nThe pass key is 48213.")
    again = [*asked, {"role": "assistant", "content": "a"}, {"role": "user", "content": "What did I ask first?"}]
    assert answer(reading(again)).endswith('You asked 2 times. The first time: "pass key is 48213"')


@pytest.mark.parametrize(
    ("offered", "arguments"),
    [
        (tool("shell", command={"type": "array", "items": STRING}), {"command": ["bash", "-c", "cat /w/notes.txt"]}),
        (tool("exec_command", cmd=STRING), {"cmd": "cat /w/notes.txt"}),
        (tool("view", path=STRING), {"path": "/w/notes.txt"}),
        (
            tool("read_files", files={"type": "array", "items": tool("", path=STRING)["function"]["parameters"]}),
            {"files": [{"path": "/w/notes.txt"}]},
        ),
        (
            tool("str_replace_based_edit_tool", command={"enum": ["view", "str_replace"]}, path=STRING),
            {"command": "view", "path": "/w/notes.txt"},
        ),
    ],
)
def test_tools_of_many_names_read_a_file(offered: dict[str, Any], arguments: dict[str, Any]) -> None:
    assert tool_use.reading([offered["function"]], EDIT) == (offered["function"]["name"], arguments)


def test_a_patch_and_a_shell_edit_a_file() -> None:
    patch = tool_use.editing([tool("apply_patch", input=STRING)["function"]], EDIT, "The lantern")
    assert patch is not None
    assert "\n-The lantern\n+The torch\n" in patch[1]["input"]
    shell = tool_use.editing([tool("bash", command=STRING)["function"]], EDIT, "The lantern")
    assert shell == ("bash", {"command": "sed -i 's/lantern/torch/' /w/notes.txt"})
    assert tool_use.editing([tool("view_image", path=STRING)["function"]], EDIT, "The lantern") is None


def test_what_a_grammar_asks_for_is_written() -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    style = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    grammar = json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": style}}]})
    assert constrained(grammar, "The pass key is 48213.", [], ["words"]) == '{"n": 48213}'
    calls = [("f", {"n": 5})]
    assert constrained(grammar, "words", calls, ["words"]) == '{"n": 5}'
    digits = constrained('{"grammars": [{"lark_grammar": "start: /[0-9]{5}/"}]}', "words", [], ["words"])
    assert len(digits) == 5
    assert digits.isdigit()
    with pytest.raises(ValueError, match="cannot be used"):
        constrained('{"grammars": [{"lark_grammar": "start: other"}]}', "words", [], [])


def test_results_remember_since_when() -> None:
    def run(before: dict[str, Any], ok: bool, day: str) -> dict[str, Any]:
        return results.merged(
            before, {"codex": [Outcome("scripted", "chat", "answer", ok, "why")]}, {"codex": "1"}, day, "0.1"
        )

    first = run({}, True, "2026-01-01")
    second = run(first, True, "2026-02-02")
    assert second["codex"]["checks"] == [
        {"protocol": "chat", "server": "scripted", "check": "answer", "ok": True, "since": "2026-01-01"}
    ]
    third = run(second, False, "2026-03-03")
    assert third["codex"]["checks"][0]["since"] == "2026-03-03"
    assert third["codex"]["checks"][0]["note"] == "why"
    assert results.worse(second, third) == ["codex, chat, scripted: answer"]
    assert results.worse(first, second) == []


def test_a_server_that_had_no_turn_keeps_its_results() -> None:
    def run(before: dict[str, Any], server: str) -> dict[str, Any]:
        outcomes = {"openai": [Outcome(server, "chat", "answer", True, "")]}
        return results.merged(before, outcomes, {"openai": "1"}, "2026-01-01", "0.1")

    both = run(run({}, "smollm2"), "scripted")
    assert [one["server"] for one in both["openai"]["checks"]] == ["scripted", "smollm2"]
    assert run(both, "smollm2") == both
    assert [one["server"] for one in run(run({}, "embedded"), "scripted")["openai"]["checks"]] == ["scripted"]
