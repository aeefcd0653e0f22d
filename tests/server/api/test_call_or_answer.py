"""Tools together with a form of the answer: one of the two, and never an invented answer in place of a call."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from longreach.text.tokenizer import Tokenizer

from tests.server.api.conftest import LiveServer
from tests.server.api.test_chat import HELLO, TEMPLATE, WEATHER, ask, says
from tests.server.conftest import EOS

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "string"}}, "required": ["n"]}
FORM: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'
INSIDE = json.dumps({"n": CALL})


@pytest.fixture
def chat(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(template=TEMPLATE) as live:
        yield live


@pytest.mark.parametrize("thought", ["", "<think>Hm, <tool_call>.</think>\n\n"])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"n": "1"}', '{"n": "1"}', []),
        (CALL, None, ["Bonn"]),
        (f"{CALL}\n{CALL.replace('Bonn', 'Köln')}", None, ["Bonn", "Köln"]),
        (INSIDE, INSIDE, []),
        ("<tool_", "<tool_", []),
        (f"Look: {CALL}", f"Look: {CALL}", []),
    ],
)
def test_an_answer_is_a_call_or_the_form(
    chat: LiveServer, tokenizer: Tokenizer, text: str, content: str | None, calls: list[str], thought: str
) -> None:
    says(chat, tokenizer, thought + text)
    [choice] = ask(chat, tools=[WEATHER], response_format=FORM).choices
    assert choice.message.content == content
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    told = [json.loads(call.function.arguments)["city"] for call in choice.message.tool_calls or []]  # type: ignore[union-attr]
    assert told == calls
    reasoning = choice.message.to_dict().get("reasoning_content")
    assert reasoning == ("Hm, <tool_call>." if thought else None)


def test_marks_that_are_special_tokens_are_seen(chat: LiveServer, tokenizer: Tokenizer) -> None:
    says(chat, tokenizer, f"a{EOS}b")
    more = {"regex": ".*", "ignore_eos": True}
    [choice] = ask(chat, tools=[WEATHER], max_tokens=3, extra_body=more).choices
    assert (choice.message.content or "").startswith(f"a{EOS}b")


def test_the_grammar_has_both(chat: LiveServer, tokenizer: Tokenizer) -> None:
    says(chat, tokenizer, '{"n": "1"}')
    ask(chat, tools=[WEATHER], response_format=FORM)
    grammar = json.loads(chat.engine.requests[0].grammar or "")
    main, answer, arguments = grammar["grammars"]
    assert "calls | @answer" in main["lark_grammar"]
    assert answer["json_schema"]["properties"] == SCHEMA["properties"]
    assert arguments["json_schema"]["required"] == ["city"]
    for fields in ({"extra_body": {"regex": "[a-z]+"}}, {"extra_body": {"grammar": 'start: "a"'}}):
        ask(chat, tools=[WEATHER], **fields)
        assert "@answer" in (chat.engine.requests[-1].grammar or "")
    ask(chat, tools=[WEATHER], response_format=FORM, tool_choice="none")
    assert "@answer" not in (chat.engine.requests[-1].grammar or "")


def test_reasoning_that_the_prompt_begins_is_part_of_the_answer(
    make_server: Callable[..., LiveServer], tokenizer: Tokenizer
) -> None:
    with make_server(template=TEMPLATE.replace("<think></think>", "<think>\n")) as chat:
        says(chat, tokenizer, f"Hm.</think>\n{CALL}")
        [choice] = ask(chat, tools=[WEATHER], response_format=FORM, reasoning_effort="low").choices
        assert choice.message.to_dict()["reasoning_content"] == "Hm."
        assert choice.finish_reason == "tool_calls"
        main = json.loads(chat.engine.requests[0].grammar or "")["grammars"][0]["lark_grammar"]
        assert main.startswith("start: thought BLANK? (calls | @answer)")


LLAMA = '<|start_header_id|> "parameters": '
HARMONY = "<|channel|><|message|>"
FINAL = '<|channel|>final <|constrain|>json<|message|>{"n": "<|call|>"}'


@pytest.mark.parametrize(
    ("shown", "text", "content", "calls"),
    [
        (LLAMA, '{"name": "weather", "parameters": {"city": "Bonn"}}', None, 1),
        (LLAMA, '<|python_tag|>{"name": "weather", "parameters": {"city": "Bonn"}}', None, 1),
        (LLAMA, '{"n": "<|python_tag|>{\\"name\\": "}', '{"n": "<|python_tag|>{\\"name\\": "}', 0),
        (HARMONY, f"<|channel|>analysis<|message|>Hm.<|call|><|start|>assistant{FINAL}", '{"n": "<|call|>"}', 0),
        (HARMONY, '<|channel|>commentary to=functions.weather <|message|>{"city": "Bonn"}', None, 1),
    ],
)
def test_formats_without_a_mark_of_calls_may_have_a_form(
    make_server: Callable[..., LiveServer],
    tokenizer: Tokenizer,
    shown: str,
    text: str,
    content: str | None,
    calls: int,
) -> None:
    template = TEMPLATE.replace("tool_call>", "call>").replace("assistant\n{%", "assistant{%")
    with make_server(template=f"{template}{{# {shown} #}}") as chat:
        says(chat, tokenizer, text)
        [choice] = ask(chat, tools=[WEATHER], response_format=FORM).choices
        assert (choice.message.content, len(choice.message.tool_calls or [])) == (content, calls)
        assert "@answer" in (chat.engine.requests[0].grammar or "")


def test_forms_that_no_grammar_can_tell_from_a_call_are_refused(make_server: Callable[..., LiveServer]) -> None:
    template = TEMPLATE.replace("tool_call>", "call>")
    forms: list[tuple[dict[str, Any], str]] = [
        ({"response_format": {"type": "json_object"}}, "could be a call of a tool"),
        ({"extra_body": {"regex": "a"}}, "cannot be set together with `tools`"),
    ]
    with make_server(template=f"{template}{{# {LLAMA} #}}") as chat:
        for fields, words in forms:
            with pytest.raises(openai.BadRequestError, match=words) as refused:
                ask(chat, tools=[WEATHER], **fields)
            assert refused.value.param == ("regex" if "extra_body" in fields else "response_format")
        assert not chat.engine.requests


def test_a_schema_of_a_tool_that_cannot_be_followed_is_named(chat: LiveServer) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"uniqueItems": True}}}}
    tools: list[Any] = [{"type": "function", "function": function}]
    with pytest.raises(openai.BadRequestError, match=r"at `tools.0.function.parameters#/properties/a`") as refused:
        ask(chat, HELLO, tools=tools, response_format=FORM)
    assert refused.value.param == "tools"


def test_arguments_in_tags_are_free_and_their_schemas_are_not_looked_at(
    make_server: Callable[..., LiveServer], tokenizer: Tokenizer
) -> None:
    with make_server(template=f"{TEMPLATE}{{# <function= #}}") as chat:
        parameters = {"type": "object", "properties": {"city": {"type": "string"}, "b": {"uniqueItems": True}}}
        tools: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
        text = "<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n</function>\n</tool_call>"
        says(chat, tokenizer, text)
        [choice] = ask(chat, tools=tools, response_format=FORM).choices
        assert [call.function.arguments for call in choice.message.tool_calls or []] == ['{"city": "Bonn"}']  # type: ignore[union-attr]
