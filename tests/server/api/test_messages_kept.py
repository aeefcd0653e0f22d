"""What clients keep in a history comes back with it, and no conversation ends because of one bad call."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from longreach.api.schema.requests.chat import ChatRequest
from longreach.api.schema.requests.parse import parse
from longreach.api.schema.requests.typed_decoding import MAX_FREE_BYTES, decode
from longreach.errors import InvalidRequestError
from longreach.text.tokenizer import Tokenizer

from tests.server.api.conftest import LiveServer
from tests.server.api.test_chat import TEMPLATE, WEATHER, ask, prompt_of, says

USER = {"role": "user", "content": "u"}
FUNCTION = {"name": "f", "arguments": '{"x": 1}'}
CALL = {"id": "c", "type": "function", "function": FUNCTION}


def read(message: dict[str, Any], padding: int = 0) -> dict[str, Any]:
    """A message behind another one as the template is given it; a long body is decoded by its types."""
    first = {"role": "user", "content": "x" * padding}
    body = json.dumps({"model": "m", "messages": [first, message]}).encode()
    request = parse(ChatRequest, decode(ChatRequest, body, 10**6) if padding else json.loads(body))
    return request.messages[1].for_template()


LONG = 70_000  # longer than a body that is read at once


@pytest.mark.parametrize("padding", [0, LONG])
@pytest.mark.parametrize(
    "members",
    [
        {"parsed": {"a": [1]}, "refusal": None, "annotations": [{"type": "url_citation"}], "audio": None},
        {"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}], "phase": "final_answer"},
        {"cache_control": {"type": "ephemeral"}, "id": "msg_1", "opts": {"visible": False}, "stranger": None},
        {
            "provider_specific_fields": {"a": {}},
            "thinking_blocks": [{"thinking": "t"}],
            "tool_calls": [],
            "prefix": False,
        },
        {
            "content": [
                {"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}, "id": "p", "stranger": None}
            ]
        },
        {"content": [{"type": "output_text", "text": "s", "annotations": [{"a": 1}], "logprobs": []}]},
        {"content": None, "refusal": "s"},
        {"content": [{"type": "refusal", "refusal": "s"}]},
    ],
)
def test_members_that_clients_keep_change_nothing(members: dict[str, Any], padding: int) -> None:
    assert read({"role": "assistant", "content": "s", **members}, padding) == {"role": "assistant", "content": "s"}


def test_members_that_change_nothing_may_be_long() -> None:
    message = {"role": "assistant", "content": "s", "parsed": ["x" * MAX_FREE_BYTES]}
    assert read(message, LONG) == {"role": "assistant", "content": "s"}


@pytest.mark.parametrize("padding", [0, LONG])
def test_members_of_calls_that_clients_keep_change_nothing(padding: int) -> None:
    kept = {**CALL, "index": 0, "extra_content": {"google": {}}, "stranger": None}
    kept["function"] = {**FUNCTION, "parsed_arguments": {"x": 1}, "stranger": None}
    message = {"role": "assistant", "content": None, "tool_calls": [kept], "reasoning": "hm"}
    assert read(message, padding) == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {"x": 1}}}],
    }


@pytest.mark.parametrize("role", ["user", "assistant", "system", "developer"])
def test_no_parts_are_no_text(role: str) -> None:
    assert read({"role": role, "content": []}) == {"role": role, "content": ""}


def test_an_assistant_or_a_tool_may_have_said_nothing() -> None:
    assert read({"role": "assistant", "content": None}) == {"role": "assistant", "content": ""}
    assert read({"role": "assistant"}) == {"role": "assistant", "content": ""}
    assert read({"role": "tool", "tool_call_id": "c", "content": None})["content"] == ""


@pytest.mark.parametrize("padding", [0, LONG])
@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ({**USER, "frob": 1}, "messages.1.frob", "frob"),
        ({**USER, "content": None}, "messages.1", "`content` is missing"),
        ({**USER, "prefix": True}, "messages.1", "`prefix` belongs to messages of the assistant"),
        ({"role": "assistant", "content": "s", "audio": {"id": "a"}}, "messages.1.audio", "audio"),
        ({**USER, "reasoning": "hm"}, "messages.1", "belong to messages of the assistant"),
    ],
)
def test_what_is_refused_is_named(message: dict[str, Any], param: str, words: str, padding: int) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read(message, padding)
    assert refused.value.param == param
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "not `image_url`"),
        ({"type": "input_audio", "input_audio": {}}, "not `input_audio`"),
        ({"type": "text", "text": "a", "frob": 1}, "no member `frob`"),
        ({"type": "text"}, "`text` must be a string"),
        ({"text": "a"}, "must be an object with a `type`"),
        ("a", "must be an object with a `type`"),
    ],
)
def test_a_part_that_is_refused_is_named_by_its_place(part: object, words: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read({"role": "user", "content": [{"type": "text", "text": "a"}, part]})
    assert refused.value.param == "messages.1.content.1"
    assert words in str(refused.value)


@pytest.mark.parametrize("padding", [0, LONG])
@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ('{"x": 1}', {"x": 1}),
        ("", {}),
        (" \n", {}),
        ('{"x": 123456789012345678901234567890}', {"x": 123456789012345678901234567890}),
        ("Oslo", {"arguments": "Oslo"}),
        ("[1, 2]", {"arguments": "[1, 2]"}),
        ("null", {"arguments": "null"}),
        ('{"x": "cut sh', {"arguments": '{"x": "cut sh'}),
        ('{"x": "\\ud83d"}', {"arguments": '{"x": "\\ud83d"}'}),
        ('{"x": 1} trailing', {"arguments": '{"x": 1} trailing'}),
        ("[" * 5000, {"arguments": "[" * 5000}),
        ('{"x":' * 80 + "1" + "}" * 80, {"arguments": '{"x":' * 80 + "1" + "}" * 80}),
        ("1" * 5000, {"arguments": "1" * 5000}),
    ],
)
def test_a_bad_call_does_not_end_its_conversation(arguments: str, seen: dict[str, Any], padding: int) -> None:
    for name in ("f", "", "f" * 200):
        call = {**CALL, "function": {"name": name, "arguments": arguments}}
        [shown] = read({"role": "assistant", "content": None, "tool_calls": [call]}, padding)["tool_calls"]
        assert shown["function"] == {"name": name, "arguments": seen}


def test_constants_that_json_does_not_have_stay_as_they_were_written() -> None:
    call = {**CALL, "function": {"name": "f", "arguments": '{"x": NaN, "y": -Infinity}'}}
    [shown] = read({"role": "assistant", "content": None, "tool_calls": [call]})["tool_calls"]
    assert json.dumps(shown["function"]["arguments"]) == '{"x": NaN, "y": -Infinity}'


def test_a_text_of_arguments_is_the_one_that_came() -> None:
    request = parse(
        ChatRequest,
        {"model": "m", "messages": [{"role": "assistant", "tool_calls": [
            {**CALL, "function": {"name": "f", "arguments": text}} for text in ('{"x":  1}', "Oslo", "", "{ }")
        ]}]},
    )  # fmt: skip
    [message] = request.messages
    calls = message.for_template(arguments_as_text=True)["tool_calls"]
    texts = [call["function"]["arguments"] for call in calls]
    assert texts == ['{"x":  1}', '{"arguments": "Oslo"}', "{}", "{}"]


@pytest.fixture
def chat(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(template=TEMPLATE.replace("arguments.city", "arguments | tojson")) as live:
        yield live


def test_a_prefix_is_gone_on_with(chat: LiveServer, tokenizer: Tokenizer) -> None:
    says(chat, tokenizer, "and more")
    begun: dict[str, Any] = {"role": "assistant", "content": "Some", "prefix": True}
    assert ask(chat, [USER, begun]).choices[0].message.content == "and more"
    assert prompt_of(chat, tokenizer).endswith("<|im_start|>assistant\nSome")
    with pytest.raises(openai.BadRequestError, match=r"`messages.0.prefix`: only the last message"):
        ask(chat, [begun, USER])


@pytest.mark.parametrize("written", ["Oslo", "[1, 2]", '{"x": 99999999999999999999}'])
def test_what_the_server_answers_it_takes_back(chat: LiveServer, tokenizer: Tokenizer, written: str) -> None:
    says(chat, tokenizer, f'<tool_call>{{"name": "weather", "arguments": {written}}}</tool_call>')
    message = ask(chat, tools=[WEATHER]).choices[0].message.model_dump()
    history: list[Any] = [USER, message]
    if message["tool_calls"]:
        history.append({"role": "tool", "content": "sun", "tool_call_id": message["tool_calls"][0]["id"]})
    says(chat, tokenizer, "Sunny.")
    assert ask(chat, [*history, USER], tools=[WEATHER]).choices[0].message.content == "Sunny."
    assert written.strip("{}") in prompt_of(chat, tokenizer)
