"""Long bodies are decoded by the types of their fields: they stop at the first thing that is wrong."""

from __future__ import annotations

import tracemalloc
from typing import Any

import orjson
import pytest
from longreach.api.schema.requests import typed_decoding as typed
from longreach.api.schema.requests.chat import ChatRequest
from longreach.api.schema.requests.completions import CompletionRequest
from longreach.api.schema.requests.messages import CountTokensRequest, MessageRequest
from longreach.api.schema.requests.parse import parse
from longreach.api.schema.requests.responses import ResponseRequest
from longreach.api.schema.requests.tokenize import DetokenizeRequest, TokenizeRequest
from longreach.errors import InvalidRequestError

LONG = "The owl. " * 20_000
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"a": {"type": "integer"}}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
SOUND: list[tuple[type, dict[str, Any]]] = [
    (CompletionRequest, {"prompt": LONG, "temperature": 0, "stop": ["a", "b"], "seed": 7, "logit_bias": {"1": -1.5}}),
    (CompletionRequest, {"prompt": [LONG, LONG], "stream": True, "stream_options": {"include_usage": True}}),
    (CompletionRequest, {"prompt": [*range(30_000)], "attention": {"policy": "window", "size": 4096}, "user": None}),
    (CompletionRequest, {"prompt": [[*range(9_000)], [5] * 9_000], "attention": "window:4096:4"}),
    (CompletionRequest, {"prompt": LONG, "stop": None, "service_tier": "flex", "suffix": ""}),
    (
        ChatRequest,
        {
            "messages": [
                {"role": "system", "content": LONG},
                {"role": "user", "content": [{"type": "text", "text": LONG}], "name": "owl"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": LONG, "tool_call_id": "c1"},
            ],
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "look"}},
        },
    ),
    (ChatRequest, {"messages": [{"role": "user", "content": "a"}] * 5_000, "response_format": {"type": "text"}}),
    (ResponseRequest, {"input": LONG, "text": {"format": {"type": "json_object"}}, "metadata": {"a": "b"}}),
    (ResponseRequest, {"input": [{"role": "user", "content": [{"type": "input_text", "text": LONG}]}]}),
    (TokenizeRequest, {"prompt": LONG, "parse_special": False}),
    (DetokenizeRequest, {"tokens": [*range(30_000)]}),
    (
        CompletionRequest,
        {"prompt": LONG, "user": "me", "metadata": {"a": "b"}, "use_beam_search": False, "top_k": 20.0},
    ),
    (ChatRequest, {"messages": [{"role": "user", "content": LONG, "no_such": None}], "nor": None, "this_one": None}),
]


def decode(model: type, body: dict[str, Any] | bytes, most_tokens: int = 100_000) -> dict[str, Any]:
    return typed.decode(model, body if isinstance(body, bytes) else orjson.dumps(body), most_tokens)


@pytest.mark.parametrize(("model", "body"), SOUND)
def test_sound_bodies_are_what_they_are(model: type, body: dict[str, Any]) -> None:
    body = {"model": "tiny-owl", **body}
    assert decode(model, body) == body
    assert parse(model, decode(model, body)) == parse(model, body)


