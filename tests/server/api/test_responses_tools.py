"""Tools of `/v1/responses`: functions, custom tools and namespaces, their calls, and what comes back of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from longreach.api.responses.custom_input import CustomInput
from longreach.text.tokenizer import Tokenizer

from tests.server.api.conftest import MODEL, LiveServer
from tests.server.api.test_chat import TEMPLATE, prompt_of, says, schema_of
from tests.server.api.test_responses import WEATHER, ask

PATCH: Any = {"type": "custom", "name": "patch", "description": "Change a file"}
NOTES: Any = {
    "type": "namespace",
    "name": "mcp.notes",
    "description": "Notes",
    "tools": [{**WEATHER, "name": "find"}, {"type": "custom", "name": "write"}],
}
# Shows all arguments of a call.
TOOLS_TEMPLATE = TEMPLATE.replace("call.function.arguments.city", "call.function.arguments | tojson")
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


def call_of(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def told(server: LiveServer, **fields: Any) -> Any:
    """As `ask`, for items of which a test knows the types."""
    return ask(server, **fields)


PATCHING = call_of("patch", input="a\nb")


@pytest.fixture
def chat(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(template=TOOLS_TEMPLATE) as live:
        yield live


def test_reasoning_words_and_calls_are_items_in_their_order(chat: LiveServer, tokenizer: Tokenizer) -> None:
    says(chat, tokenizer, f"<think>Hm.</think>I look.\n{CALL}\n" + PATCHING)
    answer = told(chat, tools=[WEATHER, PATCH])
    assert answer.status == "completed"
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "custom_tool_call"]
    call: Any = answer.output[2]
    assert (call.name, json.loads(call.arguments), call.status) == ("weather", {"city": "Oslo"}, "completed")
    custom: Any = answer.output[3]
    assert (custom.name, custom.input) == ("patch", "a\nb")
    assert call.call_id != custom.call_id
    assert answer.output_text == "I look."
    assert '"name": "patch"' in prompt_of(chat, tokenizer)


@pytest.mark.parametrize("form", ["objects", "dumps", "dumps without null", "references", "previous"])
def test_what_was_answered_is_taken_back(chat: LiveServer, tokenizer: Tokenizer, form: str) -> None:
    says(chat, tokenizer, f"<think>Hm.</think>I look. {CALL}" + PATCHING)
    fields: dict[str, Any] = {"model": MODEL, "tools": [WEATHER, PATCH]}
    first = chat.openai.responses.create(input="Hello", **fields)
    calls: list[Any] = [item for item in first.output if item.type.endswith("_call")]
    outputs = [
        {"type": "function_call_output", "call_id": calls[0].call_id, "output": "cold"},
        {
            "type": "custom_tool_call_output",
            "call_id": calls[1].call_id,
            "output": [{"type": "input_text", "text": "done"}, {"type": "input_text", "text": "well"}],
        },
    ]
    said: list[Any] = {
        "objects": [*first.output],
        "dumps": [item.model_dump() for item in first.output],
        "dumps without null": [item.model_dump(exclude_none=True) for item in first.output],
        "references": [{"type": "item_reference", "id": item.id} for item in first.output],
        "previous": [],
    }[form]
    before: list[Any] = [] if form == "previous" else [{"role": "user", "content": "Hello"}]
    if form == "previous":
        fields["previous_response_id"] = first.id
    says(chat, tokenizer, "It is cold.")
    second = chat.openai.responses.create(input=[*before, *said, *outputs], **fields)
    assert second.output_text == "It is cold."
    assert prompt_of(chat, tokenizer).endswith(
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nI look."
        '[{"city": "Oslo"}][{"input": "a\\nb"}]<|im_end|>\n'
        "<|im_start|>tool\ncold<|im_end|>\n<|im_start|>tool\ndone\nwell<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_of_a_namespace_are_told_apart(chat: LiveServer, tokenizer: Tokenizer) -> None:
    says(chat, tokenizer, call_of("mcp_notes__find", city="Oslo") + call_of("find", city="Rome"))
    tools = [{**WEATHER, "name": "find"}, NOTES]
    answer = told(chat, tools=tools)
    first, second = answer.output
    assert first.type == second.type == "function_call"
    assert (first.name, first.namespace) == ("find", "mcp.notes")
    assert (second.name, second.namespace) == ("find", None)
    outputs: list[Any] = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "x"} for call in (first, second)
    ]
    chat.openai.responses.create(model=MODEL, tools=tools, input=[*answer.output, *outputs])
    assert '[{"city": "Oslo"}][{"city": "Rome"}]' in prompt_of(chat, tokenizer)


def test_a_long_name_is_cut_and_stays_one_name(chat: LiveServer, tokenizer: Tokenizer) -> None:
    space = {**NOTES, "name": "x" * 100, "tools": [{**WEATHER, "name": "n" * 60}]}
    told(chat, tools=[space, {**space, "name": "x" * 101}, {**NOTES, "name": "y" * 66, "tools": space["tools"]}])
    shown = [line for line in prompt_of(chat, tokenizer).splitlines() if line.startswith('{"type": "function"')]
    called = [json.loads(line)["function"]["name"] for line in shown]
    assert len(set(called)) == 3
    assert {len(name) for name in called} == {128}
    assert called[2] == "y" * 66 + "__" + "n" * 60


def test_tools_that_only_openai_runs_are_left_out_and_reported(chat: LiveServer, tokenizer: Tokenizer) -> None:
    says(chat, tokenizer, "Hi!")
    kinds = ["web_search", "file_search", "mcp", "local_shell", "tool_search", "of_tomorrow"]
    tools = [WEATHER, *({"type": kind, "server_label": "x"} for kind in kinds), {"type": "web_search"}]
    for stream in (False, True):
        body = {"model": MODEL, "input": "Hello", "tools": tools, "stream": stream}
        response = chat.http.post("/v1/responses", json=body)
        assert response.headers["x-longreach-tools-left-out"] == ", ".join(kinds)
        data = response.text.split("\n\n")[-3].partition("data: ")[2] if stream else response.text
        whole = json.loads(data)["response"] if stream else json.loads(data)
        assert whole["tools_left_out"] == kinds
        assert [tool["name"] for tool in whole["tools"]] == ["weather"]
        assert "web_search" not in prompt_of(chat, tokenizer)
    assert "x-longreach-tools-left-out" not in chat.http.post("/v1/responses", json={**body, "tools": []}).headers


def test_left_out_tools_alone_are_no_tools(chat: LiveServer, tokenizer: Tokenizer) -> None:
    answer = told(chat, tools=[{"type": "web_search"}], tool_choice="auto")
    assert answer.tools == []
    assert "<tool_call>" not in prompt_of(chat, tokenizer)


def test_a_named_tool_has_to_be_called(chat: LiveServer, tokenizer: Tokenizer) -> None:
    says(chat, tokenizer, '{"city": "Oslo"}')
    answer = told(chat, tools=[WEATHER, PATCH], tool_choice={"type": "function", "name": "weather"})
    [call] = answer.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})
    assert answer.tool_choice.model_dump() == {"type": "function", "name": "weather"}
    says(chat, tokenizer, '{"input": "x"}')
    [call] = told(chat, tools=[WEATHER, PATCH], tool_choice={"type": "custom", "name": "patch"}).output
    assert call.type == "custom_tool_call"
    assert call.input == "x"
    properties = schema_of(chat.engine.requests[-1].grammar)["properties"]
    assert properties["input"]["type"] == "string"


def test_a_regex_of_a_custom_tool_is_enforced_where_a_call_is(chat: LiveServer, tokenizer: Tokenizer) -> None:
    says(chat, tokenizer, '{"input": "ab"}')
    form = {"type": "grammar", "syntax": "regex", "definition": "a|ab"}
    [call] = told(chat, tools=[{**PATCH, "format": form}], tool_choice={"type": "custom", "name": "patch"}).output
    assert call.type == "custom_tool_call"
    properties = schema_of(chat.engine.requests[-1].grammar)["properties"]
    assert properties["input"]["pattern"] == "^(?:a|ab)$"
    lark = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
    says(chat, tokenizer, "Hi!")
    told(chat, tools=[{**PATCH, "format": lark}])
    assert "A sentence of this grammar (lark):\\nstart: /a/" in prompt_of(chat, tokenizer)


def test_allowed_tools_are_those_that_are_offered(chat: LiveServer, tokenizer: Tokenizer) -> None:
    says(chat, tokenizer, "Hi!")
    choice = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "custom", "name": "patch"}, {"type": "web_search"}],
    }
    told(chat, tools=[WEATHER, PATCH, {"type": "web_search"}], tool_choice=choice)
    assert '"name": "patch"' in prompt_of(chat, tokenizer)
    assert '"name": "weather"' not in prompt_of(chat, tokenizer)
    says(chat, tokenizer, '[{"name": "patch", "parameters": {"input": "x"}}]')
    [call] = told(chat, tools=[WEATHER, PATCH], tool_choice={**choice, "mode": "required"}).output
    assert call.type == "custom_tool_call"
    assert call.input == "x"


def test_none_offers_nothing(chat: LiveServer, tokenizer: Tokenizer) -> None:
    says(chat, tokenizer, "Hi!")
    told(chat, tools=[WEATHER], tool_choice="none")
    assert "weather" not in prompt_of(chat, tokenizer)


def test_one_call_at_a_time(chat: LiveServer, tokenizer: Tokenizer) -> None:
    says(chat, tokenizer, CALL * 2 + " and more")
    answer = told(chat, tools=[WEATHER], parallel_tool_calls=False)
    assert [item.type for item in answer.output] == ["function_call"]
    assert answer.status == "completed"
    assert len([item for item in told(chat, tools=[WEATHER]).output if item.type == "function_call"]) == 2


def test_a_call_that_was_cut_is_never_a_finished_one(chat: LiveServer, tokenizer: Tokenizer) -> None:
    """A stream has begun to tell of it, and ends its item as incomplete. A whole answer has the words."""
    says(chat, tokenizer, CALL)
    fields: dict[str, Any] = {"model": MODEL, "input": "Hello", "tools": [WEATHER]}
    tokens = len(tokenizer.encode_here(CALL)) - 1
    for limit in (*range(1, tokens, 9), tokens - 2, tokens - 1):
        fields["max_output_tokens"] = limit
        whole: Any = chat.openai.responses.create(**fields)
        events: list[Any] = list(chat.openai.responses.create(**fields, stream=True))
        for answer in (whole, events[-1].response):
            assert answer.status == "incomplete"
            assert answer.incomplete_details.reason == "max_output_tokens"
            assert {item.status for item in answer.output} == {"incomplete"}
        item = events[-1].response.output[0]
        if item.type == "function_call":
            assert '{"city": "Oslo"}'.startswith(item.arguments)
            assert item.arguments != '{"city": "Oslo"}'
        [item] = whole.output
        assert CALL.startswith(item.content[0].text)
        assert limit < tokens - 2 or len(item.content[0].text) > len(CALL) - 10
    assert told(chat, tools=[WEATHER]).status == "completed"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [WEATHER, WEATHER]}, "tools", "same name"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, "tools.name", "match"),
        ({"tools": [{**WEATHER, "shape": 1}]}, "tools.shape", "Unrecognized"),
        ({"tools": [{**PATCH, "format": {"type": "grammar"}}]}, "tools.format", "needs both"),
        ({"tools": [{**NOTES, "tools": [{"name": "x"}]}]}, "tools", "0.tools.0"),
        ({"tools": [{"type": "web_search"}] * 129}, "tools", "128"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice", "'other'"),
        ({"tools": [{"type": "mcp"}], "tool_choice": "required"}, "tool_choice", "mcp cannot be run here"),
        ({"tools": [WEATHER], "tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice", "cannot be forced"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather", "x": 1}}, "tool_choice", "'x'"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "none", "tools": []}},
            "tool_choice",
            "",
        ),
        ({"tools": [WEATHER], "tool_choice": "maybe"}, "tool_choice", "none, auto, required"),
        (
            {
                "tools": [{**PATCH, "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}}],
                "tool_choice": "required",
            },
            "tool_choice",
            "Lark",
        ),
    ],
)
def test_tools_that_cannot_be_used_are_named(chat: LiveServer, fields: dict[str, Any], param: str, words: str) -> None:
    response = chat.http.post("/v1/responses", json={"model": MODEL, "input": "Hello", **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert words in response.json()["error"]["message"]


@pytest.mark.parametrize("where", ["parameters", "output_schema", "allowed_callers", "choice"])
def test_deep_nesting_is_refused(chat: LiveServer, where: str) -> None:
    deep: Any = {}
    for _ in range(300):
        deep = {"properties": deep}
    fields: dict[str, Any] = {"tools": [{**WEATHER, where: deep}]}
    if where == "choice":
        fields = {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather", "x": deep}}
    response = chat.http.post("/v1/responses", json={"model": MODEL, "input": "Hello", **fields})
    assert response.status_code == 400, response.text
    assert "levels" in response.json()["error"]["message"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    "text",
    ["", "plain", 'say "hi"\n\\ \t', "*** Begin\r\n+é 🦉\n", "\x00\x1f</tool_call>", '{"input": "nested"}'],
)
def test_a_custom_input_is_read_in_pieces(text: str, size: int) -> None:
    for raw in (json.dumps({"input": text}), json.dumps({"input": text}, ensure_ascii=False), f'{{"input":"{text}"}}'):
        try:
            expected = json.loads(raw, strict=False)["input"]
        except ValueError:
            continue
        reader = CustomInput()
        pieces = [reader.push(raw[at : at + size]) for at in range(0, len(raw), size)]
        assert "".join(pieces) + reader.flush(is_whole=True) == expected == reader.text


@pytest.mark.parametrize(
    ("raw", "whole", "text"),
    [
        ('{"input": "abc', False, "abc"),
        ('{"input": "abc\\', False, "abc"),
        ('{"input": "\\ud83d', False, ""),
        ('{"input": "\\ud83d"}', True, "\ufffd"),
        ('{"inp', False, '{"inp'),
        ('{"patch": "x"}', True, '{"patch": "x"}'),
        ('{"input": 7}', True, '{"input": 7}'),
        ("{}", True, "{}"),
    ],
)
def test_a_custom_input_that_is_none_is_told_as_it_is(raw: str, whole: bool, text: str) -> None:
    reader = CustomInput()
    assert reader.push(raw) + reader.flush(is_whole=whole) == text
