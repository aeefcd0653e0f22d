"""`strict` of functions that the model may choose to call: enforced, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from longreach.text.tokenizer import Tokenizer

from tests.server.api import anthropic_client
from tests.server.api.conftest import MODEL, LiveServer
from tests.server.api.test_chat import HELLO, TEMPLATE, WEATHER, ask, says
from tests.server.api.test_responses import WEATHER as NOT_STRICT
from tests.server.api.test_responses import ask as respond

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'
FLAT = {name: member for name, member in NOT_STRICT.items() if name != "strict"}
HARD = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
REGEX: Any = {"type": "custom", "name": "day", "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}}


@pytest.fixture
def chat(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(template=TEMPLATE) as live:
        yield live


def tool(name: str = "weather", strict: bool | None = True, parameters: Any = None) -> Any:
    """A function of a chat."""
    function = {**WEATHER["function"], "name": name, "strict": strict}  # type: ignore[dict-item]
    return {"type": "function", "function": function | ({} if parameters is None else {"parameters": parameters})}


def followed(server: LiveServer) -> dict[str, Any]:
    """The grammars of the last answer, by their names; the main one has none."""
    grammar = server.engine.requests[-1].grammar
    return {} if grammar is None else {one.get("name", ""): one for one in json.loads(grammar)["grammars"]}


def test_a_strict_function_is_called_by_its_schema_and_words_stay_free(chat: LiveServer, tokenizer: Tokenizer) -> None:
    says(chat, tokenizer, f"<think>Hm.</think>I look. {CALL}")
    [choice] = ask(chat, tools=[tool(), tool("other", None)]).choices
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    grammars = followed(chat)
    assert {*grammars} == {"", "arguments0", "object"}
    assert grammars["arguments0"]["json_schema"]["required"] == ["city"]
    assert grammars["arguments0"]["json_schema"]["additionalProperties"] is False
    assert "piece*" in grammars[""]["lark_grammar"]


@pytest.mark.parametrize("strict", [False, None])
@pytest.mark.parametrize("choice", ["auto", "none"])
def test_nothing_is_followed_that_nobody_asked_for(
    chat: LiveServer, tokenizer: Tokenizer, strict: bool | None, choice: str
) -> None:
    says(chat, tokenizer, "Hello")
    ask(chat, tools=[tool(strict=strict)], tool_choice=choice)
    assert followed(chat) == {}
    ask(chat, tools=[tool()], tool_choice="none")
    assert followed(chat) == {}


def test_a_strict_schema_that_cannot_be_followed_is_named(chat: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError, match=r"tools.1.function.parameters#/properties/a") as refused:
        ask(chat, HELLO, tools=[tool(), tool("other", parameters=HARD)])
    assert refused.value.param == "tools"
    assert not chat.engine.requests


def test_in_responses_strict_is_the_default(chat: LiveServer, tokenizer: Tokenizer) -> None:
    says(chat, tokenizer, CALL)
    hard = {**FLAT, "name": "hard", "parameters": HARD}
    free = {**FLAT, "name": "free", "strict": False}
    respond(chat, tools=[FLAT, hard, free, REGEX, {"type": "custom", "name": "patch"}])
    grammars = followed(chat)
    assert {*grammars} == {"", "arguments0", "arguments1", "arguments3", "object"}
    assert grammars["arguments0"]["json_schema"]["required"] == ["city"]
    assert "properties" not in grammars["arguments1"]["json_schema"]  # it cannot be followed, and was not asked for
    assert grammars["arguments3"]["json_schema"]["properties"]["input"]["pattern"] == "^(?:[0-9]+)$"
    respond(chat, tools=[free])
    assert followed(chat) == {}
    with pytest.raises(openai.BadRequestError, match=r"uniqueItems"):
        respond(chat, tools=[{**hard, "strict": True}])


def test_what_a_default_makes_too_large_is_free(make_server: Callable[..., LiveServer], tokenizer: Tokenizer) -> None:
    large = {"type": "object", "properties": {"a": {"enum": [f"{number:09}" for number in range(200)]}}}
    with make_server(template=TEMPLATE, max_grammar_bytes=2000) as chat:
        says(chat, tokenizer, "Hello")
        respond(chat, tools=[{**FLAT, "parameters": large}])
        assert followed(chat) == {}
        respond(chat, tools=[{**FLAT, "parameters": large}, {**FLAT, "name": "b", "strict": True}])
        assert {*followed(chat)} == {"", "arguments1", "object"}


def test_a_strict_tool_of_messages_is_followed(make_server: Callable[..., LiveServer], tokenizer: Tokenizer) -> None:
    with make_server(template=anthropic_client.TEMPLATE, max_model_len=4096) as live:
        says(live, tokenizer, f"I look. {anthropic_client.CALL}")
        whole = anthropic_client.ask(live, tools=[{**anthropic_client.WEATHER, "strict": True}])
        assert whole["stop_reason"] == "tool_use"
        assert "arguments0" in followed(live)
        anthropic_client.ask(live, tools=[anthropic_client.WEATHER])
        assert followed(live) == {}


@pytest.fixture
def messages(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(template=anthropic_client.TEMPLATE, max_model_len=2**20) as live:
        yield live


def named_tools(count: int, parameters: Callable[[int], dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
    """Tools of `/v1/messages` with names of 40 characters."""
    names = [f"tool_{number}".ljust(40, "x") for number in range(count)]
    return [{"name": name, "input_schema": {"type": "object", **parameters(n)}, **more} for n, name in enumerate(names)]


def of_its_own(number: int) -> dict[str, Any]:
    members = {f"a{number}": {"type": "string"}}
    return {"properties": members, "required": [*members], "additionalProperties": False}


@pytest.mark.parametrize("parameters", [lambda _: {}, of_its_own], ids=["alike", "different"])
def test_as_many_tools_as_there_may_be(
    messages: LiveServer, tokenizer: Tokenizer, parameters: Callable[[int], dict[str, Any]]
) -> None:
    """A grammar grows by what the caller wrote of the arguments, and by the names."""
    tools = named_tools(512, parameters)
    name, given = tools[-1]["name"], dict.fromkeys(parameters(511).get("required", []), "x")
    says(messages, tokenizer, json.dumps([{"name": name, "parameters": given}]))
    [block] = anthropic_client.ask(messages, tools=tools, tool_choice={"type": "any"})["content"]
    assert (block["name"], block["input"]) == (name, given)
    [grammar] = followed(messages).values()
    assert name in json.dumps(grammar)
    says(messages, tokenizer, json.dumps(given))
    anthropic_client.ask(messages, tools=tools, tool_choice={"type": "tool", "name": name})
    [grammar] = followed(messages).values()
    assert name not in json.dumps(grammar)
    says(messages, tokenizer, "Hello")
    anthropic_client.ask(messages, tools=named_tools(512, parameters, strict=True))
    arguments = [one for one in followed(messages) if one.startswith("arguments")]
    assert len(arguments) == len({str(parameters(number)) for number in range(512)})


def test_what_callers_write_of_arguments_is_bounded(messages: LiveServer) -> None:
    tools = named_tools(512, lambda number: {"properties": {f"a{number}": {"enum": ["x" * 90, "y" * 90]}}})
    refused = messages.http.post(
        "/v1/messages",
        json={
            "model": MODEL,
            "max_tokens": 9,
            "messages": [{"role": "user", "content": "Hi"}],
            "tools": tools,
            "tool_choice": {"type": "any"},
        },
    ).json()["error"]
    assert refused["code"] == "grammar_too_large"
    assert refused["param"] == "tools"
    assert "65536" in refused["message"]