IN_FUNCTION = '{"tools":[{"type":"function","function":{"name":"a","parameters":{"a":['
IN_PARTS = '{"messages":[{"role":"user","content":['
MISSING = "missing_required_parameter"
BOMBS = [
    (CompletionRequest, '{"prompt":[', "[],", "[]]}", "prompt", "invalid_value"),
    (CompletionRequest, '{"prompt":[', "[1],", "[1]]}", "prompt", "invalid_value"),
    (CompletionRequest, '{"prompt":[', "{},", "{}]}", "prompt", "invalid_type"),
    (CompletionRequest, '{"prompt":[', '"",', '""]}', "prompt", "invalid_value"),
    (CompletionRequest, '{"prompt":[', "1,", "1]}", "prompt", "context_length_exceeded"),
    (CompletionRequest, '{"prompt":[', "1.5,", "1.5]}", "prompt", "context_length_exceeded"),
    (CompletionRequest, '{"prompt":{"a":[', "[],", "[]]}}", "prompt", "invalid_type"),
    (CompletionRequest, '{"prompt":', "[", "", None, "invalid_json"),
    (CompletionRequest, '{"prompt":"a"', " ", "", None, "invalid_json"),
    (CompletionRequest, '{"zz":[', "{},", "{}]}", "zz", "unknown_parameter"),
    (CompletionRequest, "{", '"zz":1,', '"z":1}', "zz", "unknown_parameter"),
    (CompletionRequest, '{"a":null,', '"zz":1,', '"b":null}', "zz", "unknown_parameter"),
    (
        ChatRequest,
        '{"messages":[',
        '{"role":"user","zz":null},',
        '{"role":"user","zz":1}]}',
        "messages.",
        "unknown_parameter",
    ),
    (CompletionRequest, '{"stop":[', "{},", "{}]}", "stop.0", "invalid_type"),
    (CompletionRequest, '{"stop":[', '"",', '""]}', "stop", "invalid_value"),
    (CompletionRequest, '{"logit_bias":{', '"1":[],', '"1":[]}}', "logit_bias", "invalid_type"),
    (CompletionRequest, '{"temperature":[', "[],", "[]]}", "temperature", "invalid_type"),
    (CompletionRequest, '{"attention":[', "[],", "[]]}", "attention", "invalid_value"),
    (CompletionRequest, '{"response_format":{"zz":[', "[],", "[]]}}", "response_format.zz", "unknown_parameter"),
    (ChatRequest, '{"messages":[', "{},", "{}]}", "messages.0.role", MISSING),
    (ChatRequest, IN_PARTS, "{},", "{}]}]}", "messages.0.content.0.type", MISSING),
    (ChatRequest, '{"messages":[', '{"role":"user","content":"a"},', '{"role":"user"}]}', "messages", "invalid_value"),
    (ChatRequest, '{"tools":[', "{},", "{}]}", "tools.0.type", MISSING),
    (ChatRequest, '{"metadata":{"a":[', "[],", "[]]}}", "metadata", "invalid_type"),
    (ChatRequest, IN_FUNCTION, "{},", "{}]}}}]}", "tools.0.function.parameters", "invalid_value"),
    (ResponseRequest, '{"input":[', "{},", "{}]}", "input.0", "invalid_type"),
    (ResponseRequest, '{"input":[', '{"id": null},', "{}]}", "input.0", "invalid_type"),
    (ResponseRequest, '{"input":[{"content":[', "{},", "{}]}]}", "input.0.content.0.type", MISSING),
    (ResponseRequest, '{"input":[', "[],", "[]]}", "input.0", "invalid_type"),
    (ResponseRequest, '{"tools":[', "{},", "{}]}", "tools", "invalid_value"),
    (ResponseRequest, '{"include":[', '"a",', '"a"]}', "include", "invalid_value"),
    (MessageRequest, '{"tools":[', '{"name":"a"},', "{}]}", "tools", "invalid_value"),
    (MessageRequest, '{"stop_sequences":[', '"a",', '"a"]}', "stop_sequences", "invalid_value"),
    (MessageRequest, IN_PARTS, "{},", "{}]}]}", "messages.0.content.0.type", MISSING),
    (CountTokensRequest, '{"system":[', "{},", "{}]}", "system.0.type", MISSING),
    (TokenizeRequest, '{"messages":[', "[],", "[]]}", "messages.0", "invalid_type"),
    (DetokenizeRequest, '{"tokens":[', "[],", "[]]}", "tokens", "context_length_exceeded"),
    (DetokenizeRequest, "[", "[],", "[]]", None, "invalid_type"),
]


@pytest.mark.parametrize(("model", "start", "unit", "end", "param", "code"), BOMBS)
def test_bombs_are_refused_before_they_are_objects(
    model: type, start: str, unit: str, end: str, param: str | None, code: str
) -> None:
    body = (start + unit * (2**23 // len(unit)) + end).encode()
    typed._shape(model)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError) as error:
            decode(model, body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert error.value.code == code
    assert error.value.param == param or (param == "messages." and str(error.value.param).endswith(".zz"))
    assert len(error.value.message) < 600
    # Copies of bytes, and pointers for lists whose elements are all sound; objects would be twenty times as much.
    assert peak < 8 * len(body)


def test_null_is_taken_under_a_bounded_number_of_unknown_names() -> None:
    strangers: dict[str, Any] = {f"stranger{number}": None for number in range(typed._MOST_STRANGERS)}
    body = {"model": "tiny-owl", "prompt": LONG, **strangers}
    assert parse(CompletionRequest, decode(CompletionRequest, body)).prompt == [LONG]
    with pytest.raises(InvalidRequestError) as error:
        decode(CompletionRequest, {**body, "one_more": None})
    assert (error.value.param, error.value.code) == ("one_more", "unknown_parameter")


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "\x00", "\x1f"])
def test_names_that_no_type_can_have_are_refused(name: str) -> None:
    for body in ({"prompt": LONG, name: None}, {"prompt": LONG, "response_format": {name: None, "a": "b" * 20_000}}):
        with pytest.raises(InvalidRequestError) as error:
            decode(CompletionRequest, body)
        assert error.value.code == "unknown_parameter"
        assert error.value.param in (name, f"response_format.{name}")


def test_what_may_be_any_json_is_bounded_in_all() -> None:
    tool = {"type": "function", "function": {"name": "a", "parameters": {"properties": {"a": "b" * 200_000}}}}
    with pytest.raises(InvalidRequestError, match=r"tools\.5\.function\.parameters.*1048576 bytes") as error:
        decode(ChatRequest, {"messages": [], "tools": [tool] * 6})
    assert error.value.code == "invalid_value"


def test_short_members_of_long_bodies_are_refused_in_the_models_words() -> None:
    body = {"model": "tiny-owl", "prompt": LONG, "temperature": "hot"}
    with pytest.raises(InvalidRequestError) as ours:
        parse(CompletionRequest, decode(CompletionRequest, body))
    with pytest.raises(InvalidRequestError) as theirs:
        parse(CompletionRequest, body)
    assert ours.value.body() == theirs.value.body()
